"""Which module calls of a broken run may still be selected, record by record.

A broken run learns positions as it goes: how many module calls a record has is known
when it has ended.  What may still be wanted is kept until then, and nothing else: with
``select=[-2]`` the latest two values, not all of them.
"""

from __future__ import annotations

import collections
from typing import Any, final

from fxcapture.plan.sites import Site
from fxcapture.runtime.observation import Observation

__all__ = ["Window"]


@final
class Window:
    """Which hits of one record may still be selected.

    Args:
        select: Positions, in frozen form.
        initial: Position 0 is the first hit's input.
        inputs: Every position is a hit's input.
        begins: Paths of the modules whose input can be position 0; ``None``: any.
        count: How many hits there were before.
    """

    __slots__ = (
        "_all", "_begins", "_count", "_first", "_initial", "_inputs", "_select",
        "_tail", "_tail_length",
    )  # fmt: skip

    def __init__(
        self,
        select: Any,
        initial: bool,
        inputs: bool,
        begins: frozenset[str] | None = None,
        count: int = 0,
    ) -> None:
        self._select = select
        self._begins = begins
        self._inputs = inputs
        self._initial = initial
        self._count = count
        self._all = select is None
        self._tail_length = 0
        if isinstance(select, tuple):
            self._tail_length = max((-i for i in select if i < 0), default=0)
        elif select is not None:
            bounds = (select.start, select.stop, select.step)
            self._all = any(b is not None and b < 0 for b in bounds)
        # From the end, position 0 is as good as any until the call is over.
        negative = self._all or self._tail_length > 0
        self._first = initial and (negative or self._is_selected(0))
        self._tail: collections.deque[Observation] = collections.deque()

    @property
    def count(self) -> int:
        """How many hits there were."""
        return self._count

    @property
    def wants_entry(self) -> bool:
        """Whether what a call that begins now receives may be selected.

        Positions are counted when calls return, so that others may come before it.
        """
        return self._inputs or (self._first and self._count == 0)

    def may_select(self, hits: int) -> bool:
        """Whether one of so many next hits may be selected."""
        return self._tail_length > 0 or any(self._stays(i) for i in range(hits))

    def _stays(self, ahead: int = 0) -> bool:
        """Whether the next hit is selected whatever comes after it.

        Args:
            ahead: Ask of the one so many hits later.
        """
        hit = self._count + ahead
        if self._all or (self._first and hit == 0):
            return True
        return self._is_selected(hit + self._initial)

    def _is_selected(self, position: int) -> bool:
        """Whether a position is selected by one that counts from the start."""
        if isinstance(self._select, tuple):
            return position in self._select
        # A slice without negative bounds: positions up to this one decide.
        return position in self._select.indices(position + 1)

    def push(self, observation: Observation) -> None:
        """Take the next hit."""
        path = observation.site.path
        if not self._count and self._begins is not None and path not in self._begins:
            self._initial = self._first = False
        # A hit that stays counts in the tail as well, where nothing is to release.
        waits = _NOTHING
        if self._stays():
            observation.claims += 1
        elif self._tail_length:
            observation.claims += 1
            waits = observation
        if self._tail_length:
            self._tail.append(waits)
            if len(self._tail) > self._tail_length:
                self._tail.popleft().release()
        self._count += 1


_NOTHING = Observation(Site(path="", structure="N"), {}, {})
