"""Find the fused attention calls of a span, and read their arguments.

An analysis.  A span is what stands between the two marks of one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import fx

from fxcapture.passes.base import bodies
from fxcapture.trace.attention import (
    FlexCall,
    FusedCall,
    flex_call,
    fused_call,
)
from fxcapture.trace.packed_attention import PACKED, PackedCall, packed_call

__all__ = ["FusedNode", "fused_nodes", "read_call"]

_FUSED = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_FLEX = torch.ops.higher_order.flex_attention


@final
@dataclasses.dataclass(frozen=True, slots=True)
class FusedNode:
    """A fused call in a graph.

    Attributes:
        owner: The graph module, or body, that it stands in.
        node: The call.
    """

    owner: fx.GraphModule
    node: fx.Node


def fused_nodes(owner: fx.GraphModule, begin: fx.Node, end: fx.Node) -> list[FusedNode]:
    """The fused calls between two nodes of one graph, those in bodies included."""
    found: list[FusedNode] = []
    node = begin.next
    while node is not end:
        found += _at(owner, node)
        node = node.next
    return found


def _at(owner: fx.GraphModule, node: fx.Node) -> list[FusedNode]:
    if node.op != "call_function":
        return []
    if node.target in (*_FUSED, _FLEX, PACKED):
        return [FusedNode(owner, node)]
    return [
        found
        for _, body in bodies(owner, node)
        for inner in body.graph.nodes
        for found in _at(body, inner)
    ]


def read_call(fused: FusedNode) -> FusedCall | FlexCall | PackedCall:
    """The arguments of a fused call that decide its weights; nodes for tensors.

    The functions of a flex call are those of the graph: what they read besides their
    arguments stands behind these, as nodes.
    """
    node = fused.node
    args: list[Any] = list(node.args)
    if node.target is PACKED:
        return packed_call(*args, **node.kwargs)  # type: ignore[arg-type]
    if node.target is not _FLEX:
        return fused_call(*args, **node.kwargs)  # type: ignore[arg-type]
    names = ("query", "key", "value", "score_mod", "block_mask", "scale")
    more = ("kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers")
    given = dict(zip((*names, *more), args, strict=False)) | dict(node.kwargs)
    block_mask = list(given["block_mask"])
    block_mask[-1] = _body(fused.owner, block_mask[-1])
    return flex_call(
        given["query"],
        given["key"],
        given["value"],
        _body(fused.owner, given["score_mod"]),
        tuple(block_mask),
        given["scale"],
        given.get("kernel_options"),
        given.get("score_mod_other_buffers", ()),
        given.get("mask_mod_other_buffers", ()),
    )


def _body(owner: fx.GraphModule, node: Any) -> Callable[..., torch.Tensor]:
    body: Any = owner
    for name in str(node.target).split("."):
        body = getattr(body, name)
    return body  # type: ignore[no-any-return]
