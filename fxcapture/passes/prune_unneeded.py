"""End the graph at the last operation that its outputs need.

Used where the caller wants the records alone.  What stands behind the last needed node
goes, also if it writes to something: a program that ends early does not run it.  Before
it, what writes to a tensor or draws random numbers stays, since a later needed value
may depend on it; everything else that no output needs goes.

Idempotent.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from fxcapture import _compat
from fxcapture.passes.base import PassResult, bodies, is_mark

__all__ = ["prune_unneeded"]

# Functions that draw random numbers whenever they run in training mode (or always).
# Dropping one would shift the random stream of those behind it.
_RANDOM = frozenset(
    {
        "alpha_dropout", "bernoulli", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "exponential_", "feature_alpha_dropout", "gumbel_softmax", "multinomial",
        "multi_head_attention_forward", "normal", "poisson", "rand", "rand_like",
        "randint", "randint_like", "randn", "randn_like", "randperm", "rrelu",
        "scaled_dot_product_attention",
    }
)  # fmt: skip
# Functions that write to an argument although their name does not say so.
_WRITES = frozenset({"batch_norm", "instance_norm", "setitem"})


def prune_unneeded(gm: fx.GraphModule) -> PassResult:
    """Drop every node that no output needs."""
    nodes = list(gm.graph.nodes)
    output = gm.graph.output_node()
    needed: set[fx.Node] = {output}
    _add_inputs(output, needed)
    last = max((i for i, n in enumerate(nodes) if n in needed and n is not output),
               default=-1)
    for node in nodes[: last + 1]:
        if node not in needed and _has_effect(gm, node):
            needed.add(node)
            _add_inputs(node, needed)
    modified = False
    for node in reversed(nodes):
        if node not in needed and node.op != "placeholder":
            gm.graph.erase_node(node)
            modified = True
    return PassResult(gm, modified)


def _add_inputs(node: fx.Node, needed: set[fx.Node]) -> None:
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in needed:
            needed.add(source)
            stack.extend(source.all_input_nodes)


def _has_effect(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or is_mark(node):
        return False
    if node.op == "call_module":
        return True
    if _compat.is_higher_order(node):
        inner = [n for _, body in bodies(gm, node) for n in body.graph.nodes]
        return any(_has_effect(gm, n) for n in inner) or not inner
    name = _name(node)
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if name in _RANDOM or name in _WRITES:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        return schema.is_mutable or not schema.returns or node.is_impure()
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return name.startswith("i") and name not in (
            "index", "indexOf", "invert", "inv", "is_", "is_not", "itemgetter"
        )  # fmt: skip
    if name.startswith("_") or node.is_impure():
        # _enter_autocast, _set_grad_enabled and their kind open and close regions.
        return True
    return name.endswith("_") or _writes_positionally(node)


def _writes_positionally(node: fx.Node) -> bool:
    """Whether ``inplace`` was given by position, as in ``F.relu(x, True)``."""
    if node.op != "call_function" or not callable(node.target):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without a signature takes no such flag
        return False
    return bool(bound.arguments.get("inplace"))


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
