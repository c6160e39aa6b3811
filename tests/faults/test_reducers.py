"""Reductions that Dynamo cannot trace, or that raise once, in graphs and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from tests.faults.blocks import Chain


class Broken(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0:
                torch._dynamo.graph_break()
        return x


def asks_for_the_value(h: torch.Tensor) -> torch.Tensor:
    return h * (2.0 if h.sum().item() > -1e9 else 1.0)


def breaks_the_graph(h: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return h * 2.0


PROGRAMS = [(Chain, {}), (Broken, {}), (Chain, {"regions": "layers.*"})]


def assert_doubled(model: Any, record: Any, x: torch.Tensor) -> None:
    assert len(record) == len(model.layers)
    for layer, got in zip(model.layers, record, strict=True):
        x = layer(x)
        torch.testing.assert_close(got, 2 * x)


@pytest.mark.parametrize(("make", "settings"), PROGRAMS)
@pytest.mark.parametrize("reduce", [asks_for_the_value, breaks_the_graph])
def test_a_reduction_that_breaks_the_graph_gives_its_value(
    reduce: Callable[..., Any], make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    model, x = make(), torch.randn(2, 4)
    spec = {"h": fxc.Tap("layers.*", reduce=reduce)}
    captured = fxc.compile(model, spec, backend="eager", **settings)
    with torch.no_grad():
        for _ in range(3):
            assert_doubled(model, captured(x).records["h"], x)


@pytest.mark.parametrize(("make", "settings"), PROGRAMS)
def test_a_reduction_that_raised_once_does_not_spoil_the_program(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    raises = True

    def reduce(h: torch.Tensor) -> torch.Tensor:
        if raises:
            raise ValueError("not this time")
        return h * 2.0

    model, x = make(), torch.randn(2, 4)
    spec = {"h": fxc.Tap("layers.*", reduce=reduce)}
    captured = fxc.compile(model, spec, backend="eager", **settings)
    with torch.no_grad():
        with pytest.raises(Exception, match="not this time"):
            captured(x)
        raises = False
        for _ in range(3):
            assert_doubled(model, captured(x).records["h"], x)
