"""What a graph delivers that is a piece of a broken run.

Its sites are hits among others, so every value that a record may want becomes an
output.  One piece may serve several modules: which one it runs for, it learns from the
tokens among its inputs.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import fx

from fxcapture import passes
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.compute_weights import weights_wanted
from fxcapture.plan.match import Match
from fxcapture.plan.plan import Leaf
from fxcapture.plan.sites import Site, SiteTable, of_module
from fxcapture.plan.slots import named_leaves_of
from fxcapture.reductions import Reduction
from fxcapture.runtime.call import Call
from fxcapture.runtime.capture import Capture
from fxcapture.runtime.compiled_graph import Variant, Wanted, places_of
from fxcapture.runtime.observation import Observation
from fxcapture.trace.mark import RESULT

__all__ = ["BARE", "FULL", "PieceDelivery"]

#: The variant with every tap, and the one without.
FULL, BARE = "full", "bare"


@final
class PieceDelivery:
    """Hands a piece's values to its call, as observations.

    Args:
        capture: The capture that the run is of; not kept alive.
        bound: The spec bound to the model, as the run found it.
        gm: The marked graph.
        number: The graph's number.

    Attributes:
        marked: The graph's sites; the two parts of a hooked call are two, and are
            joined when the run ends.
        prunes: ``False``: the model's other pieces need what a piece returns.
        attention: The attention weights that records want.
    """

    def __init__(
        self, capture: Capture, bound: Match, gm: fx.GraphModule, number: int
    ) -> None:
        self._capture = weakref.ref(capture)
        self._bound = bound
        spec = capture.spec
        self.prunes = False
        # A piece does not see the call's inputs: reduced behind it.
        self.attention = {
            name: wanted._replace(reduce=None, source=None) if wanted.source else wanted
            for name, wanted in weights_wanted(spec).items()
        }
        self._sites = passes.mark_sites(gm, graph=number, classes=bound.classes)
        self._tokens = passes.locate_tokens(gm)
        self._sites_of: dict[tuple[int, str], Site] = {}
        self._deferred: dict[tuple[int, Leaf], tuple[Leaf, Reduction]] = {}
        # A site of a group is spoken of as one of its members.
        stand_ins = [
            of_module(s, capture.representative(s.path), bound.classes)
            for s in self._sites
        ]
        own = tuple((i, i) for i in range(len(stand_ins)))
        self.marked = MarkedSites(SiteTable(stand_ins), own)
        leaves: dict[int, dict[Leaf, None]] = {}
        sizes: dict[int, dict[tuple[str, int], None]] = {}
        for i, stand_in in enumerate(stand_ins):
            leaves[i] = {}
            for name, leaf in named_leaves_of(spec, bound, stand_in):
                reduce = spec[name].reduce
                if isinstance(reduce, Reduction) and reduce.source is not None:
                    whole = dataclasses.replace(leaf, dtype=None, device=None)
                    self._deferred[i, whole] = (leaf, reduce)
                    leaf = whole
                leaves[i][leaf] = None
            sizes[i] = {(kind, k): None for kind, k, _ in _sizes_of(stand_in)}
        self._full = Wanted(leaves=leaves, sizes=sizes)
        fixed = all(s is not None for site in stand_ins for _, _, s in _sizes_of(site))
        weights = any(bound.attention.get(site.path) for site in stand_ins)
        branches = any("cond" in site.region for site in stand_ins)
        #: Only where taps cost more than copies is there a variant without them.
        self._has_bare = weights and fixed and not branches

    def droppable(self, graph_module: fx.GraphModule) -> frozenset[int]:
        """The inputs that are tokens."""
        return frozenset(t for t in self._tokens if t is not None)

    def wanted(self, key: Hashable) -> Wanted:
        """Every tap, or none."""
        return self._full if key == FULL else Wanted(leaves={}, sizes={})

    def key(self, call: Call, args: Sequence[Any]) -> Hashable:
        """Whether a record may select anything that this call of the graph gives."""
        capture = self._capture()
        # Autograd's checkpoints compute a call again, which has to run alike.
        if not self._has_bare or torch.is_grad_enabled() or capture is None:
            return FULL
        hits: collections.Counter[str] = collections.Counter()
        for i in range(len(self._sites)):
            records, final = capture.hits_of(call.bound, self._site_of(i, args))
            if not final:
                return FULL
            hits.update(records)
        return FULL if call.may_select(hits) else BARE

    def reader(self, wanted: Wanted, graph_module: fx.GraphModule) -> Any:
        """Where each tap stands, and where the flags of branches do."""
        places = places_of(graph_module)
        return places, {key.site: i for key, i in places.items() if key.ran}

    def deliver(
        self, call: Call, variant: Variant, args: Sequence[Any], taps: Sequence[Any]
    ) -> None:
        """Hand over an observation for each of the graph's sites."""
        capture = self._capture()
        if capture is None:
            return
        capture.join_checkpoint(call)
        places, flags = variant.reader
        tensors: dict[int, dict[Leaf, Any]] = {}
        sizes: dict[tuple[int, str, int], int] = {}
        for key, place in places.items():
            if key.leaf is not None:
                leaf, value = key.leaf, taps[place]
                if (key.site, leaf) in self._deferred:
                    leaf, reduce = self._deferred[key.site, leaf]
                    source = call.inputs[str(reduce.source)]
                    value = leaf.snapshot(reduce.apply(value, source))
                tensors.setdefault(key.site, {})[leaf] = value
            elif key.size is not None:
                sizes[key.site, *key.size] = int(taps[place])
        for i in range(len(self._sites)):
            if i in flags and not taps[flags[i]]:
                continue  # a branch that did not run
            site = self._site_of(i, args)
            found: dict[str, list[int]] = {}
            for kind, k, size in _sizes_of(site):
                known = sizes[i, kind, k] if size is None else size
                found.setdefault(kind, []).append(known)
            observation = Observation(site, tensors.get(i, {}), found)
            records, final = capture.hits_of(call.bound, site)
            call.add(observation, records, final=final)

    def _site_of(self, i: int, args: Sequence[Any]) -> Site:
        """A site as a call of the module that its token, if it has one, stands for."""
        token, capture = self._tokens[i], self._capture()
        if token is None or capture is None:
            return self._sites[i]
        path = capture.path_of_token(args[token])
        found = self._sites_of.get((i, path))
        if found is None:
            found = of_module(self._sites[i], path, self._bound.classes)
            self._sites_of[i, path] = found
        return found


def _sizes_of(site: Site) -> list[tuple[str, int, int | None]]:
    """Every integer leaf of a site's marks: kind, index, the size if it is known."""
    values = [(RESULT, site.sizes), ("entry", site.entry.sizes)]
    values += [(kind, value.sizes) for kind, value in site.derived]
    return [(kind, i, s) for kind, sizes in values for i, s in enumerate(sizes)]
