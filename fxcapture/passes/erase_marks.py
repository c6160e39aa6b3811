"""Remove the marks, and what was computed for them alone.

After it the graph holds the model's nodes and the wanted taps, nothing else: with no
tap it is the graph that the model has without capture, node for node.  A node of the
model that nothing uses stays, as it would without capture.

Idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxcapture.passes.analyses.collect_marks import mark_of
from fxcapture.passes.base import MADE, PassResult, bodies, is_mark
from fxcapture.trace.mark import BEGIN, ENDS, INPUT, NAMED

__all__ = ["erase_marks"]


def erase_marks(gm: fx.GraphModule) -> PassResult:
    """Erase every mark of a graph and of its bodies."""
    modified = False
    for node in list(gm.graph.nodes):
        for _, body in bodies(gm, node):
            modified |= erase_marks(body).modified
    # The model's own nodes, which stay: what its calls returned, and its inputs.
    own: set[Any] = set()
    for node in gm.graph.nodes:
        if is_mark(node):
            mark = mark_of(node)
            if mark.kind in (*ENDS, NAMED) or mark.kind.startswith(INPUT):
                own.update(mark.tensors)
    # In reverse, so that a copy of a copy (of an outer module's input) goes first.
    for node in reversed(list(gm.graph.nodes)):
        if is_mark(node):
            mark = mark_of(node)
            gm.graph.erase_node(node)
            if mark.kind not in (BEGIN, NAMED, *ENDS):
                _erase_derived(mark.tensors, own)
            modified = True
        elif MADE in node.meta and not node.users:
            gm.graph.erase_node(node)
    return PassResult(gm, modified)


def _erase_derived(derived: Iterable[fx.Node], result: set[fx.Node]) -> None:
    """Erase what the mark's own tensors were computed with, up to the model's nodes.

    Copies of inputs are ``clone`` nodes: what they copy belongs to the model.  A
    reduction's nodes lie between it and such a copy or the call's result.
    """
    nodes = list(derived)
    copies = {n for n in nodes if n.target in ("clone", torch.ops.aten.clone.default)}
    stack = list(nodes)
    erased: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in result or node in erased or node.users:
            continue
        if node.op in ("placeholder", "get_attr"):
            continue
        inputs = [] if node in copies else node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        stack.extend(inputs)
