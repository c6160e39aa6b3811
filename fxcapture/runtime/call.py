"""The calls that are in flight.

Terms
    frame: one call of one captured model: its selection, and what it has produced so
        far.  Compiled code finds its frame when it runs; nothing is stored on the model
        or on the compiled program, so that calls do not see each other.
    broken run: a call that is not one graph.  It learns positions as it goes.
    event: one site of a broken run, and the values it gave.

Invariants
    The active frame is a context variable: each thread and each task has its own.
    A frame holds a value only as long as it may still be selected: with ``select=[-2]``
    the latest two, not all of them.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from fxcapture.plan.plan import Leaf
from fxcapture.plan.records import Records
from fxcapture.plan.sites import Site
from fxcapture.spec.tap import CaptureSpec

__all__ = ["Event", "Frame", "active_frame"]


@final
@dataclasses.dataclass(slots=True)
class Event:
    """One site of a broken run.

    Attributes:
        site: The site.
        tensors: What it gave; emptied when no record can select it any more.
        sizes: Integer leaves of its result.
        entry_sizes: Integer leaves of its arguments.
        claims: Number of records that may still select it.
        own: The module's own tensors that may stand for the copies, each with its
            version; they are not kept alive.
    """

    site: Site
    tensors: Mapping[Leaf, torch.Tensor]
    sizes: tuple[int, ...]
    entry_sizes: tuple[int, ...]
    claims: int = 0
    own: Mapping[Leaf, tuple[Any, int]] = dataclasses.field(default_factory=dict)

    def value(self, leaf: Leaf) -> torch.Tensor:
        """A tensor of it: the module's own, if nothing has written to it.

        Gradients with respect to a record can then be taken, as with a forward hook.
        """
        if leaf in self.own:
            reference, version = self.own[leaf]
            tensor: torch.Tensor | None = reference()
            if tensor is not None and tensor._version == version:
                return tensor
        return self.tensors[leaf]

    def release(self) -> None:
        """Give up one claim, and the values with the last."""
        self.claims -= 1
        if self.claims <= 0:
            self.tensors = {}


@final
class _Window:
    """Which hits of one record may still be selected.

    Args:
        select: Positions, in frozen form.
        initial: Position 0 is the first hit's input.
        inputs: Every position is a hit's input.
    """

    __slots__ = (
        "_all", "_count", "_first", "_initial", "_inputs", "_select", "_tail",
        "_tail_length",
    )  # fmt: skip

    def __init__(self, select: Any, initial: bool, inputs: bool) -> None:
        self._select = select
        self._inputs = inputs
        self._initial = initial
        self._count = 0
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
        self._tail: collections.deque[Event] = collections.deque()

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

    def push(self, event: Event) -> None:
        """Take the next hit."""
        if self._stays():
            event.claims += 1
        elif self._tail_length:
            event.claims += 1
            self._tail.append(event)
        # A hit that stays takes a place in the tail as well, as nothing to release.
        if self._tail_length and (not self._tail or self._tail[-1] is not event):
            self._tail.append(_NOTHING)
        if len(self._tail) > self._tail_length:
            self._tail.popleft().release()
        self._count += 1


_NOTHING = Event(Site(path="", structure="N"), {}, (), ())


@final
class Frame:
    """One call in flight.

    Args:
        owner: The program that was called; frames of others are not touched.
        selection: Positions that replace the spec's, in canonical form.
        whole: The call runs as one graph, which delivers finished records.
        spec: The program's spec.
        inputs: The inputs of reductions, by name.

    Attributes:
        events: What the call produced so far, in call order, if it is not whole.
        delivered: The finished records, if it is.
        started: A graph of the call has begun to run, so that it cannot start over.
        error: An error of ours that has to pass through Dynamo unharmed.
    """

    __slots__ = (
        "_made", "_repeated", "_spec", "delivered", "error", "events", "inputs",
        "owner", "selection", "started", "whole",
    )  # fmt: skip

    def __init__(
        self,
        owner: Any,
        selection: tuple[tuple[str, Any], ...],
        *,
        whole: bool,
        spec: CaptureSpec,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.owner = owner
        self.inputs: Mapping[str, Any] = inputs or {}
        self.selection = selection
        self.whole = whole
        self.events: list[Event] = []
        self.delivered: Records | None = None
        self.started = False
        self.error: Exception | None = None
        self._spec = spec
        self._made: dict[str, _Window] | None = None
        self._repeated: Frame | None = None

    @property
    def _windows(self) -> dict[str, _Window]:
        # Made when the first event comes: a whole run has none.
        if self._made is None:
            chosen = dict(self.selection)
            self._made = {
                name: _Window(
                    chosen.get(name, tap.select), tap.initial, tap.point == "input"
                )
                for name, tap in self._spec.items()
            }
        return self._made

    def anew(self) -> Frame:
        """An empty frame of an equal call."""
        return Frame(
            self.owner,
            self.selection,
            whole=self.whole,
            spec=self._spec,
            inputs=self.inputs,
        )

    @property
    def repeated(self) -> Frame:
        """An empty frame of an equal call, always the same: it holds no value."""
        if self._repeated is None:
            self._repeated = self.anew()
        return self._repeated

    def may_select(self, hits: Mapping[str, int]) -> bool:
        """Whether any record may select one of so many next hits."""
        return any(self._windows[name].may_select(n) for name, n in hits.items())

    def wants_entry(self, records: Iterable[str]) -> bool:
        """Whether what a call that begins now receives may be selected."""
        windows = self._made or self._windows
        return any(windows[name].wants_entry for name in records)

    def add(self, event: Event, records: Iterable[str], *, final: bool) -> None:
        """Append an event, and let go of values that can no longer be selected.

        Args:
            event: The event.
            records: The records it is a hit of.
            final: ``False`` where forward hooks may yet replace the result, so that the
                event is no hit by itself.
        """
        self.events.append(event)
        if not final:
            event.claims = 1
            return
        windows = self._made or self._windows
        for name in records:
            windows[name].push(event)
        if not event.claims:
            event.tensors = {}


active_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar(
    "fxcapture_active_frame", default=None
)
