"""What every pass shares: its result, copying, and walking into sub-graphs.

Terms
    pass: a function ``(gm, ...) -> PassResult``.  The pipeline copies the graph once at
        entry with :func:`copy_graph_module`; a pass edits that copy only.
    body: the graph module that a higher-order operator runs, such as an activation
        checkpoint's.
    tap: a node that holds a captured tensor; ``node.meta[TAP]`` says which.

Invariants
    ``modified`` is truthful.  Node metadata is shared with the original graph's (it
    holds fake tensors, which must not be copied), the dictionaries are not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import final

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.plan.plan import Leaf
from fxcapture.trace.mark import MARK, emit_mark

__all__ = [
    "MADE",
    "TAP",
    "PassResult",
    "TapKey",
    "bodies",
    "copy_graph_module",
    "is_mark",
    "operator_name",
    "walk",
]

#: Metadata key of a node of this package's own, which goes if nothing uses it.
MADE = "fxcapture_made"
#: Metadata key of a tap node; the value is a :class:`TapKey`.
TAP = "fxcapture_tap"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TapKey:
    """Which tensor (or integer) of which site a tap holds.

    Attributes:
        site: Index into the graph's sites.
        leaf: The tensor; ``None`` for an integer leaf.
        size: (kind of mark, index) of an integer leaf; ``None`` for a tensor.
        ran: It is no value, but whether the site's branch ran.
    """

    site: int
    leaf: Leaf | None = None
    size: tuple[str, int] | None = None
    ran: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True)
class PassResult:
    """A pass's graph module and whether the pass changed it."""

    graph_module: fx.GraphModule
    modified: bool


def is_mark(node: fx.Node) -> bool:
    """Whether a node is a mark."""
    return node.op == "call_function" and node.target in _MARKS


_MARKS = (MARK, torch.ops.fxcapture.mark, emit_mark)


def bodies(gm: fx.GraphModule, node: fx.Node) -> Iterator[tuple[str, fx.GraphModule]]:
    """Name and module of each body that a node runs, in argument order."""
    if not _torch.is_higher_order(node):
        return
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            body = getattr(gm, str(arg.target), None)
            if isinstance(body, fx.GraphModule):
                yield str(arg.target), body


def walk(
    gm: fx.GraphModule, region: tuple[str, ...] = ()
) -> Iterator[tuple[fx.GraphModule, fx.Node, tuple[str, ...]]]:
    """Every node in execution order, those of bodies where their operator stands.

    Yields:
        (owner of the node, the node, names of the operators around it).
    """
    for node in gm.graph.nodes:
        for _, body in bodies(gm, node):
            yield from walk(body, (*region, operator_name(node)))
        yield gm, node, region


def operator_name(node: fx.Node) -> str:
    """Name of a higher-order operator, such as ``tag_activation_checkpoint``."""
    target = node.target
    return str(target.name()) if hasattr(target, "name") else str(target)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with its own graph (and bodies), sharing everything else.

    Parameters, buffers and metadata values are shared with ``gm``.
    """
    # Graph.__deepcopy__ copies the metadata dictionaries one level deep; a deep copy of
    # the module itself would copy fake tensors, which takes seconds.
    made = _torch.graph_module_like(gm, copy.deepcopy(gm.graph))
    for name, value in gm.__dict__.items():
        if name not in made.__dict__:
            made.__dict__[name] = value
    for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=True):
        _torch.copy_node_source(old, new)
        # The copy avoids names of builtins; a signature may mention the node's name.
        new.name = old.name
    made.meta = dict(gm.meta)
    copied: set[str] = set()
    for node in list(made.graph.nodes):
        for name, body in list(bodies(gm, node)):
            if name not in copied:
                copied.add(name)
                setattr(made, name, copy_graph_module(body))
            elif any(is_mark(n) for _, n, _ in walk(body)):
                _own_body(made, node, name, copy_graph_module(body))
    return made


def _own_body(
    gm: fx.GraphModule, node: fx.Node, name: str, body: fx.GraphModule
) -> None:
    """Give a node a body of its own in place of one that it shares with another.

    Each of the two calls has sites of its own, so their bodies cannot stay the same.
    """
    number = 0
    while hasattr(gm, f"{name}_{number}"):
        number += 1
    own = f"{name}_{number}"
    setattr(gm, own, body)
    with gm.graph.inserting_before(node):
        source = gm.graph.get_attr(own)
    shared = next(
        a for a in node.all_input_nodes if a.op == "get_attr" and a.target == name
    )
    source.meta = dict(shared.meta)
    node.replace_input_with(shared, source)
    # invoke_subgraph names its body in a second argument, by which it is cached.
    node.args = tuple(f"{a}_{own}" if isinstance(a, str) else a for a in node.args)
