"""Check what must hold after the passes: lint clean, no mark, no tap left behind.

An analysis: it changes nothing and raises where a pass of ours is at fault.
"""

from __future__ import annotations

from torch import fx

from fxcapture.errors import GraphError
from fxcapture.passes.base import TAP, is_mark, walk
from fxcapture.passes.extend_outputs import OUTPUTS

__all__ = ["verify_graph"]


def verify_graph(gm: fx.GraphModule) -> None:
    """Raise ``GraphError`` where an invariant is broken."""
    for owner in {id(o): o for o, _, _ in walk(gm)}.values():
        try:
            owner.graph.lint()
        except RuntimeError as error:
            raise GraphError(
                "the instrumented graph is not well-formed", why=str(error)
            ) from error
    for _, node, _ in walk(gm):
        if is_mark(node) or TAP in node.meta:
            raise GraphError(f"node {node.name!r} was left behind by a pass")
    output = gm.graph.output_node().args[0]
    taps = len(gm.meta[OUTPUTS])
    if taps and (not isinstance(output, (tuple, list)) or len(output) < taps):
        raise GraphError("a tap is missing from the outputs")
