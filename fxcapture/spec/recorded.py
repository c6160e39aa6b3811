"""What a declaration takes of the outputs of one record's modules.

A declaration has rules of its own, which a :class:`~fxcapture.spec.tap.Tap` says by
this in place of an element: the recorders of one record may name different elements,
or several of one module; only a tuple has elements, anything else is taken whole.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import final

__all__ = ["Recorded"]


@final
# Without slots, for the cached property.
@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a record takes of each of its modules.

    Attributes:
        elements: Path to the elements that a call of the module gives entries of, in
            their order.
        initial: Paths at which the initial state is taken, if the first call is of one.
        keeps: Where every entry is ``None``, they still stand in the record.
        fused: Paths of attention modules in transformers' way whose kernel returns no
            weights: they are not handed the flag that asks for them, which the kernel
            only warns of, in a way that Dynamo does not trace.
        eager: Paths of those that write their attention out, and return the weights:
            their fused calls are not watched for.
    """

    elements: tuple[tuple[str, tuple[int, ...]], ...]
    initial: frozenset[str]
    keeps: bool
    fused: frozenset[str]
    eager: frozenset[str]

    @functools.cached_property
    def _by_path(self) -> dict[str, tuple[int, ...]]:
        return dict(self.elements)

    def of(self, path: str) -> tuple[int, ...]:
        """The elements that the calls of one module give."""
        return self._by_path.get(path, ())
