"""Comparing with the eager reference: the output counts as much as the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import VerificationError
from fxcapture.testing import assert_parity
from tests.models import WIDTH, mlp, rows


def scaling_the_output(by: float) -> Callable[..., Any]:
    """A backend whose graphs return a first output that is too large."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: [
            out * by if i == 0 else out for i, out in enumerate(gm(*args))
        ]

    return backend


@torch.no_grad()
def test_parity_fails_where_the_output_is_wrong() -> None:
    captured = fxc.compile(mlp(), {"r": "0"}, backend=scaling_the_output(1.5))

    with pytest.raises(VerificationError, match=r"the output is .* away"):
        assert_parity(captured, rows())
    assert_parity(captured, rows(), tolerance=0.6)


@torch.no_grad()
def test_a_verification_says_how_large_the_output_is() -> None:
    captured = fxc.compile(mlp(), {"r": "0"}, backend=scaling_the_output(1.5))

    found = fxc.verify(captured, rows())

    largest = mlp()(rows()).abs().max()
    assert found.output_scale == pytest.approx(largest.item())
    assert found.output_difference == pytest.approx(largest.item() / 2)


class Forgets(nn.Module):
    """Returns nothing where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor | None:
        h = self.part(h)
        return None if torch.compiler.is_compiling() else h


@torch.no_grad()
def test_an_output_that_is_lost_is_an_error() -> None:
    captured = fxc.compile(Forgets(), {"r": "part"}, backend="eager")

    with pytest.raises(VerificationError, match="the output is 'NoneType'"):
        fxc.verify(captured, rows())
