"""The Dynamo front end: a model, traced with marks, compiled with taps.

Terms
    whole run: the call is one graph.  Then every position is known when the graph is
        compiled, and only what is selected becomes an output.
    broken run: Dynamo cannot trace the call as one graph.  Its pieces are compiled as
        Dynamo sees fit, with marks in them; what runs between them is observed eagerly.
        Positions are known when the call ends; until then all candidates are kept.
    variant: a whole graph compiled for one selection.

Invariants
    Nothing is written to the model in a whole run.  In a broken run the overrides stand
    in the instances while the call runs, and are gone after it, also if it raised.
    Each program has a code object of its own: Dynamo caches by code object, and neither
    another captured model nor a plain one may run this one's code.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture import _compat, passes
from fxcapture.errors import FxCaptureError, TraceError
from fxcapture.frame import Event, Frame, active_frame
from fxcapture.mark import Observation, Target, emit_mark, enter, find, leave, observe
from fxcapture.passes.base import TapKey
from fxcapture.passes.collect_marks import MarkedSites
from fxcapture.plan import (
    Match,
    Plan,
    Slot,
    leaves_of,
    match,
    resolve,
)
from fxcapture.records import Records
from fxcapture.sites import Site, SiteTable
from fxcapture.spec import CaptureSpec

__all__ = ["DynamoProgram"]

_log = logging.getLogger("fxcapture")


def _last(h: torch.Tensor) -> torch.Tensor:
    return h[:, -1]


def _mean(h: torch.Tensor) -> torch.Tensor:
    return h.mean(dim=1)


_NAMED = {"last": _last, "mean": _mean}


def reducers_of(spec: CaptureSpec) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Record name to its reduction as a function."""
    return {
        name: _NAMED[tap.reduce] if isinstance(tap.reduce, str) else tap.reduce
        for name, tap in spec.items()
        if tap.reduce is not None
    }


@final
class _Variant:
    """A whole graph compiled for one selection.

    Attributes:
        plan: The selection's plan.
        graph_module: The instrumented graph.
        call: The compiled graph.
        num_own: Number of the model's own outputs; the taps stand behind them.
        places: What each output behind them is.
    """

    __slots__ = ("_paths", "_readers", "call", "graph_module", "num_own", "places", "plan")

    def __init__(
        self,
        plan: Plan,
        sites: SiteTable,
        graph_module: fx.GraphModule,
        call: Callable[..., Any],
    ) -> None:
        keys: tuple[TapKey, ...] = graph_module.meta[passes.OUTPUTS]
        own = graph_module.graph.output_node().args[0]
        self.plan = plan
        self.graph_module = graph_module
        self.call = call
        self.num_own = len(own) - len(keys)  # type: ignore[arg-type]
        self.places = {key: i for i, key in enumerate(keys)}
        self._paths = {r.name: r.paths for r in plan.records}
        # Worked out once, so that a call only indexes its outputs.
        self._readers = [
            (r.name, [s and _reader(s, self.places, sites[s.site]) for s in r.slots])
            for r in plan.records
        ]

    def records(self, values: Sequence[Any]) -> Records:
        """Records of a run from the values behind the model's own outputs."""
        made = {
            name: tuple([reader and reader(values) for reader in readers])
            for name, readers in self._readers
        }
        return Records(made, self._paths)


def _reader(
    slot: Slot, places: Mapping[TapKey, int], site: Site
) -> Callable[[Sequence[Any]], Any]:
    """A function from a run's extra outputs to the value of one slot."""
    tensors = {i: places[TapKey(slot.site, leaf=leaf)] for i, leaf in slot.leaves}
    structure = slot.structure
    if structure.kind == "tensor":
        return operator.itemgetter(tensors[structure.index])
    known = site.entry_sizes if slot.entry else site.sizes
    sizes = {
        i: places[TapKey(slot.site, size=(slot.entry, i))]
        for i in slot.sizes
        if known[i] is None
    }

    def read(values: Sequence[Any]) -> Any:
        return structure.build(
            lambda i: values[tensors[i]],
            lambda i: int(values[sizes[i]]) if i in sizes else known[i],
        )

    return read


