"""Drop the inputs that only told which module a mark stands for.

A graph that serves several modules has an input for each mark: the module's token.  The
mark's site is read from it when the graph runs; the compiled graph itself needs none.

Idempotent.
"""

from __future__ import annotations

from torch import fx

from fxcapture.passes.base import PassResult

__all__ = ["KEPT_INPUTS", "drop_tokens"]

#: Metadata key of the graph module: positions of the inputs that are left.
KEPT_INPUTS = "fxcapture_kept_inputs"


def drop_tokens(gm: fx.GraphModule, tokens: frozenset[int]) -> PassResult:
    """Remove token inputs that nothing uses; ``gm.meta[KEPT_INPUTS]`` names the rest.

    Args:
        gm: A graph without marks; edited.
        tokens: Positions of the inputs that are tokens.
    """
    if KEPT_INPUTS in gm.meta:
        return PassResult(gm, False)
    kept = []
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(inputs):
        if i in tokens and not node.users:
            gm.graph.erase_node(node)
        else:
            kept.append(i)
    gm.meta[KEPT_INPUTS] = tuple(kept)
    return PassResult(gm, len(kept) < len(inputs))
