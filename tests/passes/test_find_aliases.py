"""Copies are made only where a write could show, and each tap says why."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxcapture as fxc
from fxcapture.passes.analyses.effects import written_args
from fxcapture.passes.base import TapKey
from fxcapture.passes.insert_taps import COPIES


@torch.library.custom_op("fxcapture_tests::scale_", mutates_args={"x"})
def _scale(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("fxcapture_tests::scaled", mutates_args=())
def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@_scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


class Ends(nn.Module):
    """One tapped linear layer, and what happens to its value afterwards."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.tapped = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.tapped(x), x)


def reasons(captured: fxc.CapturedModule) -> list[str]:
    copies: dict[TapKey, str] = captured.graphs[-1].meta[COPIES]
    return list(copies.values())


def _in_place(f: Any) -> Any:
    def after(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        f(h)
        return h * 2

    return after


def _set_item(h: torch.Tensor) -> None:
    h[0] = 1.0


def _through_a_view(h: torch.Tensor) -> None:
    h.view(-1)[1:].fill_(0.0)


def _checkpointed(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda t: t.sin() * 2, h, use_reentrant=False)


WRITTEN = {
    "method": lambda h: h.add_(1),
    "function": lambda h: torch.relu_(h),
    "functional": lambda h: F.relu_(h),
    "inplace by keyword": lambda h: F.relu(h, inplace=True),
    "inplace by position": lambda h: F.relu(h, True),
    "operator": lambda h: operator.iadd(h, 1),
    "item": _set_item,
    "view": _through_a_view,
    "out": lambda h: torch.sin(torch.ones(2, 4), out=h),
    "custom operator": lambda h: torch.ops.fxcapture_tests.scale_(h, 3.0),
    "foreach": lambda h: torch._foreach_add_([h], 1.0),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", WRITTEN)
def test_a_value_that_is_written_later_is_copied(how: str, backend: str) -> None:
    model = Ends(_in_place(WRITTEN[how]))
    captured = fxc.compile(model, {"h": "tapped"}, backend=backend, fullgraph=True)
    with torch.no_grad():
        found = fxc.verify(captured, torch.randn(2, 4))

    assert found.differences == {"h": 0.0}
    assert "copied: may be written by" in reasons(captured)[0]


PURE = {
    "function": lambda h, x: torch.relu(h),
    "method": lambda h, x: h.sin() + h,
    "custom operator": lambda h, x: torch.ops.fxcapture_tests.scaled(h, 2.0),
    "write to a copy": lambda h, x: h.clone().add_(1),
    "checkpoint": _checkpointed,
    "sum of two": lambda h, x: (h + x).add_(1),
    "layer norm": lambda h, x: F.layer_norm(h, (4,)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", PURE)
def test_a_value_that_nothing_writes_to_is_not_copied(what: str, backend: str) -> None:
    captured = fxc.compile(
        Ends(PURE[what]), {"h": "tapped"}, backend=backend, fullgraph=True
    )
    with torch.set_grad_enabled(what != "custom operator"):
        found = fxc.verify(captured, torch.randn(2, 4))

    assert found.differences == {"h": 0.0}
    assert reasons(captured) == ["no copy: nothing writes to it"]


ALIASED = {
    "the output": (lambda h, x: h, "shares memory with an output"),
    "a view of the output": (lambda h, x: h[0], "shares memory with an output"),
    "a part of the output": (
        lambda h, x: (h.sin(), [h]),
        "shares memory with an output",
    ),
}


@pytest.mark.parametrize("what", ALIASED)
def test_a_value_that_the_caller_can_reach_is_copied(what: str) -> None:
    after, reason = ALIASED[what]
    captured = fxc.compile(Ends(after), {"h": "tapped"}, backend="eager")
    output, records = captured(torch.randn(2, 4))
    expected = records["h"][0].clone()
    flat = output if isinstance(output, torch.Tensor) else output[1][0]
    with torch.no_grad():
        flat.fill_(7.0)

    assert reason in reasons(captured)[0]
    assert torch.equal(records["h"][0], expected)


def test_inputs_parameters_and_buffers_are_recorded_by_value() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("table", torch.randn(4))

        def forward(self, x: torch.Tensor) -> Any:
            return x, self.weight, self.table, x.detach()[:1]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Returns()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, w, b, _ = self.inner(x)
            return x * w * b

    model = Outer()
    captured = fxc.compile(model, {"v": "inner"}, backend="eager")
    x = torch.randn(2, 4)
    expected = [x.clone(), model.inner.weight.clone(), model.inner.table.clone()]
    _, records = captured(x)
    with torch.no_grad():
        x.zero_(), model.inner.weight.zero_(), model.inner.table.zero_()

    assert all("shares memory with the input" in r for r in reasons(captured))
    assert all(map(torch.equal, records["v"][0][:3], expected))


def test_two_records_in_one_memory_do_not_share_it() -> None:
    class Same(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = Same()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()

    captured = fxc.compile(Outer(), {"a": "first", "b": "second"}, backend="eager")
    _, records = captured(torch.randn(2, 4))

    assert reasons(captured) == [
        "no copy: nothing writes to it",
        "copied: shares memory with 'first' (Linear), call 0",
    ]
    a, b = records["a"][0], records["b"][0]
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_reduced_value_keeps_only_its_own_bytes(backend: str) -> None:
    spec = {"h": fxc.Tap("tapped", reduce=lambda h: h[:, -1])}
    captured = fxc.compile(
        Ends(lambda h, x: h.sin()), spec, backend=backend, fullgraph=True
    )
    with torch.no_grad():
        _, records = captured(torch.randn(2, 50, 4))
    (value,) = records["h"]

    assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert reasons(captured) == [
        "copied: a view of a larger tensor, which would be kept alive"
    ]


def test_the_first_input_is_not_copied_where_nothing_writes_to_it() -> None:
    class Outer(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.layers = nn.ModuleList([nn.Sequential(nn.ReLU(inplace), nn.Tanh())])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            for layer in self.layers:
                h = layer(h)
            return h.sum()

    for inplace in (False, True):
        spec = {"h": fxc.Tap("layers.*", initial=True)}
        captured = fxc.compile(Outer(inplace), spec, backend="aot_eager")
        found = fxc.verify(captured, torch.randn(2, 4))
        first = next(
            r
            for k, r in captured.graphs[0].meta[COPIES].items()
            if k.leaf.kind == "entry"
        )

        assert found.differences == {"h": 0.0}
        assert first.startswith("copied: may be written" if inplace else "no copy")


def test_gradients_flow_through_values_that_are_not_copied() -> None:
    torch.manual_seed(0)
    model = Ends(lambda h, x: h.sin())
    x = torch.randn(2, 4)
    captured = fxc.compile(model, {"h": "tapped"}, backend="aot_eager")
    output, records = captured(x)
    (output.sum() + (records["h"][0] ** 2).sum()).backward()
    got = model.tapped.weight.grad
    model.tapped.weight.grad = None
    h = model.tapped(x)
    (h.sin().sum() + (h**2).sum()).backward()

    torch.testing.assert_close(got, model.tapped.weight.grad)


def test_dynamic_sizes_add_no_guard_and_no_copy() -> None:
    captured = fxc.compile(
        Ends(lambda h, x: h.sin()), {"h": "tapped"}, backend="aot_eager", dynamic=True
    )
    for length in (3, 5, 9):
        assert fxc.verify(captured, torch.randn(length, 4)).differences["h"] == 0.0

    assert len(captured.graphs) == 1
    assert reasons(captured) == ["no copy: nothing writes to it"]


def test_what_is_unknown_counts_as_writing() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    unknown = graph.call_function(_in_place, (x,))
    module = graph.call_module("anything", (x,))
    known = graph.call_function(torch.sin, (x,))
    gm = torch.fx.GraphModule({"anything": nn.Identity()}, graph)

    assert written_args(gm, unknown) == (x,)
    assert written_args(gm, module) == (x,)
    assert written_args(gm, known) == ()


def test_explain_says_what_was_copied_and_why() -> None:
    captured = fxc.compile(
        Ends(_in_place(lambda h: h.add_(1))), {"h": "tapped"}, backend="eager"
    )
    captured(torch.randn(2, 4))

    assert "copied: may be written by add_ (add_) later" in captured.explain()
