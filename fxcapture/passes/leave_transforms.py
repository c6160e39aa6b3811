"""Bring taps out of the function transforms that a graph runs.

Between ``_vmap_increment_nesting`` and its decrement a value is one of a batch, between
those of ``grad``, ``vjp`` and ``jvp`` it is wrapped for that level; outside of it
neither can be used.  The pass unwraps each tap where it stands, level by level, as the
transform does with its own results.  A value under ``vmap`` comes out with the batch as
its first dimension.

Idempotent: a tap that has been unwrapped is not wrapped any more.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import fx

from fxcapture import _torch
from fxcapture.passes.base import TAP, PassResult

__all__ = ["leave_transforms"]


class _Level(NamedTuple):
    kind: str
    number: int
    batch_size: object


def leave_transforms(gm: fx.GraphModule) -> PassResult:
    """Unwrap every tap of the outermost graph that stands inside a transform."""
    levels: list[_Level] = []
    modified = False
    for node in list(gm.graph.nodes):
        name = (
            getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        )
        if name.endswith("_increment_nesting"):
            kind = name.removesuffix("_increment_nesting").strip("_")
            size = node.args[0] if node.args else None
            levels.append(_Level(kind, len(levels) + 1, size))
        elif name.endswith("_decrement_nesting"):
            levels.pop()
        elif levels and TAP in node.meta:
            _unwrap(node, levels)
            modified = True
    return PassResult(gm, modified)


def _unwrap(tap: fx.Node, levels: list[_Level]) -> None:
    key = tap.meta.pop(TAP)
    value = tap
    for level in reversed(levels):
        if level.kind == "vmap":
            args = (value, level.number, level.batch_size, 0)
            value = _after(value, _torch.transform_function("_remove_batch_dim"), args)
            continue
        if level.kind == "jvp":
            unpack = _torch.transform_function("_unpack_dual")
            value = _after(value, unpack, (value,), level=0)
            value = _after(value, operator.getitem, (value, 0))
        unwrap = _torch.transform_function("_unwrap_for_grad")
        value = _after(value, unwrap, (value, level.number))
    value.meta[TAP] = key


def _after(
    node: fx.Node, target: object, args: tuple[object, ...], **kwargs: object
) -> fx.Node:
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    for name in ("nn_module_stack", "stack_trace"):
        if name in node.meta:
            made.meta[name] = node.meta[name]
    return made
