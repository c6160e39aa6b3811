"""Every public case through ``symbolic_trace`` and ``instrument``: right, or refused.

Each tap is tried by itself, as written and as an optional one: optional must not turn
"the graph does not show it" into "not called".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import fxcapture as fxc
from fxcapture.errors import FxCaptureError
from fxcapture.foreign.instrument import CapturedGraph, instrument
from tests.acceptance.cases import CASES, Case, Driver

# What torch.fx cannot trace.
UNTRACEABLE = {
    "adapter_wrapped_linear",
    "branch_on_value",
    "chunk_and_extend",
    "data_parallel_prefix",
    "encoder_layer_fast_path",
    "encoder_padding_mask",
    "loop_over_time_axis",
    "module_built_in_forward",
    "moe_dispatch",
    "shape_check_in_forward",
    "while_on_value",
}
# Inlined modules that return one tensor and do not declare it: the user has to vouch.
UNDECLARED = {
    ("albert_shared_layer", "some"),
    ("albert_shared_layer", "states"),
    ("back_to_back_calls", "cell"),
    ("block_inside_block", "every"),
    ("block_inside_block", "outer"),
    ("called_with_keywords_only", "out"),
    ("checkpoint_backward_recompute", "blocks"),
    ("dropout_on_in_eval", "lower"),
    ("dropout_on_in_eval", "upper"),
    ("forward_called_directly", "layer"),
    ("frozen_no_grad_backbone", "backbone"),
    ("hidden_states_selected", "last"),
    ("hidden_states_selected", "states"),
    ("many_sequence_lengths", "states"),
    ("nested_module_lists", "deep"),
    ("output_is_not_last_op", "body"),
    ("output_is_not_last_op", "by_class"),
    ("preact_block_overwrites_previous", "blocks"),
    ("star_args_unpack", "join"),
    ("value_dependent_shape", "kept"),
}
TRACEABLE = [c for c in CASES if c.id not in UNTRACEABLE]


def traced(case: Case) -> fx.GraphModule:
    """The case's model by torch.fx, with arguments that are no tensors fixed."""
    model = case.build()
    model = getattr(model, "_orig_mod", model)
    _, kwargs = case.inputs()
    fixed = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name not in kwargs and parameter.default is None:
            fixed[name] = None
    with torch.set_grad_enabled(case.grad):
        return fx.symbolic_trace(model, concrete_args=fixed or None)


class Traced(torch.nn.Module):
    """An instrumented graph, called like the model; takes its parameters' names."""

    def __init__(self, captured: CapturedGraph) -> None:
        super().__init__()
        self.__dict__["captured"] = captured
        for name, child in captured.graph_module.named_children():
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> fxc.Captured:
        # torch.fx renames what it fixes, so everything is passed by position.
        return self.captured(*args, *kwargs.values())


def outcome(case: Case, name: str, tap: fxc.Tap, *, vouch: bool = False) -> str:
    """ "right", "refused", or what is wrong."""
    try:
        captured = instrument(traced(case), {name: tap}, assume_tensors=vouch)
    except FxCaptureError as error:
        return "refused" if error.why and error.remedy else f"no reason: {error}"
    assert isinstance(captured, CapturedGraph)
    want = case.expected_records()[name]
    args, kwargs = case.inputs()
    driver = Driver(Traced(captured))
    torch.manual_seed(20)
    with torch.set_grad_enabled(case.grad):
        case.run(driver, args, kwargs)
    return case.equal(want, driver.joined([name])[name]) or "right"


def outcomes(case: Case) -> Iterator[tuple[str, str]]:
    for name, tap in case.targets.items():
        for optional in (tap.optional, True):
            changed = fxc.Tap(
                tap.target,
                output=tap.output,
                select=tap.select,
                point=tap.point,
                initial=tap.initial,
                optional=optional,
            )
            yield name, outcome(case, name, changed)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in TRACEABLE])
def test_every_tap_is_right_or_refused(case: Case) -> None:
    for name, found in outcomes(case):
        assert found in ("right", "refused"), (name, found)


def test_most_taps_are_right() -> None:
    found = [
        (case.id, name)
        for case in TRACEABLE
        for name, tap in case.targets.items()
        if outcome(case, name, tap, vouch=(case.id, name) in UNDECLARED) == "right"
    ]

    assert len(found) >= 80, found
    assert set(found) >= UNDECLARED


def test_what_is_not_declared_is_refused_unless_the_user_vouches_for_it() -> None:
    for case in TRACEABLE:
        for name, tap in case.targets.items():
            if (case.id, name) in UNDECLARED:
                assert outcome(case, name, tap) == "refused"


@pytest.mark.parametrize("case_id", sorted(UNTRACEABLE))
def test_what_is_left_out_cannot_be_traced(case_id: str) -> None:
    case = next(c for c in CASES if c.id == case_id)

    with pytest.raises((TypeError, NameError, RuntimeError, ValueError)):
        traced(case)