@final
class GraphProgram:
    """One Dynamo graph, compiled; what Dynamo's generated code calls."""

    def __init__(
        self,
        program: DynamoProgram,
        marked_graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        frame: Frame,
    ) -> None:
        self._program = program
        self.number = next(program.counter)
        self._lock = threading.Lock()
        self.bound = program.bound
        # Kept to compile further variants from; the inner compiler gets its own copy.
        self.marked_graph = passes.copy_graph_module(marked_graph)
        for node in self.marked_graph.graph.nodes:
            node.meta.pop("grapharg", None)
        self.marked: MarkedSites = passes.collect_marks(
            self.marked_graph, graph=self.number, classes=self.bound.classes
        )
        self.whole = frame.whole
        self.reason = getattr(marked_graph, "compile_subgraph_reason", None)
        self._variants: dict[Any, _Variant] = {}
        if self.whole:
            self._first(frame.selection, example_inputs)
        else:
            self._pieces(example_inputs)

    # -- whole runs --------------------------------------------------------------------

    def _first(self, selection: Any, example_inputs: Sequence[Any]) -> None:
        self._variants[selection] = self._build(self._plan(selection), example_inputs)

    def _plan(self, selection: Any) -> Plan:
        return resolve(
            self._program.spec, self.bound, self.marked.sites, selection
        )

    def _build(self, plan: Plan, example_inputs: Sequence[Any]) -> _Variant:
        made = passes.rewrite(
            self.marked_graph,
            self.marked,
            plan.wanted(),
            plan.wanted_sizes(),
            prune=not self._program.keep_output,
        )
        call = self._program.inner(made, list(example_inputs))
        return _Variant(plan, self.marked.sites, made, call)

    def variant(self, selection: Any) -> _Variant:
        """The variant for a selection; compiled on first use, outside of Dynamo."""
        found = self._variants.get(selection)
        if found is None:
            with self._lock:
                found = self._variants.get(selection) or self._late(selection)
                self._variants[selection] = found
        return found

    def _late(self, selection: Any) -> _Variant:
        plan = self._plan(selection)
        for known in self._variants.values():
            if known.plan == plan:
                return known
        fake_mode = _compat.fake_mode_of(self.marked_graph.graph)
        fakes = [
            n.meta.get("example_value")
            for n in self.marked_graph.graph.nodes
            if n.op == "placeholder"
        ]
        with _compat.late_compilation(fake_mode):
            try:
                return self._build(plan, fakes)
            except _compat.TensorifyRestart:
                # Inside Dynamo this restarts the frame with what was learnt kept in a
                # global table, so that the second try succeeds; here we are the frame.
                return self._build(plan, fakes)

    # -- broken runs -------------------------------------------------------------------

    def _pieces(self, example_inputs: Sequence[Any]) -> None:
        """Bring out every leaf that a record may want: positions are not known yet."""
        wanted: dict[int, dict[Any, None]] = {}
        sizes: dict[int, dict[tuple[bool, int], None]] = {}
        for i, site in enumerate(self.marked.sites):
            wanted[i] = dict.fromkeys(leaves_of(self._program.spec, self.bound, site))
            sizes[i] = dict.fromkeys(
                [(False, k) for k in range(len(site.sizes))]
                + [(True, k) for k in range(len(site.entry_sizes))]
            )
        made = passes.rewrite(self.marked_graph, self.marked, wanted, sizes)
        call = self._program.inner(made, list(example_inputs))
        self._variants[None] = _Variant(
            Plan(records=()), self.marked.sites, made, call
        )

    def _deliver_pieces(self, frame: Frame, variant: _Variant, values: Any) -> None:
        tensors: dict[int, dict[Any, Any]] = {}
        sizes: dict[tuple[int, bool, int], int] = {}
        for key, place in variant.places.items():
            if key.leaf is not None:
                tensors.setdefault(key.site, {})[key.leaf] = values[place]
            elif key.size is not None:
                sizes[key.site, *key.size] = values[place]

        def filled(site: int, entry: bool, known: Sequence[int | None]) -> tuple[int, ...]:
            return tuple(
                sizes[site, entry, k] if size is None else size
                for k, size in enumerate(known)
            )

        for i, site in enumerate(self.marked.sites):
            frame.events.append(
                Event(
                    site,
                    tensors.get(i, {}),
                    filled(i, False, site.sizes),
                    filled(i, True, site.entry_sizes),
                )
            )

    def __call__(self, *args: Any) -> Any:
        """Run the graph; hand the taps to the frame and the rest to Dynamo's code."""
        frame = active_frame.get()
        if frame is None or frame.owner is not self._program:
            # Dynamo's code outlived the call: the user runs it by a way of his own.
            return self._default().call(*args)[: self._default().num_own]
        variant = self.variant(frame.selection) if self.whole else self._variants[None]
        out = variant.call(*args)
        own = variant.num_own
        if self.whole:
            frame.delivered = variant.records(out[own:])
            self._program.last_sites = self.marked.sites
        else:
            self._deliver_pieces(frame, variant, out[own:])
        return out[:own]

    def _default(self) -> _Variant:
        return next(iter(self._variants.values()))

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The instrumented graphs, one for each variant."""
        for variant in self._variants.values():
            yield variant.graph_module


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
        fullgraph: Refuse to run as several graphs.
        compile_kwargs: Further keywords of ``torch.compile``.
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
        compile_kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.spec = spec
        self.keep_output = keep_output
        self.fullgraph = fullgraph
        self.counter = itertools.count()
        self.reducers = reducers_of(spec)
        self.inner = _compat.resolve_backend(backend, mode, options, dynamic)
        self.bound: Match = match(spec, model)
        self.graph_programs: list[GraphProgram] = []
        self.last_sites = SiteTable()
        self.break_reason: str | None = None
        self._overrides = _Overrides(self)
        options_ = {"dynamic": dynamic, **compile_kwargs}
        self._run_whole = torch.compile(
            self._whole_function(), backend=self._backend, fullgraph=True, **options_
        )
        self._run_pieces = torch.compile(
            _own_code(_call_model), backend=self._backend, fullgraph=False,
            **(options_ | {"isolate_recompiles": True}),
        )

    def plan_of(self, sites: SiteTable, selection: Any) -> Plan:
        """The plan for the sites of one whole run."""
        return resolve(self.spec, self.bound, sites, selection)

    def _whole_function(self) -> Callable[..., Any]:
        model, reducers, keep_output = self.model, self.reducers, self.keep_output

        @torch.compiler.assume_constant_result
        def targets() -> Any:
            # Called while tracing: the module tree may have changed since the last
            # trace, and a change that matters makes Dynamo trace again.
            self.bound = match(self.spec, model)
            return self.bound.targets

        def captured(*args: Any, **kwargs: Any) -> Any:
            saved = enter(model, targets(), emit_mark, reducers)
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
        try:
            made = GraphProgram(self, gm, example_inputs, frame)
        except FxCaptureError as error:
            frame.error = error
            raise
        self.graph_programs.append(made)
        return made

    # -- calls -------------------------------------------------------------------------

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], selection: Any
    ) -> tuple[Any, Records]:
        """Run the model once; its output (or ``None``) and the records."""
        with fused_attention(not self.bound.inside_fused):
            return self._call(args, kwargs, selection)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], selection: Any
    ) -> tuple[Any, Records]:
        if self.break_reason is None:
            frame = Frame(self, selection, whole=True)
            token = active_frame.set(frame)
            try:
                output = self._run_whole(*args, **kwargs)
                # Dynamo makes no graph of a call that computes nothing.
                return output, frame.delivered or self._pieced_records(frame)
            except _compat.DynamoError as error:
                self._cannot_run_whole(error, frame)
            finally:
                active_frame.reset(token)
        return self._call_in_pieces(args, kwargs, selection)

    def _cannot_run_whole(self, error: Exception, frame: Frame) -> None:
        """Decide what an error of Dynamo's means: ours, the user's, or a graph break."""
        if frame.error is not None:
            raise frame.error from None
        if isinstance(error, _compat.BackendCompilerFailed):
            raise error
        breaks = isinstance(error, (_compat.Unsupported, _compat.UserError))
        if self.fullgraph:
            if breaks:
                raise _not_traceable(self.model, str(error)) from error
            raise error
        if breaks and not isinstance(error, _compat.RecompileLimitHit):
            # Not tried again, since each try is a trace.
            self.break_reason = str(error)
        _log.info("running in pieces: %s", error)

    def _call_in_pieces(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], selection: Any
    ) -> tuple[Any, Records]:
        frame = Frame(self, selection, whole=False)
        token = active_frame.set(frame)
        try:
            with self._overrides:
                output = self._run_pieces(self.model, args, kwargs)
        except Exception as error:
            if frame.error is not None:
                raise frame.error from None
            if not isinstance(error, _compat.DynamoError):
                # The model raised; that may have been all that stopped the trace.
                self.break_reason = None
            raise
        finally:
            active_frame.reset(token)
        return (output if self.keep_output else None), self._pieced_records(frame)

    def _pieced_records(self, frame: Frame) -> Records:
        sites, marks = passes.pair_hooked([e.site for e in frame.events])
        table = SiteTable(sites)
        plan = self.plan_of(table, frame.selection)
        self.last_sites = table
        values: dict[str, tuple[Any, ...]] = {}
        for record in plan.records:
            values[record.name] = tuple(
                None if slot is None else _from_events(slot, frame.events, marks)
                for slot in record.slots
            )
        return Records(values, {r.name: r.paths for r in plan.records})


def _call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


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
    return slot.structure.build(
        lambda i: event.tensors[leaves[i]], lambda i: int(sizes[i])
    )


def _not_traceable(model: nn.Module, reason: str) -> TraceError:
    return TraceError(
        f"{type(model).__name__} cannot be traced as one graph",
        why=reason.strip().replace("\n", "\n    "),
        remedy="drop fullgraph=True (values stay right, the pieces are compiled one by "
        "one), or remove what breaks the graph",
    )


class fused_attention:  # noqa: N801 - used as a function
    """A time in which ``nn.TransformerEncoderLayer`` may use its fused kernel, or not.

    The fused kernel calls none of the layer's submodules, so a capture inside one has
    to do without, as it would with eager hooks.  The flag is one for the process, and
    Dynamo guards on it: it is off for the whole of each call that needs it off.
    """

    _lock = threading.Lock()
    _refusals = 0
    _before = True

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed

    def __enter__(self) -> None:
        if self._allowed:
            return
        cls = fused_attention
        with cls._lock:
            if cls._refusals == 0:
                cls._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            cls._refusals += 1

    def __exit__(self, *exc: object) -> None:
        if self._allowed:
            return
        cls = fused_attention
        with cls._lock:
            cls._refusals -= 1
            if cls._refusals == 0:
                torch.backends.mha.set_fastpath_enabled(cls._before)


@final
class _Overrides:
    """The overrides that stand in the instances while a broken run lasts.

    They are made once and kept, since Dynamo guards on them, and shared by the calls
    that run at the same time: each finds its own frame.  Two programs may override one
    module at once, and need not leave in the order they came: an override that is not
    on top when its last call ends stays, inactive, until what stands on it goes.
    """

    _lock = threading.RLock()

    def __init__(self, program: DynamoProgram) -> None:
        self._program = program
        self._count = 0
        self._installed: list[_Override] = []
        self._made: dict[tuple[Any, Target], _Override] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._install()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for override in reversed(self._installed):
                    override.remove()
                self._installed = []

    def _install(self) -> None:
        program = self._program
        program.bound = match(program.spec, program.model, eager_caller=True)
        for target in program.bound.targets:
            module = find(program.model, target)
            original = getattr(module, target.key)
            key = (original, target)
            if key not in self._made:
                wrapper = observe(original, target, self._emit, program.reducers)
                self._made[key] = _Override(module.__dict__, target.key, wrapper)
            self._made[key].install()
            self._installed.append(self._made[key])

    def _emit(self, seen: Observation) -> None:
        if torch.compiler.is_compiling():
            emit_mark(seen)
        else:
            _record_eagerly(self._program, seen)


@final
class _Override:
    """One override in one instance."""

    def __init__(
        self, slot: dict[str, Any], key: str, wrapper: Callable[..., Any]
    ) -> None:
        self._slot = slot
        self._key = key
        self._wrapper = wrapper
        self._below: tuple[bool, Any] = (False, None)
        self._wanted = False

    def install(self) -> None:
        if not self._wanted and self._slot.get(self._key) is not self._wrapper:
            self._below = (self._key in self._slot, self._slot.get(self._key))
            self._slot[self._key] = self._wrapper
            _OVERRIDES[self._wrapper] = self
        self._wanted = True

    def remove(self) -> None:
        self._wanted = False
        top: _Override | None = self
        while top is not None and not top._wanted:
            if self._slot.get(self._key) is not top._wrapper:
                return
            present, value = top._below
            del _OVERRIDES[top._wrapper]
            if present:
                self._slot[self._key] = value
            else:
                del self._slot[self._key]
            top = _OVERRIDES.get(value) if present else None


#: The overrides that stand somewhere now, by their function.
_OVERRIDES: dict[Any, _Override] = {}


def _record_eagerly(program: DynamoProgram, seen: Observation) -> None:
    frame = active_frame.get()
    if frame is None or frame.owner is not program:
        return
    bound = program.bound
    site = Site(
        path=seen.path,
        structure=seen.structure,
        entries=seen.entries,
        sizes=tuple(map(int, seen.sizes)),
        entry_sizes=tuple(map(int, seen.entry_sizes)),
        shapes=tuple(tuple(t.shape) for t in seen.result),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in seen.result),
        class_name=bound.classes.get(seen.path, ""),
        hooked=seen.hooked,
    )
    tensors = {}
    for leaf in leaves_of(program.spec, bound, site):
        source = (seen.result if leaf.kind == "result" else seen.derived)[leaf.index]
        value = leaf.treat(source)
        tensors[leaf] = value.clone() if _shares(value, source) else value
    frame.events.append(
        Event(site, tensors, site.sizes, site.entry_sizes)  # type: ignore[arg-type]
    )


def _shares(value: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a treated value may still see writes to its source."""
    return value.dtype == source.dtype and value.device == source.device
