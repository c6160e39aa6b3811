"""Which part of a module's attention weights is wanted.

Invariants
    Frozen, hashable, and to and from JSON values.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, final

from fxcapture.errors import SpecError, SpecTypeError

__all__ = ["Attention", "Positions"]

#: Positions: each in the order given, or (start, stop, step); ``None`` for all.
Positions = tuple[int, ...] | tuple[str, int | None, int | None, int | None] | None


@final
@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Attention:
    """Which part of the weights is wanted.

    Args:
        heads: Heads: an int, ints in the wanted order, a slice, or ``None`` for all.
            Negative ones count from the end.  The dimension stays, also for one head.
        queries: Query positions, in the same way.

    Raises:
        SpecTypeError: a field is of the wrong type.
        SpecError: it selects nothing.
    """

    heads: Positions
    queries: Positions

    def __init__(self, heads: Any = None, queries: Any = None) -> None:
        object.__setattr__(self, "heads", _positions(heads, "heads"))
        object.__setattr__(self, "queries", _positions(queries, "queries"))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; those that mean "all" are left out."""
        fields = {"heads": self.heads, "queries": self.queries}
        return {k: list(v) for k, v in fields.items() if v is not None}

    @staticmethod
    def from_json(data: Any) -> Attention:
        """What :meth:`to_json` wrote."""
        return Attention(**{k: _from_list(v) for k, v in data.items()})


def _from_list(items: list[Any]) -> Any:
    return slice(*items[1:]) if items[:1] == ["slice"] else items


def _positions(value: Any, name: str) -> Positions:
    if value is None:
        return None
    if isinstance(value, slice):
        start, stop, step = (
            None if part is None else operator.index(part)
            for part in (value.start, value.stop, value.step)
        )
        if step is not None and step < 1:
            raise SpecError(
                f"{name}={value!r} has a step below one",
                remedy="list the positions in the order you want",
            )
        return ("slice", start, stop, step)
    items = value if isinstance(value, Iterable) else (value,)
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        found = tuple(operator.index(item) for item in items)
    except TypeError:
        raise SpecTypeError(
            f"{name}={value!r} is of type {type(value).__name__}",
            remedy="pass an int, a list of ints, a slice, or None for all",
        ) from None
    if not found:
        raise SpecError(
            f"{name}={value!r} selects nothing",
            remedy="name at least one, or pass None for all",
        )
    return found
