"""Every public case in pieces: with graph breaks put in, and compiled by regions.

Broken around the model, Dynamo compiles it as a frame of its own; broken between the
children, each layer becomes one, and layers of a class share compiled code.  By
regions, each child, or each grandchild, is compiled on its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import TraceError
from fxcapture.trace.signature import has_forward
from tests.acceptance.cases import BY_ID, CASES, Case
from tests.reference import footprint

# Dynamo looks at .grad of what crosses a graph break, also of plain models.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


class BrokenAround(nn.Module):
    """A model with a graph break on either side of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        torch._dynamo.graph_break()
        out = self.model(*args, **kwargs)
        torch._dynamo.graph_break()
        return out


def broken(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward with a graph break on either side of it."""

    @functools.wraps(forward)
    def breaks(*args, **kwargs):
        torch._dynamo.graph_break()
        out = forward(*args, **kwargs)
        torch._dynamo.graph_break()
        return out

    return breaks


def break_between_children(model: nn.Module) -> nn.Module:
    """Give every submodule that can take one a forward that breaks the graph."""
    for module in model.modules():
        if module is model or isinstance(module, torch.jit.ScriptModule):
            continue
        if type(module).forward is not nn.Module.forward:  # not a mere container
            module.forward = broken(module.forward)
    return model


def inside(tap: fxc.Tap) -> fxc.Tap:
    """The same tap where the model stands one level deeper, under ``model``."""
    paths = [p for p in tap.target.parts if isinstance(p, str)]
    if not paths:
        return tap
    return dataclasses.replace(
        tap, target=[f"model.{p}" if p else "model" for p in paths]
    )


def assert_right_twice(
    case: Case, model: nn.Module, spec: Any, **settings: Any
) -> None:
    want = case.expected_records()
    plain_output = case.driven(case.build())[0]
    untouched = footprint(model)
    captured = fxc.compile(model, spec, **{"backend": "eager", **settings})
    for _ in range(2):
        output, driver = case.driven(captured)

        assert case.equal(plain_output, _same_names(output, plain_output)) == ""
        assert case.equal(want, driver.joined(want)) == ""
        assert footprint(model) == untouched


def _same_names(output: Any, like: Any) -> Any:
    """Gradients by parameter name lose the prefix that the wrapper put there."""
    if isinstance(output, dict) and isinstance(like, dict):
        return {name.removeprefix("model."): v for name, v in output.items()}
    return output


every_case = pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])


@every_case
def test_values_are_right_with_breaks_around_the_model(case: Case) -> None:
    spec = {name: inside(tap) for name, tap in case.targets.items()}

    assert_right_twice(case, BrokenAround(case.build()), spec)


@every_case
def test_values_are_right_with_breaks_between_the_children(case: Case) -> None:
    assert_right_twice(case, break_between_children(case.build()), case.spec)


def paths_at(depth: int, model: nn.Module) -> list[str]:
    """Paths of this many names, of modules that can be called."""
    return [
        path
        for path, module in model.named_modules()
        if path and path.count(".") == depth - 1 and has_forward(module)
    ]


REGIONAL = [
    pytest.param(case, depth, id=f"{case.id}-{depth}")
    for depth in (1, 2)
    for case in CASES
    if paths_at(depth, case.build())
]


@pytest.mark.parametrize(("case", "depth"), REGIONAL)
def test_values_are_right_by_regions(case: Case, depth: int) -> None:
    model = case.build()
    regions = paths_at(depth, model)

    assert_right_twice(case, model, case.spec, regions=regions, backend="aot_eager")


@pytest.mark.parametrize("name", ["hidden_states_selected", "dict_output"])
def test_fullgraph_names_the_break_it_met(name: str) -> None:
    case = BY_ID[name]
    model = break_between_children(case.build())
    captured = fxc.compile(model, case.spec, backend="eager", fullgraph=True)

    with pytest.raises(TraceError, match="graph_break") as caught:
        case.driven(captured)

    assert "drop fullgraph=True" in caught.value.remedy


def test_explain_says_why_the_run_was_not_one_graph() -> None:
    case = BY_ID["hidden_states_selected"]
    captured = fxc.compile(
        break_between_children(case.build()), case.spec, backend="eager"
    )
    case.driven(captured)

    text = captured.explain()

    assert "not one graph, because" in text
    assert "graph_break" in text


def test_a_broken_model_keeps_its_other_cases_apart() -> None:
    # Two models of one class, broken, called in turn: layers of both share code.
    case = BY_ID["hidden_states_selected"]
    first = fxc.compile(
        break_between_children(case.build()), case.spec, backend="eager"
    )
    other_spec = dataclasses.replace(case, targets={"one": fxc.Tap("layers.2")})
    second = fxc.compile(
        break_between_children(case.build()), other_spec.spec, backend="eager"
    )
    want_first, want_second = case.expected_records(), other_spec.expected_records()

    for _ in range(2):
        assert case.equal(want_first, case.driven(first)[1].joined(want_first)) == ""
        got = other_spec.driven(second)[1].joined(want_second)
        assert case.equal(want_second, got) == ""
