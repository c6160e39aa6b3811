"""Make the additive form of a boolean attention mask once, not once per layer.

``scaled_dot_product_attention`` turns a boolean mask into an additive one (zero where a
query may read, minus infinity where it may not) before it calls its kernel.  Inductor
makes one such mask for each layer, several of them at once, each as large as the
weights of one head, for two reasons: a graph for inference is not searched for common
subexpressions; and a mask that is computed from indices is cheap enough, in Inductor's
eyes, to be computed again for every kernel that needs it in memory.  The pass makes the
conversion once, in front of the first layer, by an operator that Inductor does not look
into, and hands its result to all layers.

It changes no value: the kernels get the very numbers they would have got.

Only for masks of CPU tensors, where it was measured; only where one node is the mask of
several calls; only where nothing writes to the mask in between; and only for masks that
are large: in a short call a conversion that stands by itself takes longer than the ones
that Inductor fuses into other kernels.

Idempotent: afterwards the calls have no boolean mask.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxcapture.passes.analyses.aliases import Aliases
from fxcapture.passes.base import PassResult

__all__ = ["ADDITIVE_MASK", "share_mask_conversion"]

_MASK = 3  # position of ``attn_mask``
#: Masks of fewer elements are left to Inductor; one mebibyte in float32.
MIN_ELEMENTS = 2**18
_LIBRARY = torch.library.Library("fxcapture", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("additive_mask(Tensor mask, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What ``scaled_dot_product_attention`` makes of a boolean mask."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -math.inf)


def _fake(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return mask.new_empty(mask.shape, dtype=dtype)


_LIBRARY.impl("additive_mask", _additive_mask, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("fxcapture::additive_mask", _fake, lib=_LIBRARY)
ADDITIVE_MASK = torch.ops.fxcapture.additive_mask.default


def share_mask_conversion(gm: fx.GraphModule) -> PassResult:
    """Convert each shared boolean mask of the outermost graph once.

    Args:
        gm: A graph as Dynamo makes it; edited.
    """
    groups: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            mask, query = _mask(node), node.args[0]
            if mask is not None and isinstance(query, fx.Node):
                example = query.meta.get("example_value")
                if isinstance(example, torch.Tensor) and example.device.type == "cpu":
                    groups.setdefault((mask, example.dtype), []).append(node)
    modified = False
    aliases = Aliases(gm) if groups else None
    for (mask, dtype), calls in groups.items():
        if len(calls) > 1 and aliases and not aliases.may_be_written(mask, calls[0]):
            _share(gm.graph, mask, dtype, calls)
            modified = True
    return PassResult(gm, modified)


def _mask(call: fx.Node) -> fx.Node | None:
    """The boolean mask of a fused call, if it has one."""
    found = call.args[_MASK] if len(call.args) > _MASK else call.kwargs.get("attn_mask")
    if not isinstance(found, fx.Node):
        return None
    example = found.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dtype != torch.bool:
        return None
    elements = example.numel()  # a symbolic number may be large
    return None if isinstance(elements, int) and elements < MIN_ELEMENTS else found


def _share(
    graph: fx.Graph, mask: fx.Node, dtype: torch.dtype, calls: list[fx.Node]
) -> None:
    example: torch.Tensor = mask.meta["example_value"]
    with graph.inserting_before(calls[0]):
        shared = graph.call_function(ADDITIVE_MASK, (mask, dtype))
    # Made from the fake tensor, and so fake too.
    shared.meta["example_value"] = example.new_zeros(example.shape, dtype=dtype)
    if "stack_trace" in calls[0].meta:
        shared.meta["stack_trace"] = calls[0].meta["stack_trace"]
    for call in calls:
        if len(call.args) > _MASK:
            call.update_arg(_MASK, shared)
        else:
            call.update_kwarg("attn_mask", shared)
