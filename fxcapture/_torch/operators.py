"""Operators: their schemas, and what they cost.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = [
    "flop_formula",
    "is_higher_order",
    "operator_name_of",
    "schemas_of",
    "schemas_of_name",
]


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls an operator that takes sub-graphs."""
    return node.op == "call_function" and isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def schemas_of(target: Any) -> tuple[Any, ...]:
    """Schemas of an operator, one per overload; empty for anything else.

    The classes of operators and overloads have no public names.
    """
    if isinstance(target, torch._ops.OpOverload):
        return (target._schema,)
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        return tuple(getattr(target, name)._schema for name in names)
    return ()


def schemas_of_name(name: str) -> tuple[Any, ...]:
    """Schemas of torch's own operator of a name; empty if there is none."""
    return schemas_of(getattr(torch.ops.aten, name, None))


def operator_name_of(called: Any) -> str | None:
    """The name of an operator without its overload; ``None`` for anything else.

    Empty for operators that take sub-graphs, which no code calls by that name, but for
    ``flex_attention``.
    """
    if isinstance(called, torch._ops.OpOverload):
        return str(called.overloadpacket.__name__)
    if isinstance(called, torch._ops.HigherOrderOperator):
        return (
            "flex_attention" if called is torch.ops.higher_order.flex_attention else ""
        )
    return None


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """How to count the operations of an ATen operator; ``None`` if it has few.

    torch counts them in ``torch.utils.flop_counter``; the CPU's attention kernel is
    missing from its table.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    packet = getattr(target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    return flop_registry.get(packet)
