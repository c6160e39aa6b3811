"""Put a tap at the mark of every wanted value.

At the mark's position the value is what the caller of the module received.  Where
a later write could show in it, the tap copies it there (an ordinary ``clone``); where
nothing can, see :mod:`fxcapture.passes.analyses.aliases`, the tap is the value itself.
Each tap's ``meta[COPY]`` says which and why; ``gm.meta[COPIES]`` says it of all.

Not idempotent: each run adds taps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.passes.analyses.aliases import Aliases
from fxcapture.passes.analyses.collect_marks import GraphCall, MarkedSites, graph_calls
from fxcapture.passes.base import TAP, PassResult, TapKey
from fxcapture.passes.compute_weights import WeightsWanted, compute_weights
from fxcapture.plan.plan import Leaf, precedes_hooks, treatment
from fxcapture.trace.mark import RESULT

__all__ = ["COPIES", "COPY", "insert_taps"]

#: Metadata key of a tap's node: whether the value was copied, and why.
COPY = "fxcapture_copy"
#: Metadata key of the graph module: that text, for each :class:`TapKey`.
COPIES = "fxcapture_copies"


def insert_taps(
    gm: fx.GraphModule,
    marked: MarkedSites,
    wanted: Mapping[int, Mapping[Leaf, None]],
    wanted_sizes: Mapping[int, Mapping[tuple[str, int], None]],
    attention: Mapping[str, WeightsWanted] | None = None,
) -> PassResult:
    """Add a tap node for each wanted leaf, right before the mark that holds it.

    Args:
        gm: A marked graph; edited.
        marked: Its sites.
        wanted: Site index to tensor leaves.
        wanted_sizes: Site index to integer leaves; constants need no tap.
        attention: Record name to the attention weights it wants.
    """
    calls = graph_calls(gm)
    leaves: dict[int, dict[Leaf, int]] = {}
    sizes: dict[int, dict[tuple[str, int], int]] = {}
    for site, (inner, outer) in enumerate(marked.calls):
        for leaf in wanted.get(site, ()):
            at = inner if leaf.precedes_hooks else outer
            leaves.setdefault(at, {})[leaf] = site
        for size in wanted_sizes.get(site, ()):
            at = inner if precedes_hooks(size[0]) else outer
            sizes.setdefault(at, {})[size] = site
    made = compute_weights(gm, calls, leaves, attention or {})
    aliases = Aliases(gm)
    copies: dict[TapKey, str] = dict(gm.meta.get(COPIES, {}))
    modified = False
    for position, call in enumerate(calls):
        for leaf, site in leaves.get(position, {}).items():
            key = TapKey(site, leaf=leaf)
            computed = made.get((position, leaf.kind))
            if computed is not None:
                source, behind = computed.node, computed.node.next
            else:
                source, behind = _source(call, leaf), call.nodes[leaf.kind]
            what = marked.sites[site].describe()
            with behind.graph.inserting_before(behind):
                # What a function receives was copied by nobody but the model.
                ours = marked.sites[site].index is None
                copies[key] = _tap_tensor(behind, source, key, aliases, what, ours)
            modified = True
        for size, site in sizes.get(position, {}).items():
            mark = call.nodes[size[0]]
            with mark.graph.inserting_before(mark):
                modified |= _tap_size(call, TapKey(site, size=size))
    gm.meta[COPIES] = copies
    return PassResult(gm, modified)


def _source(call: GraphCall, leaf: Leaf) -> fx.Node:
    return call.marks.marks[leaf.kind].tensors[leaf.index]  # type: ignore[no-any-return]


def _tap_tensor(
    at: fx.Node,
    source: fx.Node,
    key: TapKey,
    aliases: Aliases,
    what: str,
    ours: bool,
) -> str:
    """Add one tap; returns whether it copies, and why."""
    leaf = key.leaf
    assert leaf is not None
    example = source.meta.get("val", source.meta.get("example_value"))
    floating = example is None or example.is_floating_point()
    steps: Sequence[tuple[str, dict[str, Any]]]
    steps = treatment(leaf.detach, leaf.dtype, leaf.device, floating)
    converts = steps[-1:] and steps[-1][0] == "to" and _converts(example, leaf)
    if not converts:
        steps = [step for step in steps if step[0] != "to"]
    copied_before = ours and _is_copy(source, leaf) and TAP not in source.meta
    if converts:
        reason = "converted"
    elif copied_before:
        reason = _reason(aliases, source.args[0], source, what)  # type: ignore[arg-type]
        if not reason:
            source = source.args[0]  # type: ignore[assignment]
    else:
        reason = _reason(aliases, source, at, what)
        if not reason and TAP in source.meta:
            reason = "recorded twice"
    value = source
    for method, options in steps:
        value = _call(at, value, method, options)
    if reason and not converts and not copied_before:
        value = _call(at, value, "clone", {})
    value.meta[TAP] = key
    value.meta[COPY] = (
        f"copied: {reason}" if reason else "no copy: nothing writes to it"
    )
    return str(value.meta[COPY])


def _reason(aliases: Aliases, source: fx.Node, at: fx.Node, what: str) -> str:
    """Why a value has to be copied at a node; empty if it need not be.

    The fake tensors of an exported graph do not tell what shares memory: export makes
    them anew (``dropout`` of an evaluated model does not look like its argument there),
    and a program that was loaded has none of the model's.
    """
    if _is_aten(source):
        return "an exported graph does not tell what shares memory"
    return aliases.reason_to_copy(source, at, what)


def _is_copy(source: fx.Node, leaf: Leaf) -> bool:
    """Whether the value is what the scope copied when the module was entered."""
    return leaf.kind != RESULT and source.target in ("clone", _ATEN["clone"])


def _converts(example: Any, leaf: Leaf) -> bool:
    """Whether dtype or device makes a tensor of its own, so that it is a copy."""
    if example is None:
        return False
    converted = (
        leaf.dtype is not None
        and example.is_floating_point()
        and example.dtype != leaf.dtype
    )
    moved = leaf.device is not None and example.device != leaf.device
    return converted or moved


# What the methods are in a graph of ATen operators, as torch.export makes them. ``to``
# stands there only where it converts, and so always copies.
_ATEN = {
    "clone": torch.ops.aten.clone.default,
    "detach": torch.ops.aten.detach.default,
    "to": torch.ops.aten._to_copy.default,
}


def _is_aten(node: fx.Node) -> bool:
    """Whether a node stands in a graph of ATen operators: its value is its ``val``."""
    return "val" in node.meta


def _call(
    at: fx.Node, source: fx.Node, method: str, options: dict[str, Any]
) -> fx.Node:
    graph = at.graph
    if _is_aten(source):
        node = graph.call_function(_ATEN[method], (source,), options)
    else:
        node = graph.call_method(method, (source,), options)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in at.meta:
            node.meta[key] = at.meta[key]
    for key in ("example_value", "val"):
        example = source.meta.get(key)
        if isinstance(example, torch.Tensor) and not _torch.is_transformed(example):
            node.meta[key] = getattr(example, method)(**options)
    return node


def _tap_size(call: GraphCall, key: TapKey) -> bool:
    assert key.size is not None
    kind, index = key.size
    source = call.marks.marks[kind].sizes[index]
    if not isinstance(source, fx.Node):
        return False
    node = source.graph.call_function(operator.mul, (source, 1))
    node.meta = {k: v for k, v in source.meta.items() if k != TAP}
    node.meta[TAP] = key
    return True
