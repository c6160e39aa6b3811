"""Bring taps out of the bodies of higher-order operators.

A value inside an activation checkpoint (or another operator that runs a sub-graph) is
no value of the graph around it.  The pass appends each tap to the body's outputs and
reads it from the operator's result, body by body from the inside out.

Only operators whose result is their body's output tuple can be lifted from
(``LIFTABLE``), and conditionals, where the branch without the tap returns zeros in its
place; a tap inside any other operator is an error.

Idempotent: a second run finds no tap inside a body.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxcapture.errors import UnreachableValueError
from fxcapture.passes.base import TAP, PassResult, TapKey, bodies, operator_name
from fxcapture.plan.sites import SiteTable

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
        inside = list(bodies(gm, node))
        for _, body in inside:
            modified |= lift_taps(body, sites).modified
        taps = {
            name: [n for n in body.graph.nodes if TAP in n.meta]
            for name, body in inside
        }
        if any(taps.values()):
            _lift(gm, node, dict(inside), taps, sites)
            modified = True
    return PassResult(gm, modified)


def _lift(
    gm: fx.GraphModule,
    node: fx.Node,
    inside: dict[str, fx.GraphModule],
    taps: dict[str, list[fx.Node]],
    sites: SiteTable,
) -> None:
    """Append the taps of one operator's bodies to its results.

    Args:
        gm: The graph around.
        node: The operator.
        inside: Its bodies.
        taps: The taps in each.
        sites: For error messages.
    """
    every = [tap for found in taps.values() for tap in found]
    name = operator_name(node)
    outputs = [body.graph.output_node() for body in inside.values()]
    branches = name == "cond"
    if not (branches or name in LIFTABLE) or not all(
        isinstance(output.args[0], (tuple, list)) for output in outputs
    ):
        raise _unreachable(every[0], name, sites, "so that it cannot return one more")
    first = len(outputs[0].args[0])  # type: ignore[arg-type]
    for body, output in zip(inside.values(), outputs, strict=True):
        own = [
            tap if tap.graph is body.graph else _stand_in(body, tap, name, sites)
            for tap in every
        ]
        output.args = ((*output.args[0], *own),)  # type: ignore[misc]
    with gm.graph.inserting_after(node):
        for i, tap in reversed(list(enumerate(every))):
            made = gm.graph.call_function(operator.getitem, (node, first + i))
            made.meta = {**node.meta, **tap.meta}
    for key in ("example_value", "val"):
        if key in node.meta:
            node.meta[key] = (*node.meta[key], *(tap.meta.get(key) for tap in every))
    for tap in every:
        del tap.meta[TAP]


def _stand_in(
    body: fx.GraphModule, tap: fx.Node, name: str, sites: SiteTable
) -> fx.Node:
    """What the other branch returns in a tap's place: zeros that nobody reads.

    For the flag that tells which branch ran, zeros mean that it was not the tap's.
    """
    example = tap.meta.get("example_value", tap.meta.get("val"))
    if not isinstance(example, torch.Tensor) or not all(
        isinstance(size, int) for size in (*example.shape, *example.stride())
    ):
        raise _unreachable(tap, name, sites, "and its shape is not known")
    output = body.graph.output_node()
    options: dict[str, Any] = {"dtype": example.dtype, "device": example.device}
    with body.graph.inserting_before(output):
        made = body.graph.call_function(torch.zeros, (tuple(example.shape),), options)
        if not example.is_contiguous():
            args = (made, tuple(example.shape), tuple(example.stride()))
            made = body.graph.call_function(torch.as_strided, args)
    return made


def _unreachable(
    tap: fx.Node, name: str, sites: SiteTable, detail: str
) -> UnreachableValueError:
    key: TapKey = tap.meta[TAP]
    return UnreachableValueError(
        f"the value of {sites[key.site].describe()} cannot leave the body of {name!r}",
        why="the operator returns what its body computes in a form of its own, "
        + detail,
        remedy="tap a module outside of the operator, or the module that calls it",
    )
