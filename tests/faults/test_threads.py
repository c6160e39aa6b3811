"""What another thread does is not seen in a call's records, nor in its own graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import CaptureError
from tests.faults.blocks import PATIENCE_S, Chain, in_a_thread, own_attributes


class Masked(Chain):
    """Takes a mask that reductions read."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def while_another_exports() -> tuple[Callable[[], Any], threading.Event]:
    """Wait until it does; what waits for its end, and what lets it end."""
    inside, go = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            inside.set()
            go.wait(PATIENCE_S)
            return t + 1

    join = in_a_thread(lambda: torch.export.export(Waits(), (torch.ones(2),)))
    assert inside.wait(PATIENCE_S)
    assert torch.compiler.is_exporting(), "torch was to say so to every thread"
    return join, go


SETTINGS = [{"fullgraph": True}, {}, {"regions": "layers.*"}]


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "layers.2"}])
def test_a_reduction_is_made_while_another_thread_exports(
    settings: dict[str, Any],
) -> None:
    """Whether a thread traces is a flag of the process in torch."""
    model = Masked()
    x, mask = torch.randn(2, 3, 4), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    tap = fxc.Tap("layers.0", reduce=fxc.reductions.mean(mask="mask"))
    captured = fxc.compile(model, {"h": tap}, backend="eager", **settings)
    with torch.no_grad():
        h = model.layers[0](x)
        expected = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        captured(x, mask)
        join, go = while_another_exports()
        try:
            record = captured(x, mask).records["h"][0]
        finally:
            go.set()
            join()
    torch.testing.assert_close(record, expected)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_model_captured_while_another_thread_exports_is_compiled_later(
    settings: dict[str, Any],
) -> None:
    """Until then, ``torch.compile`` gives back what it is asked to compile."""
    model, x = Chain(), torch.randn(2, 4)
    compiled: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(gm)
        return gm

    join, go = while_another_exports()
    try:
        captured = fxc.compile(model, {"h": "layers.*"}, backend=keep, **settings)
        during = captured(x).records["h"]
    finally:
        go.set()
        join()
    assert compiled == []
    for record in (during, captured(x).records["h"]):
        state = x
        for layer, got in zip(model.layers, record, strict=True):
            state = layer(state)
            torch.testing.assert_close(got, state)
    assert len(compiled) > 0


class Meets(nn.Module):
    """Stops between its layers in the thread of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.begun, self.go = threading.Event(), threading.Event()
        self.stops = threading.local()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if getattr(self.stops, "here", False):
            self.begun.set()
            self.go.wait(PATIENCE_S)
        return self.b(x)


class Uses(nn.Module):
    """Calls the layers of another model."""

    def __init__(self, model: Meets) -> None:
        super().__init__()
        self.model = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model[0].b(self.model[0].a(x))


def test_a_plain_compilation_of_another_thread_gets_no_marks() -> None:
    """While overrides stand for real, whoever traces the modules meets them."""
    model, x = Meets(), torch.randn(2, 4)
    captured = fxc.compile(model, {"b": "b"}, backend="eager", regions="b")
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    def capture() -> Any:
        model.stops.here = True
        return captured(x)

    join = in_a_thread(capture)
    assert model.begun.wait(PATIENCE_S)
    plain = torch.compile(Uses(model), backend=keep, fullgraph=True)
    try:
        during = plain(x)
    finally:
        model.go.set()
        output, records = join()
    assert not any("fxcapture" in str(n.target) for g in graphs for n in g.graph.nodes)
    assert torch.equal(during, output)
    assert torch.equal(records["b"][0], output)
    assert torch.equal(plain(x), output)
    count = len(graphs)
    for _ in range(3):
        assert torch.equal(plain(x), output)
    assert len(graphs) == count
    assert not any("fxcapture" in str(n.target) for g in graphs for n in g.graph.nodes)
    assert own_attributes(model) == own_attributes(Meets())


class Breaks(nn.Module):
    """Runs its second layer outside of every graph, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.meeting: threading.Barrier | None = None

    def forward(self, x: torch.Tensor, broken: bool) -> torch.Tensor:
        x = self.a(x)
        return outside(self, x) if broken else self.b(x)


@torch.compiler.disable
def outside(model: Breaks, x: torch.Tensor) -> torch.Tensor:
    return model.b(x)


def test_on_eager_judges_each_call_by_what_that_call_did() -> None:
    """Two threads whose calls end at the same time: one ran ``b`` in a graph."""
    model, x = Breaks(), torch.randn(2, 4)
    captured = fxc.compile(model, {"b": "b"}, backend="eager", on_eager="error")
    captured(x, False)
    with pytest.raises(CaptureError, match="outside every graph"):
        captured(x, True)
    captured(x, False)
    outcomes: list[tuple[bool, bool]] = []

    def work(broken: bool) -> None:
        for _ in range(60):
            try:
                captured(x, broken)
                raised = False
            except CaptureError:
                raised = True
            outcomes.append((broken, raised))

    joins = [in_a_thread(lambda b=b: work(b)) for b in (False, True)]  # type: ignore[misc]
    for join in joins:
        join()
    assert set(outcomes) == {(False, False), (True, True)}
