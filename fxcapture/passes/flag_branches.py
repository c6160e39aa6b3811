"""Tell at run time which branch of a conditional ran.

A site inside ``torch.cond`` has a value only if its branch ran.  The pass puts a flag,
a scalar 1.0, beside each such mark; lifted out of the branch, it is 0.0 where the other
branch ran.  It is a float because the backward of a conditional takes every output for
one that has a gradient.

Not idempotent: each run adds flags.
"""

from __future__ import annotations

import torch
from torch import fx

from fxcapture.passes.analyses.collect_marks import MarkedSites, graph_calls
from fxcapture.passes.base import TAP, PassResult, TapKey
from fxcapture.trace.mark import RESULT

__all__ = ["flag_branches"]


def flag_branches(gm: fx.GraphModule, marked: MarkedSites) -> PassResult:
    """Add a flag tap at the result's mark of every site inside a branch.

    Args:
        gm: A marked graph; edited.
        marked: Its sites.
    """
    site_of = {outer: site for site, (_, outer) in enumerate(marked.calls)}
    modified = False
    for position, call in enumerate(graph_calls(gm)):
        if "cond" in call.region and position in site_of:
            node = call.nodes[RESULT]
            with node.graph.inserting_before(node):
                flag = node.graph.call_function(torch.ones, ((),))
            flag.meta[TAP] = TapKey(site_of[position], ran=True)
            flag.meta["example_value"] = _example(node)
            modified = True
    return PassResult(gm, modified)


def _example(mark: fx.Node) -> torch.Tensor:
    """A fake flag, in the fake mode of the values around it if there is one."""
    for node in mark.all_input_nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            return value.new_ones((), dtype=torch.float32, device="cpu")
    return torch.ones((), device="meta")
