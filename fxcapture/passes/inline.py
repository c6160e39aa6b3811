"""Write a function's operations into a graph of ATen operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxcapture import _torch

__all__ = ["inline"]


def inline(graph: fx.Graph, function: Callable[..., Any], *nodes: fx.Node) -> Any:
    """Add the ATen operations of ``function(*nodes)`` where the graph inserts now.

    Args:
        graph: A graph whose nodes have fake values under ``val``, or as Dynamo's do;
            edited.
        function: A function of tensors.
        nodes: Its arguments.

    Returns:
        What the function returns, with nodes in place of tensors.
    """
    key = "val" if "val" in nodes[0].meta else "example_value"
    traced = _torch.trace_on_fake(function, *[node.meta[key] for node in nodes])
    mapped: dict[fx.Node, Any] = {}
    made: Any = nodes[0]
    places = iter(nodes)
    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            mapped[inner] = next(places)
        elif inner.op == "output":
            made = _torch.map_nodes(lambda leaf: mapped.get(leaf, leaf), inner.args[0])
        else:
            made = mapped[inner] = graph.node_copy(inner, mapped.__getitem__)
            made.meta[key] = made.meta.pop("val", None)
    return made
