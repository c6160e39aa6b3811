"""Read the calls, and with them the sites, of a marked graph.

An analysis, not a rewrite: it changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import fx

from fxcapture.passes.analyses.fused_calls import FusedNode, fused_nodes
from fxcapture.passes.base import is_mark, walk
from fxcapture.plan.sites import (
    CallMarks,
    Site,
    SiteTable,
    group_marks,
    pair_hooked,
    site_of,
)
from fxcapture.trace.mark import BEGIN, INPUT, Mark

__all__ = [
    "GraphCall",
    "MarkedSites",
    "collect_marks",
    "graph_calls",
    "graph_inputs",
    "mark_of",
    "mark_sites",
    "type_of_node",
]


class MarkedSites(NamedTuple):
    """Sites, and which calls of a graph they are of.

    Attributes:
        sites: The sites, in call order.
        calls: For each site, the positions among the graph's calls of the one that
            holds its arguments and of the one that holds its result (mostly the same).
    """

    sites: SiteTable
    calls: tuple[tuple[int, int], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """One call, as its marks stand in a graph.

    Attributes:
        marks: Its marks; what they hold are nodes.
        nodes: Kind to the mark's node.
        owner: The graph module, or body, that the end of the call stands in.
        region: The higher-order operators around it, outermost first.
        span: The fused attention calls made while it ran; ``None`` if that cannot be
            told, since its beginning is not marked, or stands in another body.
    """

    marks: CallMarks
    nodes: Mapping[str, fx.Node]
    owner: fx.GraphModule
    region: tuple[str, ...]
    span: Sequence[FusedNode] | None


def mark_of(node: fx.Node) -> Mark:
    """A mark's arguments by name; tensors and symbolic integers are nodes."""
    return Mark(*node.args)  # type: ignore[arg-type]


def graph_calls(gm: fx.GraphModule) -> list[GraphCall]:
    """The calls of a marked graph and of its bodies, in call order."""
    marks: list[Mark] = []
    places: dict[int, tuple[fx.GraphModule, fx.Node, tuple[str, ...]]] = {}
    for owner, node, region in walk(gm):
        if is_mark(node):
            mark = mark_of(node)
            marks.append(mark)
            places[id(mark)] = owner, node, region
    calls = []
    for call in group_marks(marks):
        owner, end, region = places[id(call.result)]
        begin = call.marks.get(BEGIN)
        span = None
        if begin is not None and places[id(begin)][0] is owner:
            span = fused_nodes(owner, places[id(begin)][1], end)
        nodes = {kind: places[id(mark)][1] for kind, mark in call.marks.items()}
        calls.append(
            GraphCall(marks=call, nodes=nodes, owner=owner, region=region, span=span)
        )
    return calls


def graph_inputs(gm: fx.GraphModule) -> dict[str, fx.Node | None]:
    """The inputs of reductions that a graph marks, by name."""
    found: dict[str, fx.Node | None] = {}
    for _, node, _ in walk(gm):
        if is_mark(node):
            mark = mark_of(node)
            if mark.kind.startswith(INPUT):
                name = mark.kind.removeprefix(INPUT)
                found[name] = mark.tensors[0] if mark.tensors else None
    return found


def collect_marks(
    gm: fx.GraphModule, *, graph: int | None = None, classes: Mapping[str, str]
) -> MarkedSites:
    """The sites of a marked graph and of its bodies.

    Args:
        gm: The marked graph.
        graph: The number that the sites report as theirs.
        classes: Path to class name.
    """
    merged, calls = pair_hooked(mark_sites(gm, graph=graph, classes=classes))
    return MarkedSites(SiteTable(merged), calls)


def mark_sites(
    gm: fx.GraphModule, *, graph: int | None = None, classes: Mapping[str, str]
) -> list[Site]:
    """A site for each call, the two parts of hooked ones not joined yet."""
    return [
        site_of(
            call.marks,
            path=call.marks.result.path,
            classes=classes,
            type_of=type_of_node,
            size_of=_constant,
            graph=graph,
            region=call.region,
            fused_calls=None if call.span is None else len(call.span),
        )
        for call in graph_calls(gm)
    ]


def _constant(size: object) -> int | None:
    return None if isinstance(size, fx.Node) else int(size)  # type: ignore[call-overload, no-any-return]


def type_of_node(node: Any) -> tuple[tuple[int | str, ...], str]:
    """Shape and dtype of the tensor that a node stands for."""
    value = node.meta.get("val", node.meta.get("example_value"))
    shape = tuple(
        s if isinstance(s, int) else str(s) for s in getattr(value, "shape", ())
    )
    dtype = value.dtype if isinstance(value, torch.Tensor) else "?"
    return shape, str(dtype).removeprefix("torch.")
