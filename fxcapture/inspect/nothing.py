"""Records that look like a success and hold nothing: every selected value is ``None``.

The usual case is attention weights: an attention module that calls a fused kernel has
none to return, and returns ``None`` in their place.

Invariants
    A position that was not selected is ``None`` too, and is no matter of this file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, final

from torch import fx

from fxcapture import passes
from fxcapture.inspect.module_stack import module_paths
from fxcapture.trace.structure import Structure

__all__ = ["Nothing", "find_nothing", "returned_none"]

_FUSED = re.compile(r"scaled_dot_product|flex_attention|multi_head_attention")


class _Slot(Protocol):
    @property
    def structure(self) -> Structure: ...


class _Record(Protocol):
    """What a record's plan and an exported record's layout have in common."""

    @property
    def name(self) -> str: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def slots(self) -> Sequence[_Slot | None]: ...


def returned_none(slot: _Slot) -> bool:
    """Whether a selected position holds ``None``."""
    return slot.structure.kind == "const" and slot.structure.value is None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A record of which every selected position holds ``None``; prints as a sentence.

    Attributes:
        record: Its name.
        path: The first module that returned ``None`` there.
        several: Others did so too.
        fused: The module whose attention is a fused call, and has no weights to return;
            empty if there is none.
    """

    record: str
    path: str
    several: bool
    fused: str

    def __str__(self) -> str:
        text = (
            f"record {self.record!r} holds nothing: {self.path or 'the model'!r} "
            "returned None there" + (", and so did the others" if self.several else "")
        )
        if self.fused:
            text += (
                ".  Its attention is one fused call, which returns no weights: "
                f"fxcapture.AttentionWeights({self.fused!r}) computes them"
            )
        return text


def find_nothing(
    records: Iterable[_Record], graphs: Sequence[fx.GraphModule]
) -> dict[str, Nothing]:
    """The records that hold nothing but ``None``, by name.

    Args:
        records: The records' plans or layouts.
        graphs: Graphs of the run, to tell where a fused attention kernel is called.
    """
    made = {}
    for record in records:
        chosen = [(p, s) for p, s in zip(record.paths, record.slots, strict=True) if s]
        if not chosen or not all(returned_none(slot) for _, slot in chosen):
            continue
        path = chosen[0][0]
        made[record.name] = Nothing(
            record=record.name,
            path=path,
            several=len(chosen) > 1,
            fused=next(_fused_calls(graphs, path), ""),
        )
    return made


def _fused_calls(graphs: Sequence[fx.GraphModule], path: str) -> Iterator[str]:
    """The modules, at a path or below it, that call a fused attention kernel."""
    for graph in graphs:
        for _, node, _ in passes.walk(graph):
            called = node.op == "call_function" and _FUSED.search(str(node.target))
            paths = list(module_paths(node)) if called else []
            if path in paths:
                yield paths[-1]
