"""End the graph at the last operation that its outputs need.

Used where the caller wants the records alone.  What stands behind the last needed node
goes, also if it writes to something: a program that ends early does not run it.  Before
it, what writes to a tensor or draws random numbers stays, since a later needed value
may depend on it; everything else that no output needs goes.

Idempotent.
"""

from __future__ import annotations

from torch import fx

from fxcapture import _torch
from fxcapture.passes.analyses.effects import (
    asks_inplace,
    is_opaque,
    node_name,
    written_args,
)
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


def prune_unneeded(gm: fx.GraphModule) -> PassResult:
    """Drop every node that no output needs."""
    nodes = list(gm.graph.nodes)
    output = gm.graph.output_node()
    needed: set[fx.Node] = {output}
    _add_inputs(output, needed)
    last = max(
        (i for i, n in enumerate(nodes) if n in needed and n is not output), default=-1
    )
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
    if _torch.is_higher_order(node):
        inner = [n for _, body in bodies(gm, node) for n in body.graph.nodes]
        return any(_has_effect(gm, n) for n in inner) or not inner
    name = node_name(node)
    if name in _RANDOM or node.is_impure() or is_opaque(node) or asks_inplace(node):
        return True
    schemas = _torch.schemas_of(node.target)
    if schemas:
        return any(schema.is_mutable or not schema.returns for schema in schemas)
    if name.startswith("_") and not name.startswith("__"):
        # _enter_autocast, _set_grad_enabled and their kind hold for what follows.
        return getattr(node.target, "__module__", "") != "_operator"
    return bool(written_args(gm, node))
