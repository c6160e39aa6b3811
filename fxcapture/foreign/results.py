"""What an inlined call returned, as far as the operations that it left determine it.

Terms
    span: the operations of one call.

Invariants
    Right, or an ``AmbiguousSiteError``: a value is the result only if it is the one
    that leaves the span, and the module surely returns one tensor.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from fxcapture import _torch
from fxcapture.foreign.classes import declares_tensor, is_of_torch
from fxcapture.foreign.reader import REMEDY, Call, ForeignGraph, example

__all__ = ["all_of_torch", "returned", "span_of"]


def returned(graph: ForeignGraph, call: Call, *, assume_tensor: bool) -> fx.Node:
    """The node that holds what an inlined call returned, which is one tensor.

    Args:
        graph: The graph that shows the call.
        call: A call without a ``call_module`` node.
        assume_tensor: The user vouches that the module returns one tensor.

    Raises:
        AmbiguousSiteError: the graph does not determine it.
    """
    nodes = span_of(graph, call)
    _check_state(graph, call.path)
    if not assume_tensor and not _returns_one_tensor(graph, call.path):
        name = graph.names.get(call.path, "its class")
        raise graph.ambiguous(
            call.path,
            f"it was inlined, and whether {name} returns one tensor or a container "
            "cannot be read from the graph",
            "declare the return type of its forward as torch.Tensor, or pass "
            "assume_tensors=True if that is what it returns; otherwise " + REMEDY,
        )
    inside = set(nodes)
    users = graph.users
    leaving = [n for n in nodes if any(u not in inside for u in users[n])]
    unused = [n for n in nodes if not users[n] and not _acts(n)]
    if len(nodes) == 1 and not leaving:
        leaving, unused = unused, []
    if len(leaving) != 1 or unused:
        names = ", ".join(repr(n.name) for n in [*leaving, *unused][:5])
        raise graph.ambiguous(
            call.path,
            f"{len(leaving)} of its values are used outside of it and "
            f"{len(unused)} nowhere ({names or 'none'}), so that the graph does "
            "not say which one it returned",
        )
    return leaving[0]


def span_of(graph: ForeignGraph, call: Call) -> list[fx.Node]:
    """The operations of an inlined call.

    Raises:
        AmbiguousSiteError: they do not stand together, or some of them stand in a
            sub-graph.
    """
    nodes = graph.spans[call.key, call.path]
    if call.path in graph.inner:
        raise graph.ambiguous(call.path, "part of it stands in a sub-graph")
    inside = set(nodes)
    for node in graph.nodes[graph.index[nodes[0]] : graph.index[nodes[-1]]]:
        if node not in inside and node.op not in ("get_attr", "placeholder"):
            raise graph.ambiguous(
                call.path,
                f"its operations are interrupted by {node.name!r}, so that the "
                "graph does not show where one call ends",
            )
    return nodes


def all_of_torch(graph: ForeignGraph, path: str) -> bool:
    """Whether a module and all that it called are modules of torch's own."""
    called = [p for p in (path, *graph.children(path)) if p in graph.calls]
    return all(is_of_torch(graph.classes.get(p)) for p in called)


def _returns_one_tensor(graph: ForeignGraph, path: str) -> bool:
    """Whether each call of a module surely returned one tensor.

    Its class declares so.  Two kinds of torch's own declare nothing: a container
    returns what its last module does, and a max pooling what one function does, which
    depends on its settings.
    """
    cls = graph.classes.get(path)
    if cls is nn.Sequential:
        last = _last_child(graph, path)
        return bool(last) and _returns_one_tensor(graph, last)
    if cls is not None and cls.__module__ == nn.MaxPool2d.__module__:
        leaf = graph.leaves.get(path)
        if leaf is not None:
            return not getattr(leaf, "return_indices", False)
        return declares_tensor(cls) or all(map(_is_one_tensor, graph.calls[path]))
    return declares_tensor(cls)


def _last_child(graph: ForeignGraph, path: str) -> str:
    """The last module of a container; empty unless the graph shows a call of each."""
    names = [p[len(path) + 1 :] for p in graph.children(path)]
    numbers = sorted(int(name) for name in names if name.isdigit())
    found = [f"{path}.{number}" for number in numbers]
    if numbers != list(range(len(found))) or any(p not in graph.calls for p in found):
        return ""
    return found[-1] if found else ""


def _is_one_tensor(call: Call) -> bool:
    """Whether a call left one operation, and this gave one tensor."""
    return call.first is call.last and isinstance(example(call.last), torch.Tensor)


def _check_state(graph: ForeignGraph, path: str) -> None:
    """Refuse where there may be calls that the graph does not show.

    Those of a module with parameters would read them.
    """
    found = {n: t for n, t in graph.state.items() if t.startswith(f"{path}.")}
    if graph.untold and not found:
        raise graph.ambiguous(
            path,
            f"the operations of {graph.untold!r} do not say which module they are "
            "of, so that there may be a call more",
        )
    for node, target in found.items():
        for user in graph.users[node]:
            if all(p != path for _, p, _ in graph.stack(user)):
                raise graph.ambiguous(
                    path,
                    f"{target!r} is read outside of the calls that the graph "
                    "shows, so that there may be a call more",
                )


def _acts(node: fx.Node) -> bool:
    """Whether an unused node is there for what it does and not for its value."""
    if node.is_impure():
        return True
    name = node.target if isinstance(node.target, str) else ""
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        return True
    schemas = _torch.schemas_of(node.target)
    if len(schemas) == 1:
        return not schemas[0].returns or bool(schemas[0].is_mutable)
    value = example(node)
    return value is not None and not isinstance(value, torch.Tensor)
