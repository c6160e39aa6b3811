"""One call of a captured model in flight, and its result.

Terms
    call: one call: its selection, and what it has produced so far.  Compiled code finds
        its call when it runs; nothing is stored on the model or on the compiled
        program, so that calls do not see each other.
    broken run: a call that is not one graph.  It learns positions as it goes.

Invariants
    The call in flight is a context variable: each thread and each task has its own.
    A call holds a value only as long as it may still be selected: with ``select=[-2]``
    the latest two, not all of them.  When it is finished it holds none.
"""

from __future__ import annotations

import collections
import contextvars
from collections.abc import Iterable, Mapping
from typing import Any, final

from fxcapture.plan.match import Match
from fxcapture.plan.plan import Plan
from fxcapture.plan.records import Records
from fxcapture.plan.sites import SiteTable, pair_hooked
from fxcapture.runtime.observation import Observation
from fxcapture.runtime.window import Window
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import BEGIN, Mark, receiver
from fxcapture.trace.real_scope import Holder, hold_by

__all__ = ["Call", "call_in_flight", "eager_call_in_flight", "put_in_flight"]


@final
class Call:
    """One call in flight.

    Args:
        owner: The capture it is a call of.
        selection: Positions that replace the spec's, in canonical form.
        whole: It runs as one graph, which delivers finished records.
        spec: The capture's spec.
        bound: The spec bound to the model.
        inputs: The inputs of reductions, by name.

    Attributes:
        observations: What it produced so far, in call order, if it is not whole.
        delivered: The finished records, if it is.
        started: A graph of it has begun to run, so that it cannot start over.
        error: An error of ours that has to pass through Dynamo unharmed.
        plan: What fed its records; ``None`` before it has finished.
        holder: The frame that it runs in; ``None`` when it has ended.
        break_reason: Why it did not run as one graph; ``None`` if it did.
    """

    __slots__ = (
        "__weakref__", "_before", "_made", "_pending", "_repeated", "_spec", "_table",
        "bound", "break_reason", "delivered", "error", "holder", "inputs",
        "observations",
        "owner", "plan", "selection", "started", "whole",
    )  # fmt: skip

    def __init__(
        self,
        owner: Any,
        selection: tuple[tuple[str, Any], ...],
        *,
        whole: bool,
        spec: CaptureSpec,
        bound: Match,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.owner = owner
        self.inputs: Mapping[str, Any] = inputs or {}
        self.selection = selection
        self.whole = whole
        self.bound = bound
        self.observations: list[Observation] = []
        self.delivered: Records | None = None
        self.started = False
        self.error: BaseException | None = None
        self.plan: Plan | None = None
        self.break_reason: str | None = None
        self.holder: Holder | None = None
        self._spec = spec
        self._pending: list[Mark] = []
        self._made: dict[str, Window] | None = None
        self._before: Mapping[str, int] = {}
        self._repeated: Call | None = None
        self._table: SiteTable | None = None

    @property
    def _windows(self) -> dict[str, Window]:
        # Made when the first observation comes: a whole run has none.
        if self._made is None:
            chosen = dict(self.selection)
            self._made = {
                name: Window(
                    # Which calls count is known when their module has returned.
                    None
                    if tap.function is not None and tap.function.counts_from_end
                    else chosen.get(name, tap.select),
                    tap.initial,
                    tap.point == "input",
                    None if tap.recorded is None else tap.recorded.initial,
                    self._before.get(name, 0),
                )
                for name, tap in self._spec.items()
            }
        return self._made

    def anew(self) -> Call:
        """An empty call with the same selection and as many hits so far as this one.

        Stands in for it while a checkpoint computes a part of it again.
        """
        made = Call(
            self.owner,
            self.selection,
            whole=self.whole,
            spec=self._spec,
            bound=self.bound,
            inputs=self.inputs,
        )
        made._before = self._before
        if self._made is not None:
            made._before = {name: w.count for name, w in self._made.items()}
        return made

    @property
    def repeated(self) -> Call:
        """An empty equal call, always the same: known to checkpoints in its place."""
        if self._repeated is None:
            self._repeated = self.anew()
        return self._repeated

    def take(self, *fields: Any) -> None:
        """Take a mark that was executed; with the last of a module call, observe it."""
        mark = Mark(*fields)
        if mark.kind == BEGIN:
            return
        self._pending.append(mark)
        if mark.ends:
            marks, self._pending = self._pending, []
            self.owner.observe(self, marks)

    def may_select(self, hits: Mapping[str, int]) -> bool:
        """Whether any record may select one of so many next hits."""
        return any(self._windows[name].may_select(n) for name, n in hits.items())

    def wants_hit(self, records: Iterable[str]) -> bool:
        """Whether an entry may be selected that a call which ends next gives.

        Args:
            records: The records of its module, each as often as it gives an entry.
        """
        return self.may_select(collections.Counter(records))

    def wants_entry(self, records: Iterable[str]) -> bool:
        """Whether what a call that begins now receives may be selected."""
        windows = self._made or self._windows
        return any(windows[name].wants_entry for name in records)

    def add(
        self, observation: Observation, records: Iterable[str], *, final: bool
    ) -> None:
        """Append an observation, and let go of values that can no longer be selected.

        Args:
            observation: The observation.
            records: The records it is a hit of.
            final: ``False`` where forward hooks may yet replace the result, so that it
                is no hit by itself.
        """
        self.observations.append(observation)
        if not final:
            observation.claims = 1
            return
        windows = self._made or self._windows
        for name in records:
            windows[name].push(observation)
        if not observation.claims:
            observation.drop()

    def finish(self, plan: Plan, sites: SiteTable | None) -> None:
        """Keep what the run was like, and none of its values.

        Args:
            plan: What fed the records.
            sites: The run's sites; ``None`` for those of the observations.
        """
        self.plan = plan
        self._table = sites
        self.inputs = {}
        self.delivered = None
        self._made = self._repeated = None
        for observation in self.observations:
            observation.drop()

    @property
    def sites(self) -> SiteTable:
        """The sites of the run, in call order."""
        if self._table is None:
            described = [o.described() for o in self.observations]
            self._table = SiteTable(pair_hooked(described)[0])
            self.observations = []
        return self._table


def put_in_flight(
    current: contextvars.ContextVar[Call | None], call: Call, depth: int = 2
) -> contextvars.Token[Call | None]:
    """Make a call the one in flight.

    Args:
        current: Holds the call in flight.
        call: The call.
        depth: How many frames above this function the one is that the call runs in.
    """
    outer = current.get()
    if outer is not None and (outer.holder is None or not outer.holder.runs):
        # An interrupt came before the call could be taken away.
        current.set(None)
        receiver.set(None)
    call.holder = hold_by(depth)
    return current.set(call)


call_in_flight: contextvars.ContextVar[Call | None] = contextvars.ContextVar(
    "fxcapture_call_in_flight", default=None
)
#: The same of calls that nothing compiles, which may stand inside of the others.
eager_call_in_flight: contextvars.ContextVar[Call | None] = contextvars.ContextVar(
    "fxcapture_eager_call_in_flight", default=None
)
