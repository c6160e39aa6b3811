"""The Dynamo front end: a model, traced with marks, compiled with taps.

A call is tried as one graph first (a *whole run*, see ``graph_program``).  Where Dynamo
cannot trace it as one, it runs in pieces (a *broken run*): Dynamo compiles them as it
sees fit, with marks in them, and what runs between them is observed eagerly.

Invariants
    Nothing is written to the model in a whole run.  In a broken run the overrides stand
    in the instances while the call runs, and are gone after it, also if it raised.
    Each program has a code object of its own: Dynamo caches by code object, and neither
    another captured model nor a plain one may run this one's code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture import _torch, passes
from fxcapture.errors import FxCaptureError, TraceError
from fxcapture.plan.inputs import defer_reductions, find_inputs
from fxcapture.plan.plan import (
    Leaf,
    Match,
    Plan,
    Slot,
    leaves_of,
    match,
    reducers_of,
    resolve,
)
from fxcapture.plan.records import Records
from fxcapture.plan.sites import Site, SiteTable
from fxcapture.reductions import bind_inputs
from fxcapture.runtime.call import Event, Frame, active_frame
from fxcapture.runtime.compiled_graph import Piece, WholeGraph
from fxcapture.spec.selector import Selector
from fxcapture.spec.tap import CaptureSpec
from fxcapture.trace.fused_layers import fused_attention
from fxcapture.trace.mark import (
    emit_mark,
    enter,
    leave,
    restore_left_behind,
)
from fxcapture.trace.overrides import Overrides
from fxcapture.trace.structure import encode

__all__ = ["DynamoProgram"]

#: ``(args, kwargs, selection, capture_inputs) -> (output, records)``
Run = Callable[..., tuple[Any, Records]]

_MAX_REMEMBERED = 2048

_log = logging.getLogger("fxcapture")


@final
class DynamoProgram:
    """A model, its spec, and everything that Dynamo compiled of them.

    Args:
        model: The model; not changed.
        spec: What to capture.
        keep_output: Whether callers want the model's output.
        backend: A Dynamo backend's name or a callable.
        mode: As in ``torch.compile``.
        options: As in ``torch.compile``.
        dynamic: As in ``torch.compile``.
        fullgraph: Refuse to run as several graphs; with regions, each as several.
        regions: Modules to compile one by one; the rest of the model then runs eagerly.
        compile_kwargs: Further keywords of ``torch.compile``.

    Attributes:
        bound: The spec bound to the model's modules, as the latest trace found them.
        last_sites: The sites of the latest call.
        run: Runs the model once: ``(args, kwargs, selection) -> (output, records)``.
        break_reason: Why the model does not run as one graph; ``None`` if it does.
        compiled: Every graph compiled so far.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: CaptureSpec,
        *,
        keep_output: bool,
        backend: str | Callable[..., Any],
        mode: str | None,
        options: Mapping[str, Any] | None,
        dynamic: bool | None,
        fullgraph: bool,
        regions: Selector | None,
        compile_kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.spec = spec
        self.keep_output = keep_output
        self.fullgraph = fullgraph
        self.reducers = reducers_of(spec)
        self.inner = _torch.resolve_backend(backend, mode, options, dynamic)
        self._backend_given = backend
        #: Where the conversions cost memory; other backends run the graph as it is.
        self.share_masks = backend == "inductor"
        self.bound: Match = match(spec, model)
        self.last_sites = SiteTable()
        self.regional = regions is not None
        self._pieces_for_good = self.regional
        self.break_reason: str | None = "regions= was given" if self.regional else None
        self.compiled: list[WholeGraph | Piece] = []
        self._numbers = itertools.count()
        self._overrides = Overrides(
            model,
            spec,
            emit_mark,
            self._observe_eagerly,
            self._asked,
            defer_reductions(self.reducers, _current_inputs),
            regions,
            self._run_region,
        )
        #: The site of each kind of eager observation, its leaves and ``hits_of`` it.
        self._eager_sites: dict[
            Any, tuple[Site, tuple[Leaf, ...], tuple[str, ...], bool]
        ] = {}
        self._event_plans: dict[Any, Any] = {}
        self._region_functions: dict[type, Callable[..., Any]] = {}
        settings = {"dynamic": dynamic, **compile_kwargs}
        self._run_whole = torch.compile(
            self._whole_function(), backend=self._backend, fullgraph=True, **settings
        )
        settings["isolate_recompiles"] = True
        self._settings = settings
        # A caller may itself be compiled; what it traced of this it would inline.
        self.run: Run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]
        self._run_pieces = torch.compile(
            _own_code(_call_model),
            backend=self._backend,
            fullgraph=fullgraph and not self.regional,
            **settings,
        )

    def next_graph_number(self) -> int:
        """The number of the graph that is being compiled."""
        return next(self._numbers)

    @functools.cached_property
    def _reused(self) -> Callable[[torch.Tensor], bool] | None:
        return _torch.reuses_outputs(self._backend_given, self.inner)

    @property
    def asynchronous(self) -> bool:
        """Whether copies to the host may run while the rest of a graph does.

        Not where graphs are replayed: the next run writes over what this one copied.
        """
        return self._reused is None

    def kept(self, taps: Sequence[Any]) -> Sequence[Any]:
        """Taps that the next run of the graph does not write over.

        A copy inside the graph would be one of its output buffers itself.
        """
        reused = self._reused
        if reused is None:
            return taps
        return [
            tap.clone() if isinstance(tap, torch.Tensor) and reused(tap) else tap
            for tap in taps
        ]

    def plan_of(self, sites: SiteTable, selection: Any) -> Plan:
        """The plan for the sites of one whole run."""
        return resolve(self.spec, self.bound, sites, selection)

    def _whole_function(self) -> Callable[..., Any]:
        model, reducers, keep_output = self.model, self.reducers, self.keep_output

        @_torch.constant
        def targets() -> Any:
            # Called while tracing: the module tree may have changed since the last
            # trace, and a change that matters makes Dynamo trace again.
            self.bound = match(self.spec, model)
            return self.bound.targets

        def captured(  # traced, never executed
            inputs: Any, /, *args: Any, **kwargs: Any
        ) -> Any:
            saved = enter(model, targets(), emit_mark, bind_inputs(reducers, inputs))
            try:
                output = model(*args, **kwargs)
            finally:
                leave(saved)
            return output if keep_output else None

        return _own_code(captured)

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        frame = active_frame.get()
        if frame is None or frame.owner is not self:
            return self.inner(passes.without_marks(gm), list(example_inputs))
        made: WholeGraph | Piece
        try:
            if frame.whole and passes.reuses_bodies(gm):
                raise _RunInPieces(
                    "a nested compile region has one body for several calls, in which "
                    "only tokens can tell the modules apart"
                )
            if frame.whole and passes.forgets_overrides(gm):
                raise _RunInPieces(
                    "the graph has a conditional, a loop or another operator with a "
                    "body, through which Dynamo cannot trace the undoing of overrides"
                )
            if frame.whole:
                made = WholeGraph(self, gm, example_inputs, frame.selection)
            else:
                made = Piece(self, gm, example_inputs)
        except (FxCaptureError, _RunInPieces) as error:
            frame.error = error
            raise
        self.compiled.append(made)
        return made

    # -- calls -------------------------------------------------------------------------

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        selection: Any,
        capture_inputs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Records]:
        """Run the model once; its output (or ``None``) and the records."""
        inputs = find_inputs(self.spec, self.model, args, kwargs, capture_inputs)
        with fused_attention(not self.bound.inside_fused):
            if self.break_reason is None:
                done = self._call_whole(args, kwargs, selection, inputs)
                if done is not None:
                    return done
            return self._call_in_pieces(args, kwargs, selection, inputs)

    def _call_whole(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        selection: Any,
        inputs: dict[str, Any],
    ) -> tuple[Any, Records] | None:
        """Run as one graph; ``None`` if the model has to be run in pieces."""
        frame = Frame(self, selection, whole=True, spec=self.spec)
        token = active_frame.set(frame)
        compiled = len(self.compiled)
        try:
            output = self._run_whole(inputs or None, *args, **kwargs)
        except Exception as error:
            if frame.started:
                raise  # the model's own error, from the running graph
            self._cannot_run_whole(error, frame)
            return None
        finally:
            active_frame.reset(token)
        if len(self.compiled) != compiled:
            left = restore_left_behind(self.model, self.bound.targets)
            if left:
                self.break_reason = f"Dynamo did not undo the override of {left[0]!r}"
                self._pieces_for_good = True
        # Dynamo makes no graph of a call that computes nothing.
        return output, frame.delivered or self._records_of(frame)

    def _cannot_run_whole(self, error: Exception, frame: Frame) -> None:
        """Decide what an error in Dynamo means: ours, the user's, or a graph break."""
        if isinstance(frame.error, _RunInPieces):
            self.break_reason = str(frame.error)
            self._pieces_for_good = True
            return
        if frame.error is not None:
            raise frame.error from None
        if isinstance(error, _torch.BackendCompilerFailed):
            raise error
        breaks = isinstance(
            error, (_torch.Unsupported, _torch.UserError, _torch.DataDependentError)
        )
        if self.fullgraph:
            if breaks:
                raise _not_traceable(self.model, str(error)) from error
            raise error
        once = isinstance(error, _torch.RecompileLimitHit) or _torch.in_transform()
        if breaks and not once:
            # Nothing of the model has run yet, so it can start over.  It is not tried
            # as one graph again, since each try is a trace.
            self.break_reason = str(error)
        _log.info("running in pieces: %s", error)

    def _call_in_pieces(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        selection: Any,
        inputs: dict[str, Any],
    ) -> tuple[Any, Records]:
        frame = Frame(self, selection, whole=False, spec=self.spec, inputs=inputs)
        token = active_frame.set(frame)
        try:
            with self._overrides:
                self.bound = self._overrides.bound
                if self.regional:
                    output = self.model(*args, **kwargs)
                else:
                    output = self._run_pieces(self.model, args, kwargs)
        except Exception as error:
            if frame.error is not None:
                raise frame.error from None
            if not isinstance(error, _torch.DynamoError) and not self._pieces_for_good:
                # The model raised; that may have been all that stopped the trace.
                self.break_reason = None
            raise
        finally:
            active_frame.reset(token)
        outside = (args, kwargs, output)
        return output if self.keep_output else None, self._records_of(frame, outside)

    # -- broken runs -------------------------------------------------------------------

    def representative(self, path: str) -> str:
        """A module that a mark's path stands for."""
        return self._overrides.representative(path)

    def path_of_token(self, token: torch.Tensor) -> str:
        """The path of the module that a token stands for."""
        return self._overrides.path_of_token(token)

    def _run_region(
        self, kind: type, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module as a region: one compilation for all modules of its class."""
        compiled = self._region_functions.get(kind)
        if compiled is None:
            # A code object for each class, so that a model of many kinds of blocks does
            # not run into the recompile limit, which counts by code object.
            compiled = torch.compile(
                _own_code(_call_function),
                backend=self._backend,
                fullgraph=self.fullgraph and self.regional,
                **self._settings,
            )
            self._region_functions[kind] = compiled
        return compiled(below, args, kwargs)

    def join_checkpoint(self, frame: Frame) -> None:
        """Run alike when the checkpoint that a broken run is in computes anew.

        That happens in backward, when the overrides are gone; what it gives then is a
        repetition and counts for nothing.
        """
        if not torch.is_grad_enabled():
            return
        equal = frame.repeated  # the frame itself would keep its values alive

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            token = active_frame.set(equal.anew())
            try:
                with fused_attention(not self.bound.inside_fused), self._overrides:
                    yield
            finally:
                active_frame.reset(token)

        _torch.while_recomputing(id(equal), lambda: again)

    def hits_of(self, site: Site) -> tuple[tuple[str, ...], bool]:
        """The records that a site is a hit of; whether it is one by itself.

        It is not if forward hooks are still to see the call.
        """
        final = site.hooked or not self.bound.is_hooked(site.path)
        return self.bound.records_of(site.path), final

    def _asked(self, token: torch.Tensor) -> bool:
        """Whether to copy what a call outside of graphs received."""
        frame = active_frame.get()
        if frame is None or frame.owner is not self:
            return False
        return frame.wants_entry(self.bound.records_of(self.path_of_token(token)))

    def _observe_eagerly(
        self,
        token: torch.Tensor,
        result: list[torch.Tensor],
        derived: list[torch.Tensor],
        sizes: list[int],
        entry_sizes: list[int],
        structure: str,
        entries: str,
        group: str,
        hooked: bool,
    ) -> None:
        """Take an observation (its fields, see ``mark``) that no graph made."""
        frame = active_frame.get()
        if frame is None or frame.owner is not self:
            return
        if torch.is_grad_enabled():
            self.join_checkpoint(frame)
        bound, path = self.bound, self._overrides.path_of_token(token)
        # All that tells kinds of sites apart; the rest follows from it.
        key = (
            bound,
            path,
            structure,
            entries,
            hooked,
            tuple(map(int, sizes)) if sizes else (),
            tuple(map(int, entry_sizes)) if entry_sizes else (),
            tuple([t.shape for t in result]),
            tuple([t.dtype for t in result]),
        )
        found = self._eager_sites.get(key)
        if found is None:
            site = _eager_site(*key)
            found = site, leaves_of(self.spec, bound, site), *self.hits_of(site)
            _remember(self._eager_sites, key, found)
        site, leaves, records, final = found
        event = Event(site, {}, key[5], key[6])
        frame.add(event, records, final=final)
        if event.claims:
            tensors, own = {}, {}
            for leaf in leaves:
                if leaf.kind == "derived" and not derived:
                    continue  # what it received cannot be selected any more
                value = (result if leaf.kind == "result" else derived)[leaf.index]
                tensors[leaf] = leaf.snapshot(value)
                # Autograd recorded it, and it shares no memory with a parameter.
                if leaf.is_plain and value.grad_fn is not None and not value._is_view():
                    own[leaf] = weakref.ref(value), value._version
            event.tensors, event.own = tensors, own

    def _plan_of_events(
        self, frame: Frame
    ) -> tuple[Plan, SiteTable, tuple[tuple[int, int], ...]]:
        """The plan of a finished broken run, made once for each sequence of sites."""
        sites = tuple(event.site for event in frame.events)
        # By identity, since to hash what a site says costs more than all else here; the
        # sites are kept with the plan, so that no other gets the same.
        key = (self.bound, frame.selection, tuple(map(id, sites)))
        found = self._event_plans.get(key)
        if found is None:
            merged, marks = passes.pair_hooked(sites)
            table = SiteTable(merged)
            found = self.plan_of(table, frame.selection), table, marks, sites
            _remember(self._event_plans, key, found)
        return found[:3]

    def _records_of(self, frame: Frame, outside: Any = ()) -> Records:
        """The records of a finished run.

        Args:
            frame: The run.
            outside: What the caller holds, and may write to.
        """
        if any(event.own for event in frame.events):
            tensors: list[torch.Tensor] = []
            encode(outside, tensors, [])
            held = {id(tensor) for tensor in tensors}
            for event in frame.events:
                event.own = {
                    k: o for k, o in event.own.items() if id(o[0]()) not in held
                }
        plan, table, marks = self._plan_of_events(frame)
        self.last_sites = table
        values = {
            record.name: tuple(
                None if slot is None else _from_events(slot, frame.events, marks)
                for slot in record.slots
            )
            for record in plan.records
        }
        return Records(values, {r.name: r.paths for r in plan.records})


def _eager_site(
    bound: Match,
    path: str,
    structure: str,
    entries: str,
    hooked: bool,
    sizes: tuple[int, ...],
    entry_sizes: tuple[int, ...],
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Site:
    return Site(
        path=path,
        structure=structure,
        entries=entries,
        sizes=sizes,
        entry_sizes=entry_sizes,
        shapes=tuple(map(tuple, shapes)),
        dtypes=tuple(str(d).removeprefix("torch.") for d in dtypes),
        class_name=bound.classes.get(path, ""),
        hooked=hooked,
    )


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; all are dropped when new shapes have made too many of them."""
    if len(table) >= _MAX_REMEMBERED:
        table.clear()
    table[key] = value


class _RunInPieces(Exception):  # noqa: N818 - a signal to ourselves
    """A graph that no traced scope can capture: run it with real overrides."""


def _current_inputs() -> Mapping[str, Any]:
    frame = active_frame.get()
    return {} if frame is None else frame.inputs


def _call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _call_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object that nothing else has."""
    assert isinstance(function, types.FunctionType)
    made = types.FunctionType(
        function.__code__.replace(co_name=function.__name__),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _from_events(
    slot: Slot, events: Sequence[Event], marks: Sequence[tuple[int, int]]
) -> Any:
    inner, outer = marks[slot.site]
    leaves = dict(slot.leaves)
    event = events[inner if slot.entry else outer]
    sizes = event.entry_sizes if slot.entry else event.sizes
    return slot.structure.build(lambda i: event.value(leaves[i]), sizes.__getitem__)


def _not_traceable(model: nn.Module, reason: str) -> TraceError:
    return TraceError(
        f"{type(model).__name__} cannot be traced as one graph",
        why=reason.strip().replace("\n", "\n    "),
        remedy="drop fullgraph=True (values stay right, the pieces are compiled one by "
        "one), or remove what breaks the graph",
    )
