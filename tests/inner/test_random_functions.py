"""Random models with random function calls: every way against the reference."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxcapture as fxc
from fxcapture.testing.reference import eager_reference
from tests.inner.test_functions import assert_same

#: What a module may do to its tensor: name to function.
STEPS: dict[str, Any] = {
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: torch.softmax(x, -1),
    "neg": operator.neg,
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * x,
    "div": lambda x: x / 2,
    "add_": lambda x: x.clone().add_(1),
    "imul": lambda x: operator.imul(x.clone(), 0.5),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "topk": lambda x: x + x.topk(2).values.sum(),
    "matmul": lambda x: x @ x.mT @ x,
    "getitem": lambda x: x[..., [1, 0, 2, 3]],
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)).flatten(-2),
    "named": lambda x: fxc.named("here", x),
    "clone": lambda x: x.clone(),
}
NAMES = [
    "silu", "tanh", "sigmoid", "softmax", "neg", "add", "sub", "mul", "div",
    "normalize", "chunk", "cat", "topk", "matmul", "getitem", "layer_norm", "linear",
    "unflatten", "flatten", "here", "clone", "sum",
]  # fmt: skip

#: A module: what it does, step by step; a module in it is called or called directly.
Plan = tuple[Any, ...]
LEAF: Plan = ("linear",)


class Random(nn.Module):
    def __init__(self, plan: Plan, breaks: bool) -> None:
        super().__init__()
        self.plan = plan
        self.breaks = breaks
        self.parts = nn.ModuleDict()
        for i, step in enumerate(plan):
            if isinstance(step, tuple):
                part = Random(step[1], breaks) if step[1] != LEAF else nn.Linear(4, 4)
                self.parts[f"p{i}"] = part

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, step in enumerate(self.plan):
            if step == "helper":
                x = self.helper(x)
            elif step == "break":
                if self.breaks:
                    torch._dynamo.graph_break()
            elif isinstance(step, tuple):
                if step[0] == "direct":
                    x = self.parts[f"p{i}"].forward(x)
                else:
                    x = self.parts[f"p{i}"](x)
            else:
                x = STEPS[step](x)
        return x


plain = st.sampled_from([*STEPS, "helper", "break"])
inner = st.lists(plain, min_size=1, max_size=4).map(tuple)
parts = st.tuples(st.sampled_from(["call", "direct"]), st.one_of(st.just(LEAF), inner))
middle = st.lists(st.one_of(plain, parts), min_size=1, max_size=4).map(tuple)
plans = st.lists(
    st.one_of(plain, st.tuples(st.just("call"), middle), parts),
    min_size=1,
    max_size=5,
).map(tuple)
taps = st.builds(
    lambda name, index, whole, select: fxc.Tap(
        f"**::{name}" + ("" if index is None else f"[{index}]"),
        point="output" if whole else "input",
        select=select,
        optional=True,
    ),
    st.sampled_from(NAMES),
    st.sampled_from([None, None, 0, 1, -1]),
    st.sampled_from([True, True, False]),
    st.sampled_from([None, None, [0], [-1]]),
)
specs = st.lists(taps, min_size=1, max_size=3).map(
    lambda found: {f"r{i}": tap for i, tap in enumerate(found)}
)

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


WAYS = ("pieces", "functional", "export", "regions")


def check(plan: Plan, spec: dict[str, fxc.Tap], ways: Collection[str]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Random(plan, breaks=False).eval()
    found = {}
    with torch.no_grad():
        expected = eager_reference(model, fxc.CaptureSpec(spec), (X,)).records
        found["whole"] = fxc.compile(model, spec, backend="eager", fullgraph=True)(X)[1]
        if "pieces" in ways:
            broken = Random(plan, breaks=True).eval()
            broken.load_state_dict(model.state_dict())
            found["pieces"] = fxc.compile(broken, spec, backend="eager")(X)[1]
        if "functional" in ways:
            function, params, buffers = fxc.functional(model, spec)
            found["functional"] = function(params, buffers, X)[1]
        if "export" in ways:
            found["export"] = fxc.export(model, (X,), spec=spec)(X)[1]
        if "regions" in ways and model.parts:
            regions = fxc.compile(model, spec, backend="eager", regions="parts.*")
            found["regions"] = regions(X)[1]
    for way, records in found.items():
        for name in spec:
            hypothesis.note(f"{way} {name}")
            assert_same(records[name], expected[name])


COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=50, **COMMON)  # type: ignore[arg-type]
@given(plans, specs, st.sampled_from(WAYS))
def test_random_function_calls(plan: Plan, spec: dict[str, fxc.Tap], way: str) -> None:
    check(plan, spec, [way])


@pytest.mark.nightly
@settings(max_examples=500, **COMMON)  # type: ignore[arg-type]
@given(plans, specs)
def test_many_random_function_calls(plan: Plan, spec: dict[str, fxc.Tap]) -> None:
    check(plan, spec, WAYS)
