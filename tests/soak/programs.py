"""One small model in each mode, called alike, and what its records have to be.

Terms
    mode: a way from a call to records; see ``MODES``.
    input: two index tensors.  A bad one makes the model raise as it runs, also inside
        a compiled graph: the first before all blocks, the second behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxcapture as fxc

WIDTH, LAYERS, WORDS = 8, 3, 10
#: Positions that calls ask for; ``None``: all.  Few, since a decorated model under a
#: user's own ``torch.compile`` is traced once for each.
SELECTIONS: tuple[Sequence[int] | None, ...] = (None, (0, 2), (1,))


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(WIDTH, WIDTH), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Blocks; ``shared``: one block, called each time."""

    def __init__(self, breaks: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        blocks = [Block(breaks and (shared or i == 1)) for i in range(LAYERS)]
        self.blocks = nn.ModuleList(blocks[:1] if shared else blocks)
        self.repeats = LAYERS if shared else 1

    def run(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = self.first(first)
        for _ in range(self.repeats):
            for block in self.blocks:
                x = block(x)
        return x + self.last(last)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.run(first, last)


@dataclasses.dataclass
class Output:
    last_hidden_state: torch.Tensor
    hidden_states: Any = None


class Decorated(Model):
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    @fxc.capture_outputs(tie_last_hidden_states=False)
    def forward(self, first: torch.Tensor, last: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(first, last))


class Undecorated(Model):
    def forward(self, first: torch.Tensor, last: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(first, last))


def states(model: Model, first: torch.Tensor) -> list[torch.Tensor]:
    """The blocks' outputs; no module is called, so that nothing can be captured."""
    x = nn.functional.embedding(first, model.first.weight)
    found = []
    for _ in range(model.repeats):
        for block in model.blocks:
            x = x + torch.tanh(
                nn.functional.linear(x, block.linear.weight, block.linear.bias)
            )
            found.append(x)
    return found


def draw_input(bad: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """An input; ``bad`` may be ``"first"`` or ``"last"``."""
    first, last = (torch.randint(0, WORDS, (2, 3)) for _ in range(2))
    {"first": first, "last": last}.get(bad, torch.empty(1)).fill_(WORDS + 5)
    return first, last


@dataclasses.dataclass(frozen=True)
class Program:
    """A model in one mode.

    Attributes:
        model: The model.
        call: ``(first, last, positions) -> values``: those of the blocks, in order.
        selects: Whether it can be asked for some positions only.
    """

    model: Model
    call: Callable[[torch.Tensor, torch.Tensor, Any], Sequence[Any]]
    selects: bool = True

    def fault(self, positions: Sequence[int] | None = None) -> str:
        """Call once; what is wrong with the records, empty if nothing is."""
        first, last = draw_input()
        values = self.call(first, last, positions)
        if len(values) != LAYERS:
            return f"{len(values)} entries instead of {LAYERS}"
        wanted = range(LAYERS) if positions is None else positions
        for i, (got, want) in enumerate(
            zip(values, states(self.model, first), strict=True)
        ):
            if (got is None) == (i in wanted):
                return "missing entries" if got is None else "entries not asked for"
            if got is not None and not torch.allclose(got, want, atol=1e-5):
                return "wrong values"
        return ""

    def left_behind(self) -> list[str]:
        """What stands in the instances that was not there when they were made."""
        return [
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name in module.__dict__
            if name in ("forward", "_call_impl", "_compiled_call_impl")
            or "fxcapture" in name
        ]


def _compiled(model: Model, **settings: Any) -> Program:
    captured = fxc.compile(model, {"h": "blocks.*"}, backend="eager", **settings)

    def call(first: torch.Tensor, last: torch.Tensor, positions: Any) -> Any:
        if positions is None:
            return captured(first, last).records["h"]
        return captured(first, last, select={"h": list(positions)}).records["h"]

    return Program(model, call)


def _decorated(compiled: bool) -> Program:
    model = Decorated()
    run: Any = torch.compile(model, backend="eager") if compiled else model

    def call(first: torch.Tensor, last: torch.Tensor, positions: Any) -> Any:
        # Position 0 is the first block's input.
        asked = True if positions is None else [i + 1 for i in positions]
        return run(first, last, output_hidden_states=asked).hidden_states[1:]

    return Program(model, call)


def _exported() -> Program:
    model = Model()
    program = fxc.export(model, draw_input(), spec={"h": "blocks.*"})
    return Program(
        model,
        lambda first, last, positions: program(first, last).records["h"],
        selects=False,
    )


MODES: dict[str, Callable[[], Program]] = {
    "whole": lambda: _compiled(Model(), fullgraph=True),
    "pieces": lambda: _compiled(Model(breaks=True)),
    "pieces, one block": lambda: _compiled(Model(breaks=True, shared=True)),
    "regions": lambda: _compiled(Model(), regions="blocks.*"),
    "decorated, eager": lambda: _decorated(compiled=False),
    "decorated, compiled": lambda: _decorated(compiled=True),
    "exported": _exported,
}
