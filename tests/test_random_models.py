"""Random models: what is captured is what copying hooks see, and nothing else changes.

The models write in place, pass their input through, reuse modules, return containers
of every kind; with breaks they are compiled in pieces.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxcapture as fxc
from tests.reference import assert_records, assert_same, eager_records, footprint
from tests.strategies import WIDTH, ModelPlan, model_plans, taps_of

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def rows() -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(8))


def check(plan: ModelPlan, data: st.DataObject, **settings: Any) -> None:
    """Two calls: output, records, inputs, buffers and parameters are the plain ones."""
    model = plan.build()
    spec = fxc.CaptureSpec(data.draw(taps_of(model)))
    plain = copy.deepcopy(model)
    before = footprint(model)
    torch._dynamo.reset()
    captured = fxc.compile(model, spec, backend="eager", **settings)

    with torch.no_grad():
        for _ in range(2):
            x, x_plain = rows(), rows()
            run = functools.partial(plain, x_plain)
            output, want = eager_records(plain, spec, run)
            got = captured(x)

            assert_same(output, got.output)
            assert_records(want, got.records)
            assert_same(x_plain, x)
            assert_same(state(plain), state(model))
    assert footprint(model) == before


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@settings(max_examples=100)
@given(plan=model_plans(), data=st.data())
def test_capture_of_a_random_model_is_what_hooks_see(plan, data) -> None:
    check(plan, data, fullgraph=True)


@settings(max_examples=25)
@given(plan=model_plans(breaks=True), data=st.data())
def test_capture_of_a_random_model_in_pieces_is_what_hooks_see(plan, data) -> None:
    check(plan, data)


@pytest.mark.nightly
@settings(settings.get_profile("nightly"))
@given(plan=model_plans(), data=st.data())
def test_two_thousand_random_models(plan, data) -> None:
    check(plan, data, fullgraph=True)


@pytest.mark.nightly
@settings(settings.get_profile("nightly"))
@given(plan=model_plans(breaks=True), data=st.data())
def test_two_thousand_random_models_in_pieces(plan, data) -> None:
    check(plan, data)
