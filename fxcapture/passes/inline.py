"""Write a function's operations into a graph of ATen operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxcapture import _torch

__all__ = ["inline"]


def inline(
    graph: fx.Graph, function: Callable[..., torch.Tensor], *nodes: fx.Node
) -> fx.Node:
    """Add the ATen operations of ``function(*nodes)`` where the graph inserts now.

    Args:
        graph: A graph whose nodes have fake values under ``val``; edited.
        function: A function of tensors.
        nodes: Its arguments.
    """
    traced = _torch.trace_on_fake(function, *[node.meta["val"] for node in nodes])
    mapped: dict[fx.Node, Any] = {}
    made: Any = nodes[0]
    places = iter(nodes)
    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            mapped[inner] = next(places)
        elif inner.op == "output":
            made = mapped[inner.args[0]]
        else:
            made = mapped[inner] = graph.node_copy(inner, mapped.__getitem__)
    return made  # type: ignore[no-any-return]
