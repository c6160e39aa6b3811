"""What an error leaves: nothing on the model, and nothing that spoils the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import FxCaptureError, TargetError
from tests.faults.blocks import Chain, own_attributes


@pytest.mark.parametrize("settings", [{}, {"regions": "layers.*"}])
def test_a_call_that_did_not_fit_the_model_is_not_remembered(
    settings: dict[str, Any],
) -> None:
    model, x = Chain(), torch.randn(2, 4)
    spec = {"l": "layers.2", "o": fxc.Tap("layers.0", optional=True)}
    captured = fxc.compile(model, spec, backend="eager", **settings)
    expected = captured(x).records["l"][0]
    last = model.layers[2]
    del model.layers[2]
    for _ in range(2):
        with pytest.raises(TargetError, match=r"layers\.2"):
            captured(x)
    model.layers.append(last)
    for _ in range(2):
        assert torch.equal(captured(x).records["l"][0], expected)


class Sly(nn.Linear):
    """Can be asked for its forward a number of times, and once not."""

    left: int | None = None

    def __getattribute__(self, name: str) -> Any:
        kind = type(self)
        if name == "forward" and kind.left is not None:
            kind.left -= 1
            if kind.left < 0:
                kind.left = None
                raise OSError("not now")
        return super().__getattribute__(name)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), Sly(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def by_regions(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    captured = fxc.compile(model, {"h": "*"}, backend="eager", regions="first")
    return lambda: captured(x).records["h"]


def as_a_function(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    function, params, buffers = fxc.functional(model, {"h": "*"})
    return lambda: function(params, buffers, x)[1]["h"]


def exported(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    return lambda: fxc.export(model, (x,), spec={"h": "*"})(x).records["h"]


def surveyed(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    return lambda: fxc.sites(model, (x,))


@pytest.mark.parametrize("way", [by_regions, as_a_function, exported, surveyed])
def test_overrides_that_cannot_all_be_made_are_all_taken_away(way: Any) -> None:
    model, x = Holds().eval(), torch.randn(2, 4)
    before = own_attributes(model)
    call = way(model, x)
    raised = 0
    for times in range(30):
        Sly.left = times
        try:
            call()
        except (OSError, FxCaptureError):
            raised += 1
        assert own_attributes(model) == before, f"after {times} questions"
        if Sly.left is not None:
            break
    Sly.left = None
    assert raised > 0
    found = call()
    assert own_attributes(model) == before
    if way is not surveyed:
        h = model.first(x)
        for got, want in zip(found, (h, model.last(h)), strict=True):
            torch.testing.assert_close(got, want)


def test_a_selection_that_does_not_exist_compiles_nothing() -> None:
    compiled: list[int] = []

    def count(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(1)
        return gm

    model, x = Chain(), torch.randn(2, 4)
    captured = fxc.compile(model, {"l": "layers.*"}, backend=count)
    captured(x)
    compiled.clear()
    for _ in range(2):
        with pytest.raises(FxCaptureError, match="99"):
            captured(x, select={"l": 99})
    assert compiled == []
    assert captured(x).records["l"][2] is not None
    assert captured.sites[0].graph is not None, "the model was one graph before"
    assert compiled == []


def test_a_variant_that_cannot_be_compiled_is_tried_once_and_says_why() -> None:
    tried: list[int] = []
    fails = False

    def picky(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        tried.append(1)
        if fails:
            raise RuntimeError("no kernel for that")
        return gm

    model, x = Chain(), torch.randn(2, 4)
    captured = fxc.compile(model, {"l": "layers.*"}, backend=picky)
    captured(x, select={"l": [0, 1]})
    fails = True
    tried.clear()
    for _ in range(3):
        with pytest.raises(Exception, match="no kernel for that"):
            captured(x, select={"l": [0]})
    assert len(tried) == 1
    fails = False
    records = captured(x, select={"l": [0, 1]}).records
    assert torch.equal(records["l"][0], model.layers[0](x))
    assert len(tried) == 1
