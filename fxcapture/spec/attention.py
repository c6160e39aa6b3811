"""Which part of a module's attention weights, or scores, is wanted.

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
    """Which part of the weights, or of the scores, is wanted.

    Args:
        heads: Heads: an int, ints in the wanted order, a slice, or ``None`` for all.
            Negative ones count from the end.  The dimension stays, also for one head.
        queries: Query positions, in the same way.
        scores: The scores: what the softmax makes the weights of.

    Raises:
        SpecTypeError: a field is of the wrong type.
        SpecError: it selects nothing.
    """

    heads: Positions
    queries: Positions
    scores: bool

    def __init__(
        self, heads: Any = None, queries: Any = None, scores: bool = False
    ) -> None:
        object.__setattr__(self, "heads", _some(heads, "heads"))
        object.__setattr__(self, "queries", _some(queries, "queries"))
        object.__setattr__(self, "scores", scores)

    @property
    def noun(self) -> str:
        """What it is, for messages."""
        return "scores" if self.scores else "weights"

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
        out: dict[str, Any] = {
            k: _to_list(v) for k, v in fields.items() if v is not None
        }
        return out | {"scores": True} if self.scores else out

    @staticmethod
    def from_json(data: Any) -> Attention:
        """What :meth:`to_json` wrote.

        Raises:
            SpecError: it is something else.
        """
        known = {"heads", "queries", "scores"}
        if (
            not isinstance(data, Mapping)
            or data.keys() - known
            or data.get("scores", True) is not True
        ):
            raise SpecError(
                f"attention={data!r} is not a part of the weights",
                why="expected an object with no other fields than heads, queries and "
                "scores, which is true if it is there",
                remedy="write it with CaptureSpec.to_json",
            )
        return Attention(
            **{k: v if k == "scores" else _from_list(v, k) for k, v in data.items()}
        )


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
