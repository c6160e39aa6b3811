"""Add a computation to a graph: one node, or the operations themselves.

In a graph of ATen operators it adds the operations, since such a graph has to run
without this package; elsewhere one node that calls a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.errors import UnreachableValueError, UnsupportedOutputError
from fxcapture.passes.analyses.function_calls import example_of
from fxcapture.passes.inline import inline

__all__ = ["compute", "example_of", "input_out_of_reach", "is_aten"]


def is_aten(node: fx.Node) -> bool:
    """Whether a node stands in a graph of ATen operators."""
    return "val" in node.meta


def compute(
    function: Callable[[Any], Any],
    values: Any,
    *,
    before: fx.Node,
    like: fx.Node,
    kind: str,
    what: str,
) -> fx.Node:
    """A node that holds what a function makes of some values.

    Args:
        function: A function of ``values`` with tensors in place of nodes.
        values: Nodes, and constants, in tuples.
        before: Where to add it.
        like: The call that it is computed for; says where in the model it stands.
        kind: The kind of mark that it is for.
        what: What the values are, for error messages.

    Raises:
        UnsupportedOutputError: the function made no tensor.
    """
    nodes: list[fx.Node] = []
    fx.map_arg(values, nodes.append)
    nodes = list(dict.fromkeys(nodes))
    keeps_more = False

    def computed(*tensors: Any) -> torch.Tensor:
        found = dict(zip(nodes, tensors, strict=True))
        made: torch.Tensor = function(fx.map_arg(values, found.__getitem__))
        # A view would keep all of the tensor alive that it looks at.
        return made.clone() if keeps_more else made

    computed.__name__ = function.__name__  # names the node
    graph = before.graph
    with graph.inserting_before(before):
        if is_aten(like):
            node: fx.Node = inline(graph, computed, *nodes)
        else:
            examples = [example_of(n) for n in nodes]
            with _torch.fake_mode_of_values(examples):
                example = computed(*examples)
            if not isinstance(example, torch.Tensor):
                raise UnsupportedOutputError(
                    f"{kind}: the reduction made {type(example).__name__} of {what}",
                    why="a reduction has to return a tensor",
                    remedy="return a tensor from it, or drop reduce=",
                )
            size = example.numel() * example.element_size()
            whole = example.untyped_storage().nbytes()
            keeps_more = not _torch.surely_equal(size, whole)
            node = graph.call_function(computed, tuple(nodes))
            node.meta["example_value"] = example
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta.setdefault(key, like.meta[key])
    return node


def input_out_of_reach(kind: str, source: str, call: str) -> UnreachableValueError:
    """The error for a reduction whose input stands outside of the call's body."""
    return UnreachableValueError(
        f"{kind}: the reduction needs the input {source!r} inside of a "
        "higher-order operator's body",
        why=f"the {call} stands in that body, and the input outside of it",
        remedy="record the "
        + ("weights" if call == "fused call" else "value")
        + " whole and reduce "
        + ("them" if call == "fused call" else "it")
        + " after the call",
    )
