"""Graphs of torch.fx: copying, naming, tracing, their generated code.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxcapture._torch.fakes import is_fake
from fxcapture._torch.pytrees import output_spec_with, unflatten

__all__ = [
    "copy_node_source",
    "extend_pytree_output",
    "fake_mode_of",
    "fake_mode_of_values",
    "graph_module_like",
    "has_pytree_output",
    "make_aten_graph",
    "own_pytree_output",
    "rename_node",
    "trace_on_fake",
]


def copy_node_source(old: fx.Node, new: fx.Node) -> None:
    """Carry over where Dynamo says that a placeholder comes from.

    AOTAutograd reads the attribute and insists on it; copying a graph leaves it behind.
    """
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]


def graph_module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module for another graph, which makes its code when ``gm`` does.

    A public ``GraphModule`` generates its code when it is made and after each edit,
    which takes longer than the edit; those that Dynamo makes, when somebody first needs
    it.  (torch 2.13.0 and 2.14.1)
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    cls = _LazyGraphModule if isinstance(gm, _LazyGraphModule) else fx.GraphModule
    return cls(gm, graph, class_name=type(gm).__name__)


def fake_mode_of_values(values: Sequence[Any]) -> Any:
    """The fake tensor mode that values were traced under, as a context."""
    # Not torch's own way to find it, which in a backend gives the compiler's mode.
    modes = (v.fake_mode for v in values if is_fake(v))
    return next(modes, contextlib.nullcontext())


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode that a Dynamo graph's placeholders were traced under."""
    values = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
    return torch._guards.detect_fake_mode([v for v in values if v is not None])


def rename_node(node: fx.Node, name: str) -> bool:
    """Give a node exactly this name, at the expense of another node that has it.

    Public torch offers no way: a graph appends a number to a name that is taken, but an
    exported program's output names have to be the ones in the manifest.

    Returns:
        Whether it worked; a placeholder's name is part of a signature and stays.
    """
    for other in node.graph.nodes:
        if other is not node and other.name == name:
            if other.op == "placeholder":
                return False
            other._rename(f"{name}_inner")
    node.name = name
    # Registers the name, so that a node made later does not get it again.
    node.graph._graph_namespace.create_name(name, None)
    return True


def has_pytree_output(graph: fx.Graph) -> bool:
    """Whether a graph's code packs its flat outputs into containers."""
    from torch.fx.graph import _PyTreeCodeGen

    return isinstance(graph._codegen, _PyTreeCodeGen) and (
        graph._codegen.pytree_info.out_spec is not None
    )


def own_pytree_output(graph: fx.Graph, flat: list[Any]) -> Any:
    """What such a graph returns, as containers of its flat outputs."""
    return unflatten(flat, graph._codegen.pytree_info.out_spec)  # type: ignore[attr-defined]


def extend_pytree_output(
    graph: fx.Graph, names: Sequence[str], keep_output: bool
) -> None:
    """Make such a graph return ``(own, {name: value})``."""
    info = graph._codegen.pytree_info  # type: ignore[attr-defined]
    own = info.out_spec if keep_output else None
    graph._codegen.pytree_info = info._replace(  # type: ignore[attr-defined]
        out_spec=output_spec_with(own, names)
    )


def trace_on_fake(
    function: Callable[..., Any], *values: torch.Tensor
) -> fx.GraphModule:
    """The ATen graph of ``function`` on fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_mode_of_values(values):
        return make_fx(function, pre_dispatch=True)(*values)


def make_aten_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """``function``, traced on fake tensors below autograd into ATen operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # "real": the inputs are fake already, and one fake mode is enough.
    return make_fx(function, tracing_mode="real")(*inputs)
