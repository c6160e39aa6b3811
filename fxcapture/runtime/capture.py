"""A model with a spec, as far as its calls are not one graph.

It lets the overrides stand while a call runs, takes what they observe, and makes the
records when the call has ended.  Compiled runs in pieces use it, and calls that nothing
compiles.

Invariants
    A record of a call outside of graphs is a copy, taken when the module returned, or
    the module's own tensor: that where autograd records, nothing has written to it, and
    the caller got no other way to it.  So gradients at a record are eager's, and a
    later write never shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.plan.inputs import defer_reductions
from fxcapture.plan.match import Match, match, reducers_of
from fxcapture.plan.plan import Leaf, Plan, Slot
from fxcapture.plan.records import Records
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import Site, SiteTable, group_marks, pair_hooked, site_of
from fxcapture.plan.slots import leaves_of
from fxcapture.runtime.aliases import storages_in
from fxcapture.runtime.call import Call, call_in_flight, eager_call_in_flight
from fxcapture.runtime.in_flight import Again, InFlight
from fxcapture.runtime.observation import Observation
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.function import at_module, module_of
from fxcapture.spec.selector import Selector
from fxcapture.trace.eager_scope import EagerScope
from fxcapture.trace.mark import ENTRY, ORIGINAL, Mark
from fxcapture.trace.real_scope import RealScope, RunRegion

__all__ = ["Capture"]

_MAX_REMEMBERED = 2048
#: What a kind of module call is like: its site, the leaves that records may want of it,
#: the records it is a hit of, and whether it is one by itself.
_Kind = tuple[Site, tuple[Leaf, ...], tuple[str, ...], bool]


@final
class Capture:
    """A model, its spec, and the overrides that serve its calls.

    Args:
        model: The model; not changed but while a call runs.
        spec: What to capture.
        regions: Modules to compile one by one.
        run_region: Runs one of them: (its class, what to call, *args, **kwargs).
        watched: Compute attention weights in traces too, see ``trace.real_scope``.
        eager: Its calls run eagerly, see ``trace.eager_scope``.  They may stand inside
            a call of another capture, which goes on; one hides the eager calls around
            it.  The model is not kept alive, and is taken to stay as it is.

    Attributes:
        spec: The spec.

    Raises:
        TargetError: the spec, or ``regions``, does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: CaptureSpec,
        *,
        regions: Selector | None = None,
        run_region: RunRegion | None = None,
        watched: bool = True,
        eager: bool = False,
    ) -> None:
        self.spec = spec
        self._current = eager_call_in_flight if eager else call_in_flight
        self._scope: RealScope | EagerScope
        if eager:
            bound = match(spec, model, lambda module: ("forward",))
            self._scope = EagerScope(model, bound, self._current.get, self)
        else:
            self._scope = RealScope(
                model,
                lambda: match(spec, model),
                self.is_in_flight,
                self._asked,
                defer_reductions(reducers_of(spec), self._current_inputs),
                regions,
                run_region or _run_plainly,
                watched,
            )
        self._kinds: dict[Any, _Kind] = {}
        self._plans: dict[Any, Any] = {}

    @property
    def bound(self) -> Match:
        """The spec bound to the model's modules, as the latest call found them."""
        return self._scope.bound  # type: ignore[no-any-return]

    def is_in_flight(self) -> bool:
        """Whether the call in flight of this thread is one of this capture."""
        call = self._current.get()
        return call is not None and call.owner is self

    def call(
        self,
        selection: tuple[tuple[str, Any], ...] = (),
        inputs: Mapping[str, Any] | None = None,
    ) -> InFlight:
        """A context in which the model's calls in this thread are captured.

        Example::

            with capture.call(selection) as call:
                output = model(x)
            records = capture.records(call, output)

        Args:
            selection: Positions that replace the spec's, in canonical form.
            inputs: The inputs of reductions, by name.
        """
        call = Call(
            self,
            selection,
            whole=False,
            spec=self.spec,
            bound=self.bound,
            inputs=inputs,
        )
        return InFlight(self._scope, call, self._current)

    # -- while a call runs ---------------------------------------------------------

    def representative(self, path: str) -> str:
        """Path of a module that a mark's path stands for."""
        return self._scope.representative(module_of(path))

    def path_of_token(self, token: torch.Tensor) -> str:
        """The path of the module that a token stands for."""
        path = self._scope.path_of_token(token)
        assert path is not None
        return path

    def hits_of(self, bound: Match, site: Site) -> tuple[tuple[str, ...], bool]:
        """The records that a site is a hit of; whether it is one by itself.

        It is not if forward hooks are still to see the call.
        """
        final = site.hooked or not bound.is_hooked(site.path)
        records = bound.records_of(site.path)
        if site.index is not None:
            records = tuple(n for n in records if self._may_want(n, site.index))
        return records, final

    def _may_want(self, record: str, index: int) -> bool:
        """Whether a record may want the function call of a number."""
        function = self.spec[record].function
        assert function is not None
        return function.counts_from_end or function.index in (None, index)

    def join_checkpoint(self, call: Call) -> None:
        """Run alike when the checkpoint that a call is in computes anew.

        That happens in backward, when the overrides are gone; what it gives then is a
        repetition and counts for nothing.
        """
        if not torch.is_grad_enabled():
            return
        scope, current = self._scope, self._current
        repeated = call.repeated

        def prepare() -> Callable[[], Again]:
            # Where the call is now; itself, it would keep its values alive.
            equal = call.anew()
            return lambda: Again(scope, equal, current, repeated)

        _torch.while_recomputing(id(repeated), prepare)

    def _asked(self, token: torch.Tensor) -> bool:
        """Whether to copy what a call outside of graphs received."""
        call, path = self._current.get(), self._scope.path_of_token(token)
        if call is None or path is None:
            return False
        return call.wants_entry(call.bound.records_of(path))

    def _current_inputs(self) -> Mapping[str, Any]:
        call = call_in_flight.get()
        return {} if call is None else call.inputs

    def observe(self, call: Call, marks: Sequence[Mark]) -> None:
        """Take the marks of one module call that no graph made."""
        path = self._scope.path_of_token(marks[-1].token)
        if path is None:
            return  # of another capture, whose call is not in flight
        path = at_module(marks[-1].path, path)
        if torch.is_grad_enabled():
            self.join_checkpoint(call)
        original = next((m for m in marks if m.kind == ORIGINAL), None)
        if original is not None:
            marks = [m for m in marks if m is not original]
        [parts] = group_marks(marks)
        bound = call.bound
        # All that tells kinds of sites apart; the rest follows from it.
        key = bound, path, tuple([(m.kind, m.structure) for m in marks])
        found = self._kinds.get(key)
        if found is None:
            site = site_of(
                parts,
                path=path,
                classes=bound.classes,
                type_of=lambda tensor: ((), ""),
                size_of=lambda size: None,
            )
            found = site, leaves_of(self.spec, bound, site), *self.hits_of(bound, site)
            _remember(self._kinds, key, found)
        site, leaves, records, final = found
        by_kind = parts.marks
        observation = Observation(
            site,
            {},
            {kind: tuple(map(int, mark.sizes)) for kind, mark in by_kind.items()},
            [(t.shape, t.dtype) for t in parts.result.tensors],
        )
        call.add(observation, records, final=final)
        if observation.claims:
            tensors = {}
            for leaf in leaves:
                held = by_kind.get(leaf.kind)
                if held is None:
                    continue  # what it received cannot be selected any more
                value = held.tensors[leaf.index]
                tensors[leaf] = leaf.snapshot(value)
                version = None
                if original is not None and leaf.kind == ENTRY:
                    value = original.tensors[leaf.index]
                    version = original.sizes[leaf.index]
                # Autograd recorded it, and it shares no memory with a parameter.
                if leaf.is_plain and _torch.is_recorded(value):
                    if version is None:
                        version = _torch.version_of(value)
                    observation.own[leaf] = value, version
            observation.tensors = tensors

    # -- when it has ended ---------------------------------------------------------

    def records(self, call: Call, outside: Any = ()) -> Records:
        """The records of a finished run.

        Args:
            call: The run; it keeps no value from now on.
            outside: What the caller holds, and may write to.

        Raises:
            TargetError: the spec does not fit what the run called.
            CaptureError: a value cannot be captured.
        """
        if any(o.own for o in call.observations):
            held = storages_in(outside)
            for observation in call.observations:
                observation.own = {
                    leaf: own
                    for leaf, own in observation.own.items()
                    if _torch.storage_id(own[0]) not in held
                }
        plan, parts = self._plan_of(call)
        values = {
            record.name: tuple(
                None if slot is None else _read(slot, call.observations, parts)
                for slot in record.slots
            )
            for record in plan.records
        }
        call.finish(plan, None)
        return Records(values, {r.name: r.paths for r in plan.records}, plan)

    def _plan_of(self, call: Call) -> tuple[Plan, tuple[tuple[int, int], ...]]:
        """The plan of a finished broken run, made once for each sequence of sites."""
        sites = tuple([o.site for o in call.observations])
        # By identity, since to hash what a site says costs more than all else here; the
        # sites are kept with the plan, so that no other gets the same.
        key = call.bound, call.selection, tuple(map(id, sites))
        found = self._plans.get(key)
        if found is None:
            merged, parts = pair_hooked(sites)
            plan = resolve(self.spec, call.bound, SiteTable(merged), call.selection)
            found = plan, parts, sites
            _remember(self._plans, key, found)
        return found[:2]  # type: ignore[no-any-return]


def _read(
    slot: Slot, observations: Sequence[Observation], parts: Sequence[tuple[int, int]]
) -> Any:
    inner, outer = parts[slot.site]
    leaves = dict(slot.leaves)
    observation = observations[inner if slot.precedes_hooks else outer]
    return slot.structure.build(
        lambda i: observation.value(leaves[i]),
        lambda i: observation.size(slot.kind, i),
    )


def _run_plainly(kind: type, below: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return below(*args, **kw)


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; all are dropped when new shapes have made too many of them."""
    if len(table) >= _MAX_REMEMBERED:
        table.clear()
    table[key] = value
