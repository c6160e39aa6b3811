"""What a picture of a capture consists of; ``draw`` makes one, the renderers draw it.

Terms
    row: one line of a picture: a module, or several like ones that nothing taps, in the
        order in which they ran.  A module is opened (its children are rows) only where
        something below it is tapped.
    lane: what the captured values of one record hold, growing from row to row; they
        live until the call returns, so a lane only grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

__all__ = ["Picture", "Row", "Tapped"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """One captured position, where it is taken.

    Attributes:
        record: The record's name.
        position: The position in it.
        entry: It is what the module received, not what it returned.
        call: Which call of the module it is from.
        shape: Shape in words; empty where not known.
        num_bytes: Bytes of the value; ``None`` where not known.
        where: ``"graph 0"``, or ``"eager"``.
    """

    record: str
    position: int
    entry: bool
    call: int
    shape: str
    num_bytes: int | None
    where: str

    @property
    def label(self) -> str:
        """Such as ``hidden[0]``, with what is special about it."""
        text = f"{self.record}[{self.position}]"
        if self.entry:
            text += " (input)"
        return text + (f" (call {self.call})" if self.call else "")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line.

    Attributes:
        kind: ``"module"``; ``"open"`` for one whose children follow; ``"return"`` for
            the end of an opened one.
        label: The module's path below the module it stands in.
        path: Its whole path.
        class_name: Its class.
        depth: How many opened modules it stands in.
        count: Number of modules it stands for.
        taps: What is taken there.
    """

    kind: Literal["module", "open", "return"]
    label: str
    path: str
    class_name: str
    depth: int
    count: int = 1
    taps: tuple[Tapped, ...] = ()


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the renderers draw.

    Attributes:
        title: The model's class.
        rows: The lines.
        records: Record name to (positions kept, positions in all).
        note: Why the model is not one graph; empty if it is.
    """

    title: str
    rows: tuple[Row, ...]
    records: Mapping[str, tuple[int, int]]
    note: str = ""

    def held(self) -> list[dict[str, int]]:
        """Bytes that each record holds behind each row."""
        so_far = dict.fromkeys(self.records, 0)
        made = []
        for row in self.rows:
            for tap in row.taps:
                so_far[tap.record] += tap.num_bytes or 0
            made.append(dict(so_far))
        return made
