"""What a node does besides computing its result.

Terms
    write: a change of the memory of an argument.
    opaque: a call of which nothing is known; it may write to any tensor it is given.

Invariants
    What is unknown counts as having the effect.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fxcapture import _torch
from fxcapture.passes.base import bodies, is_mark

__all__ = ["allocates", "asks_inplace", "is_opaque", "node_name", "written_args"]

# Functions and methods whose result is always a tensor of its own, never (part of) an
# argument.  Not here: what returns its argument under some condition (``dropout``,
# ``to``, ``float``, ``contiguous``, ``reshape``, ``expand``, ``interpolate``, ...).
_ALLOCATES = frozenset(
    {
        "abs", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "add", "addmm", "argmax",
        "attention_weights_of", "avg_pool1d", "avg_pool2d", "baddbmm", "batch_norm",
        "bmm", "cat", "clone", "concat", "conv1d", "conv2d", "conv3d",
        "conv_transpose1d", "conv_transpose2d", "cos", "cumsum", "div", "embedding",
        "empty_like", "eq", "erf", "exp", "ge", "gelu", "group_norm", "gt",
        "instance_norm", "layer_norm", "le", "leaky_relu", "linear", "log",
        "log_softmax", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
        "matmul", "max_pool1d", "max_pool2d", "mean", "mul",
        "multi_head_attention_forward", "mv", "ne", "neg", "ones_like", "pow", "prod",
        "randn_like", "reciprocal", "relu", "relu6", "rms_norm", "rsqrt",
        "scaled_dot_product_attention", "sigmoid", "silu", "sin", "softmax", "softplus",
        "sqrt", "stack", "std", "sub", "sum", "tanh", "topk", "tril", "triu", "truediv",
        "var", "where", "zeros_like",
    }
)  # fmt: skip

# Functions that write to arguments although their names do not say so, and which.
_WRITES = {
    "batch_norm": slice(1, 3),
    "instance_norm": slice(1, 3),
    "setitem": slice(0, 1),
    "embedding_renorm_": slice(0, 1),
    "__setitem__": slice(0, 1),
}
# Names of ``operator`` that begin with an i and write to nothing.
_PURE_OPERATORS = frozenset(
    {"index", "indexOf", "invert", "inv", "is_", "is_not", "itemgetter"}
)


def written_args(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments whose memory a node may write to.

    Args:
        gm: The graph module that holds the node and its bodies.
        node: Any node.
    """
    if node.op in ("placeholder", "get_attr", "output") or is_mark(node):
        return ()
    if node.op == "call_module":
        return tuple(node.all_input_nodes)
    if _torch.is_higher_order(node):
        return _written_by_bodies(gm, node)
    name = node_name(node)
    target: Any = node.target
    found: list[Any] = [node.kwargs.get("out")]
    schemas = _torch.schemas_of(target)
    if schemas:
        found += _written_by_schema(schemas, node)
    elif name in _WRITES:
        found += node.args[_WRITES[name]]
        found += [node.kwargs.get(k) for k in ("running_mean", "running_var")]
    elif node.op == "call_function" and _is_operator(target):
        if name.startswith("i") and name not in _PURE_OPERATORS:
            found += node.args[:1]
    elif is_opaque(node):
        found += node.all_input_nodes
    elif (name.endswith("_") and not name.endswith("__")) or asks_inplace(node):
        found += node.args[:1] or node.kwargs.values()
    elif name.startswith("__i") and name != "__invert__":
        found += node.args[:1]
    elif node.kwargs.get("max_norm") is not None or name == "embedding":
        # F.embedding renormalises rows of the weight when it is given a max_norm.
        found += node.args[1:2] if _max_norm(node) else []
    return tuple(_nodes(found))


def allocates(node: fx.Node) -> bool:
    """Whether a call's results are certainly tensors of their own.

    A custom operator may not return an argument that its schema does not say it returns
    (torch.library checks that); ATen's own schemas do not say it of all that do.
    """
    schemas = _torch.schemas_of(node.target)
    if any(schema.name.split("::")[0] not in ("aten", "prims") for schema in schemas):
        return not any(r.alias_info for schema in schemas for r in schema.returns)
    return node_name(node) in _ALLOCATES


def is_opaque(node: fx.Node) -> bool:
    """Whether nothing is known of the function that a node calls."""
    target: Any = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, types.FunctionType):
        # What this package adds to a graph computes and does nothing else.
        pure = ("torch.", "math", "fxcapture.")
        return not (target.__module__ or "").startswith(pure)
    if isinstance(target, types.BuiltinFunctionType):
        return False  # torch's own functions, math, operator, getattr
    return not isinstance(target, (types.MethodDescriptorType, type, types.MethodType,
                                   types.WrapperDescriptorType)) and not getattr(
        target, "__module__", ""
    ).startswith("torch")  # fmt: skip


def asks_inplace(node: fx.Node) -> bool:
    """Whether ``inplace`` was given, by keyword or by place (``F.relu(x, True)``)."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if node.op != "call_function" or not callable(node.target):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without a signature takes no such flag
        return False
    return bool(bound.arguments.get("inplace"))


def node_name(node: fx.Node) -> str:
    """The name of what a node calls."""
    target: Any = node.target
    return (
        target if isinstance(target, str) else getattr(target, "__name__", str(target))
    )


def _is_operator(target: Any) -> bool:
    return getattr(target, "__module__", "") == "_operator"


def _max_norm(node: fx.Node) -> bool:
    return (len(node.args) > 3 and node.args[3] is not None) or bool(
        node.kwargs.get("max_norm")
    )


def _written_by_schema(schemas: Sequence[Any], node: fx.Node) -> list[Any]:
    if len(schemas) > 1:
        mutable = any(schema.is_mutable for schema in schemas)
        return list(node.all_input_nodes) if mutable else []
    found: list[Any] = []
    for i, argument in enumerate(schemas[0].arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(
                node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            )
    return found


def _written_by_bodies(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, ...]:
    found = dict(bodies(gm, node))
    pure = found and not any(
        written_args(body, inner)
        for body in found.values()
        for inner in body.graph.nodes
    )
    if pure:
        return ()
    return tuple(
        n for n in node.all_input_nodes if n.op != "get_attr" or n.target not in found
    )


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _nodes(value)
        elif isinstance(value, dict):
            found += _nodes(value.values())
    return found
