"""One Dynamo graph with its taps, compiled; what Dynamo's generated code calls.

Terms
    whole run: the call is this graph and nothing else.  Positions are known when it is
        compiled, and only what is selected becomes an output.
    piece: a graph of a broken run.  Its sites are hits among others; every value that a
        record may want becomes an output.  One piece may serve several modules: which
        one it runs for, it learns from the tokens among its inputs.  One that computes
        attention weights has a version without taps, for calls that no record selects.
    variant: a whole graph compiled for one selection.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import fx

from fxcapture import _torch, passes
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Leaf, Plan, Slot, named_leaves_of, resolve
from fxcapture.plan.records import Records
from fxcapture.plan.sites import Site, SiteTable, of_module
from fxcapture.reductions import Reduction
from fxcapture.runtime.call import Event, Frame, active_frame

if TYPE_CHECKING:
    from fxcapture.runtime.dynamo import DynamoProgram

__all__ = ["Piece", "WholeGraph"]

_Made = TypeVar("_Made")

#: Calls a compiled graph; the graph's own outputs come first.
Compiled = Callable[..., Sequence[Any]]


@final
class _Variant:
    """A whole graph compiled for one selection.

    Attributes:
        plan: The selection's plan.
        graph_module: The instrumented graph.
        call: The compiled graph.
        num_own: Number of the model's own outputs; the taps stand behind them.
    """

    __slots__ = ("_paths", "_readers", "call", "graph_module", "num_own", "plan")

    def __init__(
        self, plan: Plan, sites: SiteTable, graph_module: fx.GraphModule, call: Compiled
    ) -> None:
        self.plan = plan
        self.graph_module = graph_module
        self.call = call
        places = places_of(graph_module)
        self.num_own = num_own_outputs(graph_module)
        self._paths = {r.name: r.paths for r in plan.records}
        # Worked out once, so that a call only indexes its outputs.
        self._readers = [
            (r.name, [s and _reader(s, places, sites[s.site]) for s in r.slots])
            for r in plan.records
        ]

    def records(self, values: Sequence[Any]) -> Records:
        """Records of a run from the values behind the model's own outputs."""
        made = {
            name: tuple([reader and reader(values) for reader in readers])
            for name, readers in self._readers
        }
        return Records(made, self._paths)


def _picking(call: Compiled, inputs: Sequence[int]) -> Compiled:
    """``call`` with some of its arguments."""

    def picked(*args: Any) -> Sequence[Any]:
        return call(*[args[i] for i in inputs])

    return picked


def wait_for(graph_module: fx.GraphModule) -> None:
    """Wait for the copies to the host that a run of a graph has queued."""
    for device in graph_module.meta.get(passes.WAITS, ()):
        torch.accelerator.current_stream(device).synchronize()


def places_of(graph_module: fx.GraphModule) -> dict[TapKey, int]:
    """What each output behind the model's own is, and where it stands there."""
    keys: tuple[TapKey, ...] = graph_module.meta[passes.OUTPUTS]
    return {key: i for i, key in enumerate(keys)}


def num_own_outputs(graph_module: fx.GraphModule) -> int:
    """Number of outputs that the graph had without taps."""
    outputs = graph_module.graph.output_node().args[0]
    return len(outputs) - len(graph_module.meta[passes.OUTPUTS])  # type: ignore[arg-type]


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


