"""Every public case through ``export``: right, or refused where torch.export refuses.

The program is exported when it is first called, under the modes that the case runs in,
and called twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import TraceError
from fxcapture.exporting.export import export
from fxcapture.exporting.program import CapturedProgram
from tests.acceptance.cases import CASES, Case
from tests.reference import footprint

# What torch.export cannot trace, in both modes and with Dynamo only.
REFUSED = {
    "while_on_value",
    "branch_on_value",
    "moe_dispatch",
    "scripted_child",
    "dynamic_quantized_linear",
}
REFUSED_STRICT = REFUSED | {"checkpoint_wrapper", "checkpoint_backward_recompute"}
# Cases that call the program under torch.func with parameters of their own.
FUNCTIONAL = {"func_grad_over_params", "functional_call_swapped_params"}

# torch.export itself warns of a model that keeps a tensor in an attribute.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The tensor attribute.*was assigned during export:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:While compiling, we found certain side effects:UserWarning"
    ),
]

RIGHT = [c for c in CASES if c.id not in REFUSED]
RIGHT_STRICT = [c for c in CASES if c.id not in REFUSED_STRICT]


def by_id(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in cases])


class Exported(nn.Module):
    """A model that is exported for each combination of shapes it is called with."""

    def __init__(self, model: nn.Module, spec: fxc.CaptureSpec, strict: bool) -> None:
        super().__init__()
        self._make = lambda a, k: export(model, a, k, spec=spec, strict=strict)
        self._programs: dict[Any, CapturedProgram] = {}

    def forward(self, *args: Any, **kwargs: Any) -> fxc.Captured:
        key = tuple(v.shape for v in args if isinstance(v, torch.Tensor))
        if key not in self._programs:
            self._programs[key] = self._make(args, kwargs)
        return self._programs[key](*args, **kwargs)


def as_module(program: CapturedProgram) -> nn.Module:
    """A program's module, whose parameters have the model's names."""
    module = program.module()

    def split(module: nn.Module, args: Any, result: Any) -> fxc.Captured:
        return fxc.Captured(result[0], program.read(result[1]))

    module.register_forward_hook(split)
    return module


def exported(case: Case, model: nn.Module, *, strict: bool) -> nn.Module:
    if case.id not in FUNCTIONAL:
        return Exported(model, case.spec, strict)
    args, kwargs = case.inputs()
    return as_module(export(model, args, kwargs, spec=case.spec, strict=strict))


def assert_case_holds(case: Case, *, strict: bool) -> None:
    want = case.expected_records()
    plain_output = case.driven(case.build())[0]
    model = case.build()
    untouched = footprint(model)
    captured = exported(case, model, strict=strict)
    for _ in range(2):
        output, driver = case.driven(captured)

        assert case.equal(want, driver.joined(want)) == ""
        assert case.equal(plain_output, output) == ""
        assert untouched == footprint(model)


@by_id(RIGHT)
def test_records_of_a_non_strict_export_are_right(case: Case) -> None:
    assert_case_holds(case, strict=False)


@by_id(RIGHT_STRICT)
def test_records_of_a_strict_export_are_right(case: Case) -> None:
    assert_case_holds(case, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_refused_is_what_torch_export_refuses(strict: bool) -> None:
    refused = REFUSED_STRICT if strict else REFUSED
    for case in CASES:
        if case.id not in refused:
            continue
        model = case.build()
        untouched = footprint(model)
        args, kwargs = case.inputs()

        with torch.set_grad_enabled(case.grad):
            with pytest.raises(Exception):  # noqa: B017, PT011 - anything it raises
                torch.export.export(case.build(), args, kwargs, strict=strict)
            with pytest.raises(TraceError, match="cannot be exported") as caught:
                export(model, args, kwargs, spec=case.spec, strict=strict)

        assert caught.value.why, case.id
        assert untouched == footprint(model), case.id
