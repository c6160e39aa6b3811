"""How many graphs a program makes, and how many it keeps."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from tests.faults.blocks import Chain


def positions(i: int) -> list[int]:
    return [k for k in range(6) if i >> k & 1]


def test_selections_beyond_the_limit_are_dropped_and_come_back_right() -> None:
    model, x = Chain(6), torch.randn(2, 4)
    states: list[torch.Tensor] = []
    for layer in model.layers:
        states.append(layer(states[-1] if states else x))
    captured = fxc.compile(
        model, {"l": "layers.*"}, backend="eager", fullgraph=True, max_variants=5
    )
    for i in [*range(1, 40), 1, 2, 39]:
        values = captured(x, select={"l": positions(i)}).records["l"]
        assert [k for k, v in enumerate(values) if v is not None] == positions(i)
        for k in positions(i):
            assert torch.equal(values[k], states[k])
    assert len(captured.graphs) == 5


def test_the_number_of_graphs_is_bounded_without_being_told() -> None:
    model, x = Chain(6), torch.randn(2, 4)
    captured = fxc.compile(model, {"l": "layers.*"}, backend="eager", fullgraph=True)
    for i in range(1, 64):
        captured(x, select={"l": positions(i)})
    assert len(captured.graphs) < 63


class Looks(nn.Module):
    """A model that Dynamo guards on a number of, and compiles anew for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def test_graphs_that_dynamo_has_dropped_are_not_kept() -> None:
    model, x = Looks(), torch.randn(2, 4)
    captured = fxc.compile(model, {"l": "layer"}, backend="eager")
    for factor in range(3):
        model.factor = float(factor)
        captured(x)
        torch._dynamo.reset()
    assert len(captured.graphs) <= 1


def symbols_of(graphs: list[torch.fx.GraphModule]) -> list[bool]:
    """Of each graph, whether a size of its inputs is symbolic."""

    def is_symbolic(node: torch.fx.Node) -> bool:
        value: Any = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return True
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        return any(isinstance(size, torch.SymInt) for size in sizes)

    return [
        any(is_symbolic(n) for n in gm.graph.nodes if n.op == "placeholder")
        for gm in graphs
    ]


def test_a_second_captured_model_is_not_compiled_for_varying_shapes() -> None:
    """Dynamo remembers shapes by the name of the code, which all programs shared."""
    found: list[list[bool]] = []
    for settings in ({"fullgraph": True}, {"regions": "layers.*"}):
        for rows in (2, 3, 5):
            graphs: list[torch.fx.GraphModule] = []

            def keep(gm: torch.fx.GraphModule, inputs: Any, into: Any = graphs) -> Any:
                into.append(gm)
                return gm

            captured = fxc.compile(
                Chain(2), {"l": "layers.*"}, backend=keep, **settings
            )
            with torch.no_grad():
                captured(torch.randn(rows, 4))
            found.append(symbols_of(graphs))
    assert found == [[False]] * 6


def test_the_same_model_with_other_shapes_is() -> None:
    """Or the test above would show nothing."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    captured = fxc.compile(Chain(2), {"l": "layers.*"}, backend=keep, fullgraph=True)
    for rows in (2, 3):
        captured(torch.randn(rows, 4))
    assert symbols_of(graphs) == [False, True]


class Fails(Chain):
    """Breaks its graph, and raises if it is told to."""

    def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
        x = self.layers[0](x)
        if told(fail):
            raise ValueError("told to")
        return self.layers[1](x)


@torch.compiler.disable
def told(fail: bool) -> bool:
    return fail


def test_an_error_of_the_model_costs_no_further_trace() -> None:
    model, x = Fails(2), torch.randn(2, 4)
    captured = fxc.compile(model, {"l": "layers.*"}, backend="eager")
    for fail in (False, True) * 2:  # what is new to Dynamo is traced once
        with contextlib.suppress(ValueError):
            captured(x, fail)
    frames = dict(torch._dynamo.utils.counters["frames"])
    for _ in range(5):
        with pytest.raises(ValueError, match="told to"):
            captured(x, True)
        assert len(captured(x, False).records["l"]) == 2
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


@pytest.mark.parametrize("settings", [{}, {"regions": "layers.*"}])
def test_shapes_that_are_all_new_leave_nothing(settings: dict[str, Any]) -> None:
    model = Fails(2)
    captured = fxc.compile(model, {"l": "layers.*"}, backend="eager", **settings)

    def call(rows: int) -> None:
        values = captured(torch.randn(rows, 4), False).records["l"]
        assert [len(value) for value in values] == [rows, rows]

    with torch.no_grad():
        for rows in range(2, 12):
            call(rows)
        tracemalloc.start()
        try:
            call(12)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for rows in range(13, 113):
                call(rows)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (after - before) / 100 < 1000, "bytes kept of each call"
