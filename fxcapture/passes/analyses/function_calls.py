"""The function calls that a graph shows, by the names that the code calls them by.

An analysis.  In a graph of Dynamo's each call is one node, and the node's target is
what the code calls.  A graph of ATen operators has been taken apart further: there
``torch_fn`` in a node's metadata says which call of the code it is a part of.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fxcapture.passes.base import MADE, is_mark
from fxcapture.spec.function import canonical_name, is_reflected
from fxcapture.trace.functions import holds_tensor, name_of

__all__ = ["FunctionCall", "aten_calls", "dynamo_calls", "example_of"]


class FunctionCall(NamedTuple):
    """One function call in a graph.

    Attributes:
        name: The function's name.
        first: The first node of the call.
        last: The last one.
        value: The node that holds what it returned; ``None`` if the graph does not
            determine it.
        called: What is called, for the names of its arguments; ``None`` if the
            arguments are not known.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    name: str
    first: fx.Node
    last: fx.Node
    value: fx.Node | None
    called: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def example_of(node: fx.Node) -> Any:
    """The value without data that a node stands for; ``None`` if it is not known."""
    return node.meta.get("val", node.meta.get("example_value"))


def dynamo_calls(gm: fx.GraphModule) -> dict[fx.Node, FunctionCall]:
    """The calls in a graph of Dynamo's, by their last node."""
    found = {}
    for node in gm.graph.nodes:
        name, called = _called(node)
        if name and holds_tensor(example_of(node)):
            found[node] = FunctionCall(
                name, node, node, node, called, node.args, node.kwargs
            )
    return found


def _called(node: fx.Node) -> tuple[str, Any]:
    """The name of the call that a node is, and what is called; empty for no call."""
    if node.op == "call_method":
        called = getattr(torch.Tensor, str(node.target), node.target)
        return canonical_name(str(node.target)), called
    if node.op != "call_function" or MADE in node.meta or is_mark(node):
        return "", None
    if node.target is operator.getitem and not _is_tensor(node.args[0]):
        return "", None  # an element of a tuple
    return name_of(node.target), node.target


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(example_of(value), torch.Tensor)


def aten_calls(gm: fx.GraphModule) -> dict[fx.Node, FunctionCall]:
    """The calls in a graph of ATen operators, by their last node."""
    parts: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and "torch_fn" in node.meta and not is_mark(node):
            parts.setdefault(node.meta["torch_fn"][0], []).append(node)
    found = {}
    for nodes in parts.values():
        written = str(nodes[0].meta["torch_fn"][1]).rpartition(".")[2]
        name = "" if written in ("__get__", "__set__") else canonical_name(written)
        values = [n for n in nodes if not _is_element(n)]
        if not name or not any(holds_tensor(example_of(n)) for n in values):
            continue
        within = set(nodes)
        if len(values) > 1:
            values = [n for n in values if any(u not in within for u in n.users)]
        value = values[0] if len(values) == 1 else None
        alone = sum(not _is_element(n) for n in nodes) == 1
        args: tuple[Any, ...] = value.args if value is not None and alone else ()
        if is_reflected(written) and len(args) > 1:
            args = (args[1], args[0], *args[2:])
        found[nodes[-1]] = FunctionCall(
            name,
            nodes[0],
            nodes[-1],
            value,
            value.target if value is not None and alone else None,
            args,
            value.kwargs if value is not None and alone else {},
        )
    return found


def _is_element(node: fx.Node) -> bool:
    return node.target is operator.getitem and not _is_tensor(node.args[0])
