"""What a graph delivers that is the whole run.

Positions are known when it is compiled, and only what is selected becomes an output.
The records are read from the outputs directly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

from torch import fx

from fxcapture import passes
from fxcapture.passes.base import TapKey
from fxcapture.passes.compute_weights import weights_wanted
from fxcapture.plan.match import Match
from fxcapture.plan.plan import Plan, Slot
from fxcapture.plan.records import Records
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import Site, SiteTable
from fxcapture.runtime.call import Call
from fxcapture.runtime.compiled_graph import Variant, Wanted, places_of
from fxcapture.spec.capture_spec import CaptureSpec

__all__ = ["RecordReader", "WholeDelivery"]


@final
class WholeDelivery:
    """Hands a whole graph's records to its call.

    Args:
        spec: What is captured.
        bound: The spec bound to the model, as the trace found it.
        gm: The marked graph.
        number: The graph's number.
        keep_output: Whether callers want the model's output.

    Attributes:
        marked: The graph's sites.
        prunes: Whether the graph ends at the last operation that a record needs.
        attention: The attention weights that records want.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        bound: Match,
        gm: fx.GraphModule,
        number: int,
        keep_output: bool,
    ) -> None:
        self._spec = spec
        self._bound = bound
        self.marked = passes.collect_marks(gm, graph=number, classes=bound.classes)
        self.prunes = not keep_output
        self.attention = weights_wanted(spec)

    def droppable(self, graph_module: fx.GraphModule) -> frozenset[int] | None:
        """Parameters of layers that are gone, where the graph ends early."""
        return passes.tensor_inputs(graph_module) if self.prunes else None

    def wanted(self, key: Hashable) -> Wanted:
        """The taps for one selection."""
        selection: Any = key
        plan = resolve(self._spec, self._bound, self.marked.sites, selection)
        return Wanted(leaves=plan.wanted(), sizes=plan.wanted_sizes(), plan=plan)

    def key(self, call: Call, args: Sequence[Any]) -> Hashable:
        """The call's selection."""
        return call.selection

    def reader(self, wanted: Wanted, graph_module: fx.GraphModule) -> RecordReader:
        """What makes records of the graph's taps."""
        return RecordReader(wanted.plan, self.marked.sites, places_of(graph_module))

    def deliver(
        self, call: Call, variant: Variant, args: Sequence[Any], taps: Sequence[Any]
    ) -> None:
        """Hand over the finished records."""
        call.finish(variant.wanted.plan, self.marked.sites)
        call.bound = self._bound
        call.delivered = variant.reader(taps)


@final
class RecordReader:
    """Makes records of the taps of a graph that is a whole run.

    Args:
        plan: Where the records come from.
        sites: The graph's sites.
        places: What to index the taps with.
    """

    __slots__ = ("_paths", "_plan", "_readers")

    def __init__(
        self, plan: Plan, sites: SiteTable, places: Mapping[TapKey, Any]
    ) -> None:
        self._plan = plan
        self._paths = {r.name: r.paths for r in plan.records}
        # Worked out once, so that a call only indexes its outputs.
        self._readers = [
            (r.name, [s and _reader(s, places, sites[s.site]) for s in r.slots])
            for r in plan.records
        ]

    def __call__(self, taps: Any) -> Records:
        """The records of one run; they hold the taps themselves."""
        made = {
            name: tuple([read and read(taps) for read in readers])
            for name, readers in self._readers
        }
        return Records(made, self._paths, self._plan)


def _reader(
    slot: Slot, places: Mapping[TapKey, Any], site: Site
) -> Callable[[Any], Any]:
    """A function from a run's taps to the value of one slot."""
    tensors = {i: places[TapKey(slot.site, leaf=leaf)] for i, leaf in slot.leaves}
    structure = slot.structure
    if structure.kind == "tensor":
        return operator.itemgetter(tensors[structure.index])
    value = site.value(slot.kind)
    known = value.sizes if value is not None else ()
    sizes = {
        i: places[TapKey(slot.site, size=(slot.kind, i))]
        for i in slot.sizes
        if known[i] is None
    }

    def read(values: Any) -> Any:
        return structure.build(
            lambda i: values[tensors[i]],
            lambda i: int(values[sizes[i]]) if i in sizes else known[i],
        )

    return read
