"""Bring taps out of the bodies of higher-order operators.

A value inside an activation checkpoint (or another operator that runs a sub-graph) is
no value of the graph around it.  The pass appends each tap to the body's outputs and
reads it from the operator's result, body by body from the inside out.

Only operators whose result is their body's output tuple can be lifted from
(``LIFTABLE``); a tap inside any other one is an error.

Idempotent: a second run finds no tap inside a body.
"""

from __future__ import annotations

import operator

from torch import fx

from fxcapture.errors import UnreachableValueError
from fxcapture.passes.base import TAP, PassResult, TapKey, bodies, operator_name
from fxcapture.sites import SiteTable

__all__ = ["LIFTABLE", "lift_taps"]

LIFTABLE = frozenset(
    {
        "dynamo_bypassing_wrapper",
        "hints_wrapper",
        "invoke_subgraph",
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)


def lift_taps(gm: fx.GraphModule, sites: SiteTable) -> PassResult:
    """Lift every tap into the outermost graph.

    Args:
        gm: A graph with taps; edited, its bodies too.
        sites: The graph's sites, for error messages.

    Raises:
        UnreachableValueError: a tap stands in a body it cannot leave.
    """
    modified = False
    for node in list(gm.graph.nodes):
        for _, body in bodies(gm, node):
            modified |= lift_taps(body, sites).modified
            taps = [n for n in body.graph.nodes if TAP in n.meta]
            if taps:
                _lift(gm, node, body, taps, sites)
                modified = True
    return PassResult(gm, modified)


def _lift(
    gm: fx.GraphModule,
    node: fx.Node,
    body: fx.GraphModule,
    taps: list[fx.Node],
    sites: SiteTable,
) -> None:
    name = operator_name(node)
    output = body.graph.output_node()
    if name not in LIFTABLE or not isinstance(output.args[0], (tuple, list)):
        key: TapKey = taps[0].meta[TAP]
        raise UnreachableValueError(
            f"the value of {sites[key.site].describe()} cannot leave the body of "
            f"{name!r}",
            why="the operator returns what its body computes in a form of its own, so "
            "that the body cannot return one value more",
            remedy="tap a module outside of the operator, or the module that calls it",
        )
    first = len(output.args[0])
    output.args = ((*output.args[0], *taps),)
    with gm.graph.inserting_after(node):
        for i, tap in reversed(list(enumerate(taps))):
            made = gm.graph.call_function(operator.getitem, (node, first + i))
            made.meta = {**node.meta, **tap.meta}
    for key in ("example_value", "val"):
        if key in node.meta:
            node.meta[key] = (*node.meta[key], *(tap.meta.get(key) for tap in taps))
    for tap in taps:
        del tap.meta[TAP]
