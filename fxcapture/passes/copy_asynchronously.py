"""Let copies from an accelerator to the host run beside what follows them.

A copy to the host that blocks holds up the host in the middle of the graph, and with it
the launch of every later kernel.  Here the copy is only queued; whoever runs the graph
waits at its end, before anybody can read the record (``gm.meta[WAITS]`` says for which
devices).  The order on the device's stream keeps the source as it was.

Only where the copy is nothing but that: of the dtype, contiguous, an output of the
outermost graph that nothing in it reads, in a graph that does not choose its streams.
What else a tap wants is done on the device first.

Idempotent: afterwards no tap blocks that need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxcapture.passes.base import TAP, PassResult

__all__ = ["WAITS", "copy_asynchronously"]

#: Metadata key of the graph module: devices that copies may still come from.
WAITS = "fxcapture_waits"


def copy_asynchronously(gm: fx.GraphModule) -> PassResult:
    """Queue the taps' copies from CUDA devices to the host.

    Args:
        gm: A graph as Dynamo makes it, with taps that are outputs; edited.
    """
    gm.meta.setdefault(WAITS, ())
    if any("stream" in str(node.target).lower() for node in gm.graph.nodes):
        return PassResult(gm, False)
    output = gm.graph.output_node()
    modified = False
    for node in list(gm.graph.nodes):
        blocks = node.target == "to" and "non_blocking" not in node.kwargs
        if TAP not in node.meta or not blocks or list(node.users) != [output]:
            continue
        source = node.args[0]
        example = source.meta.get("example_value")
        device = node.kwargs.get("device")
        if not isinstance(example, torch.Tensor) or example.device.type != "cuda":
            continue
        if device is None or device.type != "cpu":
            continue
        _queue(node, source, example)
        if example.device not in gm.meta[WAITS]:
            gm.meta[WAITS] = (*gm.meta[WAITS], example.device)
        modified = True
    return PassResult(gm, modified)


def _queue(node: fx.Node, source: fx.Node, value: torch.Tensor) -> None:
    """Make a tap's conversion one on the device, and a copy that does not block."""
    graph, kwargs = node.graph, dict(node.kwargs)
    dtype = kwargs.pop("dtype", None)
    steps: list[tuple[str, dict[str, Any]]] = [("contiguous", {})]
    if dtype is not None:
        steps.insert(0, ("to", {"dtype": dtype}))
    with graph.inserting_before(node):
        for method, options in steps:
            value = getattr(value, method)(**options)
            source = graph.call_method(method, (source,), options)
            source.meta = {k: v for k, v in node.meta.items() if k != TAP}
            source.meta["example_value"] = value
    node.args = (source,)
    node.kwargs = {**kwargs, "non_blocking": True}
