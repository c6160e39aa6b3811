"""Positions as a user writes them, in a form that is frozen and can be hashed.

Invariants
    Negative positions stay negative: only who knows the length can resolve them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, final

from fxcapture.errors import SpecError, SpecTypeError

__all__ = [
    "Chosen",
    "Positions",
    "Slice",
    "as_chosen",
    "freeze_positions",
    "normalise_select",
]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A slice that can be hashed (``slice`` itself cannot before Python 3.12)."""

    start: int | None
    stop: int | None
    step: int | None

    def indices(self, length: int) -> range:
        """The positions among ``length``, none of them negative."""
        return range(*slice(self.start, self.stop, self.step).indices(length))

    def __repr__(self) -> str:
        return f"slice({self.start}, {self.stop}, {self.step})"


@final
class Chosen(tuple[int, ...]):
    """Positions, sorted and each once, that print as they were written.

    Equal to a tuple of the same positions, and hashed like it.
    """

    written: str

    def __repr__(self) -> str:
        return self.written


#: Positions in frozen form: ``None`` for all, each by its number, or a slice.
Positions = tuple[int, ...] | Slice | None


def freeze_positions(written: Any, name: str) -> Positions:
    """Positions in the order they are written in.

    Args:
        written: An int, an iterable of ints, a slice, or ``None``.  Anything with
            ``__index__`` counts as an int, inside an iterable bools too.
        name: What to call it in the error.

    Raises:
        SpecTypeError: it is something else.
        SpecError: it is a slice with a step of zero.
    """
    if written is None or isinstance(written, Slice):
        return written
    if isinstance(written, slice):
        start, stop, step = (
            None if part is None else _index(part, written, name)
            for part in (written.start, written.stop, written.step)
        )
        if step == 0:
            raise SpecError(
                f"{name}={written!r} has a step of zero", remedy="drop the step"
            )
        return Slice(start, stop, step)
    if isinstance(written, (str, bytes, bool, Mapping)):
        raise _no_selection(written, written, name)
    try:
        return (operator.index(written),)
    except TypeError:
        pass
    try:
        items = list(written)
    except TypeError:
        raise _no_selection(written, written, name) from None
    return tuple(_index(item, written, name) for item in items)


def normalise_select(select: Any, name: str = "select") -> Positions:
    """Positions that select, whose order means nothing: sorted and each once.

    Args:
        select: As for :func:`freeze_positions`.
        name: What to call it in the error.

    Raises:
        SpecTypeError: it is something else.
        SpecError: it is a slice with a step of zero.
    """
    frozen = freeze_positions(select, name)
    return tuple(sorted(set(frozen))) if isinstance(frozen, tuple) else frozen


def as_chosen(select: Any, name: str = "select") -> Positions:
    """What :func:`normalise_select` makes of a selection, printed as it is written."""
    if isinstance(select, Chosen):
        return select
    frozen = freeze_positions(select, name)
    if not isinstance(frozen, tuple):
        return frozen
    chosen = Chosen(sorted(set(frozen)))
    alone = hasattr(type(select), "__index__") and not hasattr(select, "__len__")
    chosen.written = str(frozen[0]) if alone else str(list(frozen))
    return chosen


def _index(item: Any, written: Any, name: str) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise _no_selection(written, item, name) from None


def _no_selection(written: Any, item: Any, name: str) -> SpecTypeError:
    why = "" if item is written else f"{item!r} is of type {type(item).__name__}"
    return SpecTypeError(
        f"{name}={written!r} is not a selection",
        why=why or f"it is of type {type(written).__name__}",
        remedy="pass an int, a list of ints, a slice, or None for all",
    )
