"""One Dynamo graph with its taps, compiled; what Dynamo's generated code calls.

Terms
    variant: the graph compiled with some taps.  A whole graph has one for each
        selection; a piece has one with every tap that a record may want, and where that
        costs more than copies, one without.
    delivery: what says which taps a call needs and what becomes of their values: see
        :mod:`fxcapture.runtime.whole_run` and :mod:`fxcapture.runtime.piece_run`.

Invariants
    Variants are made once each, outside of Dynamo but for the first, and the least
    recently used is dropped when there are too many.  One that could not be compiled
    says so again, and is not tried again.
    Dynamo keeps a compiled graph for as long as it keeps the code that calls it, so the
    graph refers to its program weakly.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import torch
from torch import fx

from fxcapture import _torch, passes
from fxcapture.errors import CaptureError, FxCaptureError
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Leaf
from fxcapture.runtime.call import Call, call_in_flight
from fxcapture.trace.listen import innermost, unheard

__all__ = [
    "NUMBER",
    "CompiledGraph",
    "Delivery",
    "Engine",
    "Variant",
    "Wanted",
    "kept_graph",
    "kept_outputs",
    "places_of",
]

#: Metadata key of an instrumented graph: its number among the program's graphs.
NUMBER = "fxcapture_number"

_Made = TypeVar("_Made")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The taps of a variant.

    Attributes:
        leaves: Site index to tensor leaves.
        sizes: Site index to integer leaves.
        plan: What they are for; two selections of one plan share a variant.
    """

    leaves: Mapping[int, Mapping[Leaf, None]]
    sizes: Mapping[int, Mapping[tuple[str, int], None]]
    plan: Any = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A graph compiled with some taps.

    Attributes:
        wanted: The taps.
        graph_module: The instrumented graph.
        call: The compiled graph; its own outputs come first.
        inputs: Which of Dynamo's inputs it takes; ``None`` for all.
        num_own: Number of outputs in front of the taps.
        reader: What the delivery made of it.
    """

    wanted: Wanted
    graph_module: fx.GraphModule
    call: Callable[..., Sequence[Any]]
    inputs: Sequence[int] | None
    num_own: int
    reader: Any

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """All outputs; copies to the host that the graph has queued are done."""
        if self.inputs is not None:
            args = [args[i] for i in self.inputs]
        out = self.call(*args) if innermost() is None else unheard(self.call, args)
        if len(out) > self.num_own:
            for device in self.graph_module.meta.get(passes.WAITS, ()):
                torch.accelerator.current_stream(device).synchronize()
        return out


class Engine(Protocol):
    """What a compiled graph needs of the program it belongs to."""

    @property
    def share_masks(self) -> bool:
        """Whether to convert boolean attention masks once for all layers."""

    @property
    def asynchronous(self) -> bool:
        """Whether copies to the host may be queued."""

    @property
    def max_variants(self) -> int:
        """How many variants of one graph stay compiled."""

    def inner(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph."""

    def kept(self, taps: Sequence[Any]) -> Sequence[Any]:
        """Taps that the next run of the graph does not write over."""

    def owns(self, call: Call) -> bool:
        """Whether a call is one of the program's."""


class Delivery(Protocol):
    """Which taps a graph's calls need, and what becomes of their values."""

    @property
    def marked(self) -> MarkedSites:
        """The graph's sites."""

    @property
    def prunes(self) -> bool:
        """Whether the graph ends at the last operation that a record needs."""

    @property
    def attention(self) -> Mapping[str, passes.WeightsWanted]:
        """The attention weights that records want."""

    def droppable(self, graph_module: fx.GraphModule) -> frozenset[int] | None:
        """Inputs that need not be passed where nothing uses them; ``None``: all are."""

    def wanted(self, key: Hashable) -> Wanted:
        """The taps of one variant."""

    def key(self, call: Call, args: Sequence[Any]) -> Hashable:
        """The variant that a call needs."""

    def reader(self, wanted: Wanted, graph_module: fx.GraphModule) -> Any:
        """What reads the taps of a variant; made once, so that calls only index."""

    def deliver(
        self, call: Call, variant: Variant, args: Sequence[Any], taps: Sequence[Any]
    ) -> None:
        """Hand the values of the taps to the call."""


def kept_outputs(
    values: Sequence[Any], reused: Callable[[torch.Tensor], bool] | None
) -> Sequence[Any]:
    """Outputs of a compiled graph that its next run does not write over.

    A copy inside the graph would be one of its output buffers itself.

    Args:
        values: The outputs.
        reused: Which of them the next run may write over; ``None`` for none.
    """
    if reused is None:
        return values
    return [
        v.clone() if isinstance(v, torch.Tensor) and reused(v) else v for v in values
    ]


def places_of(graph_module: fx.GraphModule) -> dict[TapKey, int]:
    """What each output behind the model's own is, and where it stands there."""
    keys: tuple[TapKey, ...] = graph_module.meta[passes.OUTPUTS]
    return {key: i for i, key in enumerate(keys)}


