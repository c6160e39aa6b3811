"""Put a tap at the mark of every wanted value.

At the mark's position the value is what the caller of the module received.  Where
a later write could show in it, the tap copies it there (an ordinary ``clone``); where
nothing can, see :mod:`fxcapture.passes.analyses.aliases`, the tap is the value itself.
Each tap's ``meta[COPY]`` says which and why; ``gm.meta[COPIES]`` says it of all.

Not idempotent: each run adds taps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.passes.analyses.aliases import Aliases
from fxcapture.passes.analyses.collect_marks import MarkedSites, observation
from fxcapture.passes.base import TAP, PassResult, TapKey, is_mark, walk
from fxcapture.plan.plan import Leaf

__all__ = ["COPIES", "COPY", "insert_taps"]

#: Metadata key of a tap's node: whether the value was copied, and why.
COPY = "fxcapture_copy"
#: Metadata key of the graph module: the same text for each :class:`TapKey`.
COPIES = "fxcapture_copies"


def insert_taps(
    gm: fx.GraphModule,
    marked: MarkedSites,
    wanted: Mapping[int, Mapping[Leaf, None]],
    wanted_sizes: Mapping[int, Mapping[tuple[bool, int], None]],
) -> PassResult:
    """Add a tap node for each wanted leaf, right before the mark that holds it.

    Args:
        gm: A marked graph; edited.
        marked: Its sites.
        wanted: Site index to tensor leaves.
        wanted_sizes: Site index to integer leaves; constants need no tap.
    """
    by_mark: dict[int, list[tuple[int, bool]]] = {}
    for site, (inner, outer) in enumerate(marked.marks):
        by_mark.setdefault(outer, []).append((site, False))
        by_mark.setdefault(inner, []).append((site, True))
    marks = [(owner, node) for owner, node, _ in walk(gm) if is_mark(node)]
    aliases = Aliases(gm)
    copies: dict[TapKey, str] = dict(gm.meta.get(COPIES, {}))
    modified = False
    for position, (owner, node) in enumerate(marks):
        seen = observation(node)
        with owner.graph.inserting_before(node):
            for site, entry in by_mark.get(position, ()):
                for leaf in wanted.get(site, ()):
                    if leaf.entry is entry:
                        key = TapKey(site, leaf=leaf)
                        what = marked.sites[site].describe()
                        copies[key] = _tap_tensor(node, seen, key, aliases, what)
                        modified = True
                for size in wanted_sizes.get(site, ()):
                    if size[0] is entry:
                        modified |= _tap_size(node, seen, TapKey(site, size=size))
    gm.meta[COPIES] = copies
    return PassResult(gm, modified)


def _tap_tensor(
    mark: fx.Node, seen: Any, key: TapKey, aliases: Aliases, what: str
) -> str:
    """Add one tap; returns whether it copies, and why."""
    leaf = key.leaf
    assert leaf is not None
    source = (seen.result if leaf.kind == "result" else seen.derived)[leaf.index]
    graph = mark.graph
    example = source.meta.get("val", source.meta.get("example_value"))
    options: dict[str, Any] = {}
    if leaf.dtype is not None and (example is None or example.is_floating_point()):
        options["dtype"] = leaf.dtype
    if leaf.device is not None:
        options["device"] = leaf.device
    converts = bool(options) and _converts(example, leaf)
    copied_before = _is_copy(source, leaf) and TAP not in source.meta
    if converts:
        reason = "converted"
    elif copied_before:
        reason = _reason(aliases, source.args[0], source, what)  # type: ignore[arg-type]
        if not reason:
            source = source.args[0]  # type: ignore[assignment]
    else:
        reason = _reason(aliases, source, mark, what)
        if not reason and TAP in source.meta:
            reason = "recorded twice"
    value = source
    if leaf.detach:
        value = _call(graph, mark, value, "detach", {}, lambda t: t.detach())
    if converts:
        value = _call(graph, mark, value, "to", options, lambda t: t.to(**options))
    elif reason and not copied_before:
        value = _call(graph, mark, value, "clone", {}, lambda t: t.clone())
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
    return leaf.kind == "derived" and source.target in ("clone", _ATEN["clone"])


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
    graph: fx.Graph,
    mark: fx.Node,
    source: fx.Node,
    method: str,
    kwargs: dict[str, Any],
    run: Callable[[torch.Tensor], torch.Tensor],
) -> fx.Node:
    if _is_aten(source):
        node = graph.call_function(_ATEN[method], (source,), kwargs)
    else:
        node = graph.call_method(method, (source,), kwargs)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in mark.meta:
            node.meta[key] = mark.meta[key]
    for key in ("example_value", "val"):
        example = source.meta.get(key)
        if isinstance(example, torch.Tensor) and not _torch.is_transformed(example):
            node.meta[key] = run(example)
    return node


def _tap_size(mark: fx.Node, seen: Any, key: TapKey) -> bool:
    assert key.size is not None
    entry, index = key.size
    source = (seen.entry_sizes if entry else seen.sizes)[index]
    if not isinstance(source, fx.Node):
        return False
    graph = mark.graph
    node = graph.call_function(operator.mul, (source, 1))
    node.meta = {k: v for k, v in source.meta.items() if k != TAP}
    node.meta[TAP] = key
    return True
