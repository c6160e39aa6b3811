"""A model compiled by Dynamo, with its capture.

A call is tried as one graph first (a *whole run*).  Where Dynamo cannot trace it as
one, it runs in pieces (a *broken run*): Dynamo compiles them as it sees fit, with marks
in them, and what runs between them is observed eagerly.

Invariants
    Nothing is written to the model in a whole run.  In a broken run the overrides stand
    in the instances while the call runs, and are gone after it, also if it raised.
    Hooks of the model are those of the moment; what was compiled with others goes.
    Each program has code of its own: neither another captured model nor a plain one may
    run this one's.  Dynamo keeps nothing of a program that is gone.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture import _torch, passes
from fxcapture.errors import FxCaptureError
from fxcapture.plan.inputs import find_inputs, sources_in_graphs
from fxcapture.plan.match import Match, match, reducers_of
from fxcapture.plan.records import Records
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import SiteTable
from fxcapture.runtime.call import Call, call_in_flight, put_in_flight
from fxcapture.runtime.capture import Capture
from fxcapture.runtime.compiled_functions import CompiledFunctions
from fxcapture.runtime.compiled_graph import CompiledGraph, kept_graph, kept_outputs
from fxcapture.runtime.function_marks import mark_function_calls
from fxcapture.runtime.hook_state import HookState
from fxcapture.runtime.piece_run import FULL, PieceDelivery
from fxcapture.runtime.program_backend import (
    ProgramBackend,
    RunInPieces,
    check_whole,
)
from fxcapture.runtime.refusals import not_traceable
from fxcapture.runtime.traced import NotTracedError, whole_function
from fxcapture.runtime.whole_run import WholeDelivery
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.selector import Selector
from fxcapture.trace.fused_layers import fused_attention
from fxcapture.trace.mark import allow_marks, naming
from fxcapture.trace.scope import restore_left_behind, way_to

__all__ = ["DynamoProgram"]

#: ``(args, kwargs, selection, capture_inputs) -> (output, records, call)``
Run = Callable[..., tuple[Any, Records, Call]]

#: How many programs of each class of model there were: names that are the same in the
#: next process.
_counts: collections.Counter[str] = collections.Counter()

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
        max_variants: How many selections of one graph stay compiled.
        compile_kwargs: Further keywords of ``torch.compile``.

    Attributes:
        latest: The latest call that has ended; ``None`` before the first.
        run: Runs the model once, see ``Run``.
        break_reason: Why the model does not run as one graph; ``None`` if it does.
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
        max_variants: int,
        compile_kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.spec = spec
        self.keep_output = keep_output
        self.fullgraph = fullgraph
        self.max_variants = max_variants
        self.regional = regions is not None
        self._initialised = False
        self.latest: Call | None = None
        self._inner = _torch.resolve_backend(backend, mode, options, dynamic)
        self._backend_given = backend
        #: Where the conversions cost memory; other backends run the graph as it is.
        self.share_masks = backend == "inductor"
        self._bound = match(spec, model)
        self._graphs: list[weakref.ref[CompiledGraph]] = []
        self._numbers = itertools.count()
        kind = type(model).__name__
        self._name = f"{kind}_{_counts[kind]}"
        _counts[kind] += 1
        allow_marks()
        me = weakref.ref(self)
        self.capture = Capture(
            model,
            spec,
            regions=regions,
            run_region=lambda *args, **kwargs: _alive(me)._functions.region(
                *args, **kwargs
            ),
            # A piece may end inside of a call; a region that does is rare.
            watched=not self.regional,
        )
        self._backend = ProgramBackend(me, self._inner)
        self._settings = {"dynamic": dynamic, **compile_kwargs}
        self._lock = threading.Lock()
        self._start_anew()
        # A caller may itself be compiled; what it traced of this it would inline.
        self.run: Run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def _start_anew(self) -> None:
        """Forget what was compiled, and why it was not one graph."""
        self._pieces_for_good = self.regional
        self.break_reason: str | None = "regions= was given" if self.regional else None
        self._functions = CompiledFunctions(
            self.model,
            self._name,
            self._whole_function(),
            backend=self._backend,
            fullgraph=self.fullgraph,
            regional=self.regional,
            settings=self._settings,
        )

    # -- what compiled graphs ask --------------------------------------------------

    def inner(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        return self._inner(gm, inputs)  # type: ignore[no-any-return]

    def owns(self, call: Call) -> bool:
        """Whether a call is one of this program's."""
        return call.owner is self.capture

    @functools.cached_property
    def _reused(self) -> Callable[[torch.Tensor], bool] | None:
        return _torch.reuses_outputs(self._backend_given, self._inner)

    @property
    def asynchronous(self) -> bool:
        """Whether copies to the host may run while the rest of a graph does.

        Not where graphs are replayed: the next run writes over what this one copied.
        """
        return self._reused is None

    def kept(self, taps: Sequence[Any]) -> Sequence[Any]:
        """Taps that the next run of the graph does not write over."""
        return kept_outputs(taps, self._reused)

    # -- what users ask ------------------------------------------------------------

    @property
    def bound(self) -> Match:
        """The spec bound to the model, as the latest call found it."""
        return self._bound if self.latest is None else self.latest.bound

    @property
    def last_sites(self) -> SiteTable:
        """The sites of the latest call."""
        return SiteTable() if self.latest is None else self.latest.sites

    def plan_of(self, sites: SiteTable, selection: Any) -> Any:
        """The plan for the sites of the latest call."""
        return resolve(self.spec, self.bound, sites, selection)

    @property
    def compiled(self) -> list[CompiledGraph]:
        """The graphs that Dynamo has compiled and still keeps, in order."""
        found = [(ref, ref()) for ref in self._graphs]
        self._graphs = [ref for ref, graph in found if graph is not None]
        return [graph for _, graph in found if graph is not None]

    def graphs(self) -> Iterator[fx.GraphModule]:
        """Their instrumented graphs."""
        for graph in self.compiled:
            yield from graph.graphs()

    # -- compiling -----------------------------------------------------------------

    def _whole_function(self) -> Callable[..., Any]:
        model, keep_output = self.model, self.keep_output
        reducers, me = reducers_of(self.spec), weakref.ref(self)
        late = sources_in_graphs(self.spec)

        @_torch.constant
        def steps() -> Any:
            # Called while tracing: the module tree may have changed since the last
            # trace, and a change that matters makes Dynamo trace again.
            program = _alive(me)
            program._bound = match(program.spec, model)
            naming.set(bool(program._bound.functions))
            return way_to(
                program.model, program._bound.targets, by_dynamo=True, outermost=True
            )

        return whole_function(model, steps, reducers, late, keep_output)

    def compile_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that Dynamo has traced for a call of this program."""
        call = call_in_flight.get()
        if call is None or not self.owns(call):
            return self._inner(passes.without_marks(gm), list(example_inputs))
        number = next(self._numbers)
        try:
            if call.whole:
                check_whole(gm)
            graph = kept_graph(gm)
            mark_function_calls(
                graph, self.model, self.capture, self._bound, call.whole
            )
            if call.whole:
                whole = WholeDelivery(
                    self.spec, self._bound, graph, number, self.keep_output
                )
                made = CompiledGraph(
                    self, graph, whole, call.selection, example_inputs, number
                )
            else:
                piece = PieceDelivery(self.capture, call.bound, graph, number)
                made = CompiledGraph(self, graph, piece, FULL, example_inputs, number)
        except (FxCaptureError, RunInPieces) as error:
            call.error = error
            raise
        self._graphs.append(weakref.ref(made))
        return made

    # -- calls ---------------------------------------------------------------------

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        selection: Any,
        capture_inputs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Records, Call]:
        """Run the model once; its output (or ``None``), the records, and the call."""
        inputs = find_inputs(self.spec, self.model, args, kwargs, capture_inputs)
        if self._functions.hooks.may_differ():
            self._look_at_hooks()
        with fused_attention(not self._bound.inside_fused):
            if not self._initialised:
                self._initialised = _torch.is_initialised(self.model)
            tried = self.break_reason is None and self._initialised
            if tried:
                done = self._call_whole(args, kwargs, selection, inputs)
                if done is not None:
                    return done
            return self._call_in_pieces(args, kwargs, selection, inputs, tried)

    def _look_at_hooks(self) -> None:
        """Compile anew if the model's hooks are not those that are compiled in."""
        with self._lock:
            now, compiled_in = HookState.of(self.model), self._functions.hooks
            if now.hooks != compiled_in.hooks:
                _log.info("compiling anew: the model's hooks are not what they were")
                self._start_anew()
            else:
                self._functions.hooks = now

    def _call_whole(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        selection: Any,
        inputs: dict[str, Any],
    ) -> tuple[Any, Records, Call] | None:
        """Run as one graph; ``None`` if the model has to be run in pieces."""
        run_whole = self._functions.whole
        if not run_whole.is_compiled():
            return None
        call = Call(
            self.capture, selection, whole=True, spec=self.spec, bound=self._bound
        )
        token = put_in_flight(call_in_flight, call)
        compiled = len(self._graphs)
        try:
            output = run_whole(inputs or None, *args, **kwargs)
        except NotTracedError:
            return None
        except Exception as error:
            if call.started:
                raise  # the model's own error, from the running graph
            self._cannot_run_whole(error, call)
            return None
        finally:
            call.holder = None
            call_in_flight.reset(token)
            naming.set(False)
        if len(self._graphs) != compiled:
            left = restore_left_behind(self.model, self._bound.targets)
            if left:
                self.break_reason = f"Dynamo did not undo the override of {left[0]!r}"
                self._pieces_for_good = True
        records = call.delivered
        if records is None:  # Dynamo makes no graph of a call that computes nothing
            records = self.capture.records(call)
        call.delivered = None
        self.latest = call
        return output, records, call

    def _cannot_run_whole(self, error: Exception, call: Call) -> None:
        """Decide what an error in Dynamo means: ours, the user's, or a graph break."""
        if isinstance(call.error, RunInPieces):
            self.break_reason = str(call.error)
            self._pieces_for_good = True
            return
        if call.error is not None:
            raise call.error from call.error.__cause__
        if isinstance(error, _torch.BackendCompilerFailed):
            raise error
        breaks = isinstance(
            error, (_torch.Unsupported, _torch.UserError, _torch.DataDependentError)
        )
        if self.fullgraph:
            if breaks:
                raise not_traceable(self.model, str(error)) from error
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
        tried: bool,
    ) -> tuple[Any, Records, Call]:
        running = self.capture.call(selection, inputs)
        call = running.call
        call.break_reason = self.break_reason
        _torch.skip_untraced()
        functions = self._functions
        try:
            with functions.guarded(), running:
                # What a module is until its first call, Dynamo cannot guard on.
                if self.regional or not self._initialised:
                    output = self.model(*args, **kwargs)
                else:
                    output = functions.pieces(self.model, args, kwargs)
        except Exception as error:
            if call.error is not None:
                raise call.error from call.error.__cause__
            dynamos = isinstance(error, _torch.DynamoError)
            if tried and not dynamos and not self._pieces_for_good:
                # The model raised; that may have been all that stopped the trace.
                self.break_reason = None
            raise
        # It broke without raising, so that a later error is no reason to try again.
        self._pieces_for_good = self._pieces_for_good or self.break_reason is not None
        outside = (args, kwargs, output)
        records = self.capture.records(call, outside)
        self.latest = call
        return output if self.keep_output else None, records, call


def _alive(program: weakref.ref[DynamoProgram]) -> DynamoProgram:
    found = program()
    assert found is not None  # what asks runs in a call of the program
    return found