def _kept_graph(marked_graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph to compile from, now and later."""
    kept = passes.copy_graph_module(marked_graph)
    for node in kept.graph.nodes:
        # It refers to the call's real inputs, which nothing should keep alive.
        node.meta.pop("grapharg", None)
    return kept


def _compile_late(gm: fx.GraphModule, build: Callable[[Sequence[Any]], _Made]) -> _Made:
    """Compile from a kept graph, outside of Dynamo.

    Args:
        gm: The graph.
        build: Compiles; it gets the graph's inputs as fake tensors.
    """
    graph = gm.graph
    fakes = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
    with _torch.late_compilation(_torch.fake_mode_of(graph)):
        try:
            return build(fakes)
        except _torch.TensorifyRestart:
            # Inside Dynamo this restarts the frame with what was learnt kept in a
            # global table, so that the second try succeeds; here we are the frame.
            return build(fakes)


@final
class WholeGraph:
    """A graph that is the whole run.

    Args:
        program: The program it belongs to.
        marked_graph: The graph as Dynamo made it; not changed.
        example_inputs: What Dynamo gives a backend.
        selection: The selection to compile it for now.

    Raises:
        TargetError: the spec does not fit what the graph calls.
        CaptureError: a value cannot be captured.
    """

    def __init__(
        self,
        program: DynamoProgram,
        marked_graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        selection: Any,
    ) -> None:
        self._program = program
        self._bound = program.bound
        self._lock = threading.Lock()
        self._marked_graph = _kept_graph(marked_graph)
        self.number = program.next_graph_number()
        self._marked = passes.collect_marks(
            self._marked_graph, graph=self.number, classes=self._bound.classes
        )
        self._variants: dict[Any, _Variant] = {}
        self._variants[selection] = self._build(self._plan(selection), example_inputs)

    def _plan(self, selection: Any) -> Plan:
        return resolve(self._program.spec, self._bound, self._marked.sites, selection)

    def _build(self, plan: Plan, example_inputs: Sequence[Any]) -> _Variant:
        made = passes.rewrite(
            self._marked_graph,
            self._marked,
            plan.wanted(),
            plan.wanted_sizes(),
            prune=not self._program.keep_output,
            share_masks=self._program.share_masks,
            asynchronous=self._program.asynchronous,
        )
        inputs: tuple[int, ...] | None = None
        if not self._program.keep_output:
            passes.drop_inputs(made, passes.tensor_inputs(made))
            made.recompile()
            inputs = made.meta[passes.KEPT_INPUTS]
            example_inputs = [example_inputs[i] for i in inputs]
        call = _torch.without_disable(self._program.inner(made, list(example_inputs)))
        if inputs is not None:
            call = _picking(call, inputs)
        return _Variant(plan, self._marked.sites, made, call)

    def _variant(self, selection: Any) -> _Variant:
        """The variant for a selection; compiled on first use, outside of Dynamo."""
        found = self._variants.get(selection)
        if found is None:
            # Tracers patch nn.Module while they run, in every thread: what another
            # thread traced meanwhile would be guarded on the patch.
            with self._lock, _torch.no_tracing():
                found = self._variants.get(selection) or self._late(selection)
                self._variants[selection] = found
        return found

    def _late(self, selection: Any) -> _Variant:
        plan = self._plan(selection)
        for known in self._variants.values():
            if known.plan == plan:
                return known
        return _compile_late(self._marked_graph, lambda fakes: self._build(plan, fakes))

    def __call__(self, *args: Any) -> Any:
        """Run the graph; records go to the frame, the rest to Dynamo's code."""
        frame = active_frame.get()
        if frame is None or frame.owner is not self._program:
            # Dynamo's code outlived the call: the user runs it by a way of his own.
            variant = next(iter(self._variants.values()))
            return variant.call(*args)[: variant.num_own]
        variant = self._variant(frame.selection)
        frame.started = True
        out = variant.call(*args)
        wait_for(variant.graph_module)
        taps = self._program.kept(out[variant.num_own :])
        frame.delivered = variant.records(taps)
        self._program.last_sites = self._marked.sites
        return out[: variant.num_own]

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The instrumented graphs, one for each selection."""
        yield from {id(v): v.graph_module for v in self._variants.values()}.values()


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PieceVersion:
    """A piece compiled with its taps, or without.

    Attributes:
        graph_module: The graph.
        call: The compiled graph.
        inputs: Which of Dynamo's inputs it takes; ``None`` for all.
        num_own: Number of outputs in front of the taps.
    """

    graph_module: fx.GraphModule
    call: Compiled
    inputs: Sequence[int] | None
    num_own: int

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        """All outputs."""
        if self.inputs is None:
            return self.call(*args)
        return self.call(*[args[i] for i in self.inputs])


@final
class Piece:
    """A graph of a broken run.

    Args:
        program: The program it belongs to.
        marked_graph: The graph as Dynamo made it; not changed.
        example_inputs: What Dynamo gives a backend.
    """

    def __init__(
        self,
        program: DynamoProgram,
        marked_graph: fx.GraphModule,
        example_inputs: Sequence[Any],
    ) -> None:
        self._program = program
        self.number = program.next_graph_number()
        bound = program.bound
        self._classes = bound.classes
        kept = _kept_graph(marked_graph)
        self.sites = passes.mark_sites(kept, graph=self.number, classes=bound.classes)
        self._tokens = passes.locate_tokens(kept)
        self._sites_of: dict[tuple[int, str], Site] = {}
        self._deferred: dict[tuple[int, Leaf], tuple[Leaf, Reduction]] = {}
        # A site of a group is spoken of as one of its members.
        stand_ins = [
            of_module(s, program.representative(s.path), bound.classes)
            for s in self.sites
        ]
        marked = passes.MarkedSites(
            SiteTable(stand_ins), tuple((i, i) for i in range(len(stand_ins)))
        )
        wanted: dict[int, dict[Leaf, None]] = {}
        sizes: dict[int, dict[tuple[bool, int], None]] = {}
        for i, (site, stand_in) in enumerate(zip(self.sites, stand_ins, strict=True)):
            wanted[i] = {}
            for name, leaf in named_leaves_of(program.spec, bound, stand_in):
                reduce = program.spec[name].reduce
                if isinstance(reduce, Reduction) and reduce.source is not None:
                    # The graph does not see the call's inputs: reduced behind it.
                    whole = dataclasses.replace(leaf, dtype=None, device=None)
                    self._deferred[i, whole] = (leaf, reduce)
                    leaf = whole
                wanted[i][leaf] = None
            sizes[i] = dict.fromkeys(
                [(False, k) for k in range(len(site.sizes))]
                + [(True, k) for k in range(len(site.entry_sizes))]
            )
        # Entries and results of one call may stand in two marks, each a site here: both
        # are tapped at once, and joined when the run ends.
        self._full = self._compiled(kept, marked, wanted, sizes, example_inputs)
        self._places = places_of(self._full.graph_module)
        self._flags = {k.site: i for k, i in self._places.items() if k.ran}
        #: What makes the version without taps; only where they cost more than copies.
        self._make_bare: Callable[[], _PieceVersion] | None = None
        self._bare: _PieceVersion | None = None
        fixed = all(None not in (*s.sizes, *s.entry_sizes) for s in self.sites)
        weights = any(bound.attention.get(site.path) for site in stand_ins)
        if weights and fixed and not self._flags:
            self._make_bare = functools.partial(self._late, kept, marked)
        self._lock = threading.Lock()

    def _compiled(
        self,
        kept: fx.GraphModule,
        marked: passes.MarkedSites,
        wanted: Mapping[int, Mapping[Leaf, None]],
        sizes: Mapping[int, Mapping[tuple[bool, int], None]],
        example_inputs: Sequence[Any],
    ) -> _PieceVersion:
        program = self._program
        made = passes.rewrite(
            kept,
            marked,
            wanted,
            sizes,
            share_masks=program.share_masks,
            asynchronous=program.asynchronous,
        )
        tokens = frozenset(t for t in self._tokens if t is not None)
        passes.drop_inputs(made, tokens)
        made.recompile()
        inputs = made.meta[passes.KEPT_INPUTS]
        call = program.inner(made, [example_inputs[i] for i in inputs])
        return _PieceVersion(
            graph_module=made,
            call=_torch.without_disable(call),
            inputs=None if len(inputs) == len(example_inputs) else inputs,
            num_own=num_own_outputs(made),
        )

    def _late(self, kept: fx.GraphModule, marked: passes.MarkedSites) -> _PieceVersion:
        return _compile_late(
            kept, lambda fakes: self._compiled(kept, marked, {}, {}, fakes)
        )

    def __call__(self, *args: Any) -> Any:
        """Run the graph; hand its events to the frame and the rest to Dynamo's code."""
        full, frame = self._full, active_frame.get()
        if frame is None or frame.owner is not self._program:
            return full(args)[: full.num_own]
        self._program.join_checkpoint(frame)
        if self._make_bare is not None and not self._wanted(frame, args):
            if self._bare is None:
                with self._lock, _torch.no_tracing():
                    self._bare = self._bare or self._make_bare()
            out = self._bare(args)
            self._deliver(frame, args, ())
            return out
        out = full(args)
        if not self.sites:
            return out
        wait_for(full.graph_module)
        taps = self._program.kept(out[full.num_own :])
        self._deliver(frame, args, taps)
        return out[: full.num_own]

    def _wanted(self, frame: Frame, args: Sequence[Any]) -> bool:
        """Whether a record may select anything that this call of the graph gives."""
        # Autograd's checkpoints compute a call again, which has to run alike.
        if torch.is_grad_enabled():
            return True
        hits: collections.Counter[str] = collections.Counter()
        for i in range(len(self.sites)):
            records, final = self._program.hits_of(self._site_of(i, args))
            if not final:
                return True
            hits.update(records)
        return frame.may_select(hits)

    def _deliver(
        self, frame: Frame, args: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """Hand the graph's events to a frame; ``values`` are the taps, or none."""
        tensors: dict[int, dict[Leaf, Any]] = {}
        sizes: dict[tuple[int, bool, int], int] = {}
        for key, place in self._places.items() if values else ():
            if key.leaf is not None:
                leaf, value = key.leaf, values[place]
                if (key.site, leaf) in self._deferred:
                    leaf, reduce = self._deferred[key.site, leaf]
                    source = frame.inputs[str(reduce.source)]
                    value = leaf.snapshot(reduce.apply(value, source))
                tensors.setdefault(key.site, {})[leaf] = value
            elif key.size is not None:
                sizes[key.site, *key.size] = int(values[place])
        for i, site in enumerate(self.sites):
            if i in self._flags and not values[self._flags[i]]:
                continue  # a branch that did not run
            site = self._site_of(i, args)
            event = Event(
                site,
                tensors.get(i, {}),
                _filled(sizes, i, False, site.sizes),
                _filled(sizes, i, True, site.entry_sizes),
            )
            records, final = self._program.hits_of(site)
            frame.add(event, records, final=final)

    def _site_of(self, i: int, args: Sequence[Any]) -> Site:
        """A site as a call of the module that its token, if it has one, stands for."""
        token = self._tokens[i]
        if token is None:
            return self.sites[i]
        path = self._program.path_of_token(args[token])
        found = self._sites_of.get((i, path))
        if found is None:
            found = of_module(self.sites[i], path, self._classes)
            self._sites_of[i, path] = found
        return found

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The instrumented graph."""
        yield self._full.graph_module


def _filled(
    sizes: Mapping[tuple[int, bool, int], int],
    site: int,
    entry: bool,
    known: Sequence[int | None],
) -> tuple[int, ...]:
    return tuple(
        sizes[site, entry, k] if size is None else size for k, size in enumerate(known)
    )