def kept_graph(marked_graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph to compile from, now and later."""
    kept = passes.copy_graph_module(marked_graph)
    for node in kept.graph.nodes:
        # It refers to the call's real inputs, which nothing should keep alive.
        node.meta.pop("grapharg", None)
    return kept


@final
class CompiledGraph:
    """A marked graph, and what was compiled of it.

    Args:
        engine: The program it belongs to; not kept alive.
        graph: The marked graph, from :func:`kept_graph`; not changed.
        delivery: What becomes of its taps.
        key: The variant to compile now.
        example_inputs: What Dynamo gives a backend.
        number: Its number among the program's graphs.

    Raises:
        TargetError: the spec does not fit what the graph calls.
        CaptureError: a value cannot be captured.
    """

    def __init__(
        self,
        engine: Engine,
        graph: fx.GraphModule,
        delivery: Delivery,
        key: Hashable,
        example_inputs: Sequence[Any],
        number: int,
    ) -> None:
        self._number = number
        self._engine = weakref.ref(engine)
        self._graph = graph
        self._delivery = delivery
        self._lock = threading.Lock()
        self._variants: collections.OrderedDict[Hashable, Variant]
        self._variants = collections.OrderedDict()
        self._failed: dict[Hashable, Exception] = {}
        wanted = delivery.wanted(key)
        self._variants[key] = self._build(engine, wanted, example_inputs)

    def _build(
        self, engine: Engine, wanted: Wanted, example_inputs: Sequence[Any]
    ) -> Variant:
        delivery = self._delivery
        made = passes.rewrite(
            self._graph,
            delivery.marked,
            wanted.leaves,
            wanted.sizes,
            attention=delivery.attention,
            prune=delivery.prunes,
            share_masks=engine.share_masks,
            asynchronous=engine.asynchronous,
        )
        made.meta[NUMBER] = self._number
        inputs: tuple[int, ...] | None = None
        droppable = delivery.droppable(made)
        if droppable is not None:
            passes.drop_inputs(made, droppable)
            made.recompile()
            inputs = made.meta[passes.KEPT_INPUTS]
        given = (
            example_inputs if inputs is None else [example_inputs[i] for i in inputs]
        )
        outputs: Any = made.graph.output_node().args[0]
        return Variant(
            wanted=wanted,
            graph_module=made,
            call=_torch.without_disable(engine.inner(made, list(given))),
            inputs=None if len(given) == len(example_inputs) else inputs,
            num_own=len(outputs) - len(made.meta[passes.OUTPUTS]),
            reader=delivery.reader(wanted, made),
        )

    def _variant(self, engine: Engine, key: Hashable) -> Variant:
        """The variant for a key; compiled on first use, outside of Dynamo."""
        found = self._variants.get(key)
        if found is None:
            # Tracers patch nn.Module while they run, in every thread: what another
            # thread traced meanwhile would be guarded on the patch.
            with self._lock, _torch.no_tracing():
                found = self._variants.get(key) or self._late(engine, key)
                self._variants[key] = found
                while len(self._variants) > engine.max_variants:
                    self._variants.popitem(last=False)
        elif len(self._variants) == engine.max_variants:
            with self._lock:
                if key in self._variants:
                    self._variants.move_to_end(key)
        return found

    def _late(self, engine: Engine, key: Hashable) -> Variant:
        if key in self._failed:
            raise self._failed[key]
        wanted = self._delivery.wanted(key)
        for known in self._variants.values():
            if known.wanted == wanted:
                return known
        build = functools.partial(self._build, engine, wanted)
        try:
            return _compile_late(self._graph, build)
        except FxCaptureError:
            raise
        except Exception as error:
            failure = CaptureError(
                "the graph cannot be compiled for this selection",
                why=f"{type(error).__name__}: {error}".strip(),
                remedy="select other positions, or use another backend; the call is "
                "refused without compiling again from now on",
            )
            failure.__cause__ = error
            self._failed[key] = failure
            raise failure from error

    def __call__(self, *args: Any) -> Any:
        """Run the graph; its taps go to the call in flight, the rest to Dynamo."""
        engine, call = self._engine(), call_in_flight.get()
        if engine is None or call is None or not engine.owns(call):
            # Dynamo's code outlived the call: the user runs it by a way of his own.
            variant = next(iter(self._variants.values()))
            return variant.run(args)[: variant.num_own]
        try:
            variant = self._variant(engine, self._delivery.key(call, args))
        except FxCaptureError as error:
            call.error = error
            raise
        call.started = True
        out = variant.run(args)
        own = variant.num_own
        self._delivery.deliver(call, variant, args, engine.kept(out[own:]))
        return out[:own]

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The instrumented graphs, one for each variant that has taps."""
        taps = [v for v in self._variants.values() if v.wanted.plan or v.wanted.leaves]
        yield from {id(v): v.graph_module for v in taps}.values()


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
