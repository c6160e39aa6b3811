"""Names of function calls and of their arguments are the same in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxcapture as fxc
from fxcapture.errors import NeverCalledError
from fxcapture.testing.reference import eager_reference
from tests.inner.test_functions import assert_same

Function = Callable[[torch.Tensor], Any]
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) - 0.5


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def _whole(model: nn.Module, spec: Any, x: torch.Tensor) -> Any:
    return fxc.compile(model, spec, backend="eager", fullgraph=True)(x)[1]


def _outside(model: nn.Module, spec: Any, x: torch.Tensor) -> Any:
    """In pieces, the module's own calls outside of graphs."""
    captured = fxc.compile(model, spec, backend="eager")
    captured._fxc_parts()[2].break_reason = "asked for by the test"
    return captured(x)[1]


def _functional(model: nn.Module, spec: Any, x: torch.Tensor) -> Any:
    function, params, buffers = fxc.functional(model, spec)
    return function(params, buffers, x)[1]


def _export(model: nn.Module, spec: Any, x: torch.Tensor) -> Any:
    return fxc.export(model, (x,), spec=spec)(x)[1]


def _reference(model: nn.Module, spec: Any, x: torch.Tensor) -> Any:
    return eager_reference(model, fxc.CaptureSpec(spec), (x,)).records


WAYS = {
    "whole": _whole,
    "outside": _outside,
    "functional": _functional,
    "export": _export,
    "reference": _reference,
}

#: What the code calls, the name of the call, and the argument that is its first.
ARGUMENTS: dict[str, tuple[Function, str, Callable[[torch.Tensor], Any]]] = {
    "power": (lambda x: x**2, "pow", lambda x: x),
    "reflected": (lambda x: (2**x) + (1 - x) + 1 / x, "sub", lambda x: 1),
    "by keyword": (lambda x: torch.add(input=x, other=1, alpha=2), "add", lambda x: x),
    "a Python function": (lambda x: F.softmax(input=x, dim=-1), "softmax", lambda x: x),
    "a list": (lambda x: torch.cat(tensors=[x, x]), "cat", lambda x: [x, x]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ARGUMENTS)
@torch.no_grad()
def test_the_first_argument_of_a_call(case: str, way: str) -> None:
    function, name, argument = ARGUMENTS[case]
    spec = {
        "first": fxc.Tap(f"::{name}[-1]", point="input"),
        "by position": fxc.Tap(f"::{name}[-1]", point="input", output=0),
    }
    records = WAYS[way](Calls(function), spec, X.clone())
    for record in spec:
        assert_same(records[record], [argument(X)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keywords", [("input", "other"), ("x", "x2"), ("a", "other")])
@torch.no_grad()
def test_torch_s_other_names_of_an_argument(
    keywords: tuple[str, str], way: str
) -> None:
    model = Calls(lambda x: torch.add(**{keywords[0]: x, keywords[1]: x * 2}))
    spec = {
        which: fxc.Tap("::add", point="input", output=which)
        for which in ("input", "self", "other")
    }
    records = WAYS[way](model, spec, X.clone())
    for which in spec:
        assert_same(records[which], [X * 2 if which == "other" else X])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reference"])
@torch.no_grad()
def test_an_attribute_of_a_tensor_is_no_call(way: str) -> None:
    # ``torch.export`` takes no ``data``.
    data = (lambda x: x) if way == "export" else (lambda x: x.data)
    model = Calls(lambda x: (x.T @ data(x).mT).sin())
    with pytest.raises(NeverCalledError, match=r"it calls matmul, sin;"):
        WAYS[way](model, {"h": fxc.Tap("::mT")}, X.clone())


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_function_that_returns_indices_keeps_its_name(way: str) -> None:
    model = Calls(lambda x: F.max_pool1d(x, 2, return_indices=True)[0])
    records = WAYS[way](model, {"h": fxc.Tap("::max_pool1d", output=1)}, X.clone())
    assert_same(records["h"], [F.max_pool1d(X, 2, return_indices=True)[1]])
