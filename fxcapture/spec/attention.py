"""Which part of a module's attention weights is wanted.

Invariants
    Frozen, hashable, and to and from JSON values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, final

from fxcapture.errors import SpecError
from fxcapture.spec.positions import Positions, Slice, freeze_positions

__all__ = ["Attention"]


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
        object.__setattr__(self, "heads", _some(heads, "heads"))
        object.__setattr__(self, "queries", _some(queries, "queries"))

    def written(self) -> list[str]:
        """The arguments that make it, as they could be written."""
        fields = {"heads": self.heads, "queries": self.queries}
        return [
            f"{k}={list(v) if isinstance(v, tuple) else v!r}"
            for k, v in fields.items()
            if v is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; those that mean "all" are left out."""
        fields = {"heads": self.heads, "queries": self.queries}
        return {k: _to_list(v) for k, v in fields.items() if v is not None}

    @staticmethod
    def from_json(data: Any) -> Attention:
        """What :meth:`to_json` wrote.

        Raises:
            SpecError: it is something else.
        """
        if not isinstance(data, Mapping) or data.keys() - {"heads", "queries"}:
            raise SpecError(
                f"attention={data!r} is not a part of the weights",
                why="expected an object with no other fields than heads and queries",
                remedy="write it with CaptureSpec.to_json",
            )
        return Attention(**{k: _from_list(v, k) for k, v in data.items()})


def _to_list(positions: tuple[int, ...] | Slice) -> list[Any]:
    if isinstance(positions, Slice):
        return ["slice", positions.start, positions.stop, positions.step]
    return list(positions)


def _from_list(items: Any, name: str) -> Any:
    if not isinstance(items, list) or items[:1] != ["slice"]:
        return items
    if len(items) != 4:
        raise SpecError(
            f"{name}={items!r} is not a slice",
            why="expected 'slice', a start, a stop and a step",
            remedy="write it with CaptureSpec.to_json",
        )
    return slice(*items[1:])


def _some(value: Any, name: str) -> Positions:
    positions = freeze_positions(value, name)
    if positions == ():
        raise SpecError(
            f"{name}={value!r} selects nothing",
            remedy="name at least one, or pass None for all",
        )
    # A tensor has no slices that go backwards.
    if isinstance(positions, Slice) and (positions.step or 1) < 1:
        raise SpecError(
            f"{name}={value!r} has a step below one",
            remedy="list the positions in the order you want",
        )
    return positions
