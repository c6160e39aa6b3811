"""A walk over a graph of ATen operators: what is alive when, and what it computes.

Terms
    live bytes: bytes of the tensors that the run itself made and still needs; weights,
        buffers and inputs exist before the run and are not counted.

Invariants
    Nodes carry fake tensors as ``meta["val"]``; those of a view share its base's
    storage, which is how a view keeps its base alive.  The graph is not changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch

__all__ = [
    "PATH",
    "Timeline",
    "count_flops",
    "timeline_of",
    "values_of",
    "weight_bytes",
]

#: Key of a node's annotation: the path of the module that the node belongs to.
PATH = "fxcapture_path"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over a graph.

    Attributes:
        live_bytes: Bytes alive while each node runs, in graph order.
        paths: The module each node belongs to.
    """

    live_bytes: tuple[int, ...]
    paths: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max(self.live_bytes, default=0)

    @property
    def peak_path(self) -> str:
        """The module that runs at the peak."""
        if not self.live_bytes:
            return ""
        return self.paths[self.live_bytes.index(self.peak_bytes)]

    def __repr__(self) -> str:
        return f"Timeline({len(self.live_bytes)} nodes, peak {self.peak_bytes:,} bytes)"


def values_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node gives."""
    found = node.meta.get("val")
    for value in found if isinstance(found, (tuple, list)) else (found,):
        if isinstance(value, torch.Tensor):
            yield value


def timeline_of(gm: fx.GraphModule) -> Timeline:
    """Live bytes over a graph whose nodes carry fake tensors.

    A tensor lives from its node to the last node that uses it or a view of it; what the
    graph returns lives to the end.
    """
    nodes = list(gm.graph.nodes)
    storage_of: dict[fx.Node, list[Any]] = {}
    last_use: dict[Any, int] = {}
    existing: set[Any] = set()
    for i, node in enumerate(nodes):
        storage_of[node] = [v.untyped_storage() for v in values_of(node)]
        if node.op in ("placeholder", "get_attr"):
            existing.update(storage_of[node])
        for source in (node, *node.all_input_nodes):
            for storage in storage_of[source]:
                last_use[storage] = i
    ends: dict[int, list[Any]] = {}
    for storage, i in last_use.items():
        if i < len(nodes) - 1:
            ends.setdefault(i, []).append(storage)
    live: list[int] = []
    paths: list[str] = []
    current = 0
    alive: set[Any] = set(existing)
    path = ""
    for i, node in enumerate(nodes):
        for storage in storage_of[node]:
            if storage not in alive:
                alive.add(storage)
                current += storage.nbytes()
        path = node.meta.get("custom", {}).get(PATH, path)
        live.append(current)
        paths.append(path)
        for storage in ends.get(i, ()):
            if storage not in existing:
                current -= storage.nbytes()
    return Timeline(live_bytes=tuple(live), paths=tuple(paths))


def weight_bytes(gm: fx.GraphModule) -> int:
    """Bytes of the parameters and buffers that a graph reads, each storage once."""
    storages = {
        v.untyped_storage(): None
        for node in gm.graph.nodes
        if node.op == "get_attr" and node.users
        for v in _weights(gm, node)
    }
    return sum(s.nbytes() for s in storages)


def _weights(gm: fx.GraphModule, node: fx.Node) -> Iterator[torch.Tensor]:
    found = getattr(gm, str(node.target), None)
    if isinstance(found, torch.Tensor):
        yield found


def count_flops(gm: fx.GraphModule) -> int:
    """Operations of a graph's matrix products, convolutions and attention."""
    total = 0
    for node in gm.graph.nodes:
        formula = _torch.flop_formula(node.target)
        if formula is not None:
            args = fx.map_arg(node.args, lambda n: n.meta["val"])
            kwargs = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
            total += int(formula(*args, **kwargs, out_val=node.meta["val"]))
    return total
