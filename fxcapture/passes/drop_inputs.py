"""Drop inputs that nothing uses any more.

A graph that serves several modules has an input for each mark: the module's token.  The
mark's site is read from it when the graph runs; the compiled graph itself needs none.
A graph that ends early has inputs for the parameters of layers that are gone.

Idempotent.
"""

from __future__ import annotations

import torch
from torch import fx

from fxcapture.passes.base import PassResult

__all__ = ["KEPT_INPUTS", "drop_inputs", "tensor_inputs"]

#: Metadata key of the graph module: positions of the inputs that are left.
KEPT_INPUTS = "fxcapture_kept_inputs"


def drop_inputs(gm: fx.GraphModule, droppable: frozenset[int]) -> PassResult:
    """Remove inputs without users; ``gm.meta[KEPT_INPUTS]`` names those that are left.

    Args:
        gm: A graph without marks; edited.
        droppable: Positions of the inputs that may go.
    """
    if KEPT_INPUTS in gm.meta:
        return PassResult(gm, False)
    kept = []
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(inputs):
        if i in droppable and not node.users:
            gm.graph.erase_node(node)
        else:
            kept.append(i)
    gm.meta[KEPT_INPUTS] = tuple(kept)
    return PassResult(gm, len(kept) < len(inputs))


def tensor_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that are tensors.

    Only they may go where a graph ends early: a symbolic size is an input of its own,
    and what is left may be of that size without mentioning it.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return frozenset(
        i
        for i, node in enumerate(inputs)
        if isinstance(node.meta.get("example_value"), torch.Tensor)
    )
