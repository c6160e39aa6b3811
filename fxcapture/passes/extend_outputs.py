"""Make every tap an output of the graph, behind the model's own outputs.

Idempotent: a tap that is an output already is no tap any more.
"""

from __future__ import annotations

from torch import fx

from fxcapture.passes.base import TAP, PassResult, TapKey

__all__ = ["OUTPUTS", "extend_outputs"]

#: Metadata key of the graph module; the value is a tuple of :class:`TapKey`, one for
#: each output behind the model's own.
OUTPUTS = "fxcapture_outputs"


def extend_outputs(gm: fx.GraphModule) -> PassResult:
    """Append the taps in graph order; ``gm.meta[OUTPUTS]`` names them."""
    taps = [n for n in gm.graph.nodes if TAP in n.meta]
    known: tuple[TapKey, ...] = gm.meta.get(OUTPUTS, ())
    gm.meta[OUTPUTS] = known + tuple(n.meta[TAP] for n in taps)
    if not taps:
        return PassResult(gm, False)
    output = gm.graph.output_node()
    own = output.args[0]
    output.args = (
        ((*own, *taps),) if isinstance(own, (tuple, list)) else ((own, *taps),)
    )
    for tap in taps:
        del tap.meta[TAP]
    return PassResult(gm, True)
