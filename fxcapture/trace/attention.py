"""Attention weights beside a fused kernel.

A fused kernel (``torch.nn.functional.scaled_dot_product_attention`` or
``torch.nn.attention.flex_attention``) returns no weights.  They are computed once more
from the same query, key, mask, scale, causality and grouping, for the wanted heads and
query positions only.  The model keeps its kernel.  So it is with the function that
``nn.MultiheadAttention`` calls, see :mod:`fxcapture.trace.packed_attention`.

Where a pass of this package sees the graph, it reads the arguments from the call's node
(:mod:`fxcapture.passes.compute_weights`).  Elsewhere the target runs under
:class:`WatchFused`, which sees its calls.

Terms
    fused call: one call of ``scaled_dot_product_attention``, ``flex_attention`` or
        ``multi_head_attention_forward``.
    weights: of shape (batch, heads, queries, keys), in the query's dtype: what each
        query reads of each key, *before* dropout.  A query whose keys are all masked
        reads nothing: its weights are zero.

Invariants
    What the model computes is not touched.  Everything here is traced by Dynamo, or
    runs eagerly, alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fxcapture import _torch
from fxcapture.spec.attention import Attention
from fxcapture.spec.positions import Positions, Slice
from fxcapture.trace.attention_kernel import (
    ATTENTION_WEIGHTS,
    masked_scores,
    softmax_weights,
)
from fxcapture.trace.listen import innermost, unheard
from fxcapture.trace.packed_attention import PACKED, PackedCall, packed_call, project

__all__ = [
    "FlexCall",
    "FusedCall",
    "WatchFused",
    "attention_weights",
    "call_with_weights",
    "flex_call",
    "fused_call",
]


class FusedCall(NamedTuple):
    """The arguments of one fused call that decide its weights.

    Attributes:
        query: Of shape (batch, heads, queries, size).
        key: Of shape (batch, heads or groups, keys, size).
        mask: Boolean (true: may read) or additive; broadcasts to the weights.
        is_causal: Query i reads the keys up to i.
        scale: Factor of the scores; ``None`` for one over the root of the size.
        enable_gqa: Several heads share one of the key's.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def fused_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> FusedCall:
    """What decides the weights, of the arguments that the function takes."""
    return FusedCall(query, key, attn_mask, is_causal, scale, enable_gqa)


class FlexCall(NamedTuple):
    """The arguments of one ``flex_attention`` call that decide its weights.

    Attributes:
        query: Of shape (batch, heads, queries, size).
        key: Of shape (batch, heads or groups, keys, size).
        score_mod: ``(score, batch, head, query, key) -> score``, on scalar tensors.
        mask_mod: ``(batch, head, query, key) -> bool``: whether it may read.
        scale: Factor of the scores.
        score_more: What ``score_mod`` takes behind these.
        mask_more: What ``mask_mod`` takes behind these.
    """

    query: torch.Tensor
    key: torch.Tensor
    score_mod: Callable[..., torch.Tensor]
    mask_mod: Callable[..., torch.Tensor]
    scale: float
    score_more: tuple[Any, ...] = ()
    mask_more: tuple[Any, ...] = ()


def flex_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any = None,
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> FlexCall:
    """What decides the weights, of the arguments that the operator takes.

    The last part of a block mask is its function.
    """
    return FlexCall(
        query,
        key,
        score_mod,
        block_mask[-1],
        scale,
        tuple(score_mod_other_buffers),
        tuple(mask_mod_other_buffers),
    )


class WatchFused(TorchFunctionMode):
    """A time in which every fused call is also handed to a list.

    Args:
        calls: Receives the calls, in order.
    """

    def __init__(self, calls: list[FusedCall | FlexCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function; note it if it is the fused one."""
        if kwargs is None:
            kwargs = {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append(fused_call(*args, **kwargs))
        elif func is _FLEX_ATTENTION:
            self.calls.append(flex_call(*args, **kwargs))
        elif func is PACKED:
            # Now: the module may write to its query afterwards.
            call = packed_call(*args, **kwargs)
            if innermost() is None:
                self.calls.append(_unpacked(call))
            else:  # the projections are no function calls of the module's
                self.calls.append(unheard(_unpacked, (call,)))
        return _torch.traceable(func)(*args, **kwargs)


_FLEX_ATTENTION = torch.ops.higher_order.flex_attention


def _unpacked(call: PackedCall) -> FusedCall:
    return FusedCall(*project(call), scale=None, enable_gqa=False)


def attention_weights(
    call: FusedCall | FlexCall | PackedCall,
    wanted: Attention,
    saving: bool | None = None,
) -> torch.Tensor:
    """The weights of one fused call, or the scores that they are the softmax of.

    Args:
        call: The call.
        wanted: Which of the two, for which heads and queries.
        saving: Use the operator that needs no memory beside its result; ``None``:
            where the trace that this runs in allows it.

    Returns:
        A new tensor of shape (batch, wanted heads, wanted queries, keys), in the
        query's dtype; the softmax runs in float32 at least.  Without the batch where
        the call has none.
    """
    if isinstance(call, FlexCall):
        return _flex_weights(call, wanted)
    if isinstance(call, PackedCall):
        call = _unpacked(call)
    query, key, mask = call.query, call.key, call.mask
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if call.enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    if mask is not None:
        mask = mask.expand((*mask.shape[:-2], num_queries, num_keys))
        if mask.dim() > 2 and mask.shape[-3] != 1:
            mask = _pick(mask, wanted.heads, -3)
        mask = _pick(mask, wanted.queries, -2)
    query = _pick(_pick(query, wanted.heads, -3), wanted.queries, -2)
    key = _pick(key, wanted.heads, -3)
    scale = call.scale
    if scale is None:
        scale = 1.0 / math.sqrt(call.query.shape[-1])
    if call.is_causal:
        rows = torch.arange(num_queries, device=query.device).unsqueeze(-1)
        columns = torch.arange(num_keys, device=query.device)
        causal = _pick(rows, wanted.queries, -2) >= columns
        # Torch allows one of the two only.
        mask = causal if mask is None else _both(mask, causal)
    if saving is None:
        saving = _saves_memory(query, key, mask)
    if saving and not wanted.scores:
        return ATTENTION_WEIGHTS(query, key, mask, scale)  # type: ignore[no-any-return]
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    scores = scores.float() if scores.dtype in _HALVES else scores
    made = masked_scores if wanted.scores else softmax_weights
    return made(scores, mask).to(query.dtype)


def _both(mask: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask & causal
    return mask.masked_fill(~causal, -math.inf)


def _saves_memory(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether the kernel of this package serves a graph.

    Not in exported programs, which run without this package.
    """
    given = (query, key) if mask is None else (query, key, mask)
    return (
        torch.compiler.is_dynamo_compiling()
        and not torch.compiler.is_exporting()
        and query.device.type == "cpu"
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
    )


def _flex_weights(call: FlexCall, wanted: Attention) -> torch.Tensor:
    query, key = call.query, call.key
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    batches, heads, queries, keys = (
        torch.arange(n, device=query.device)
        for n in (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    )
    heads = _pick(heads, wanted.heads, -1)
    queries = _pick(queries, wanted.queries, -1)
    query = _pick(_pick(query, wanted.heads, -3), wanted.queries, -2)
    key = _pick(key, wanted.heads, -3)
    # The kernel scales the product, in float32, and not the query.
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores.float() if scores.dtype in _HALVES else scores
    scores = scores * call.scale
    positions = (batches, heads, queries, keys)
    with _torch.indexing_by_tensors():
        scores = _at_each_position(call.score_mod, (0,), len(call.score_more))(
            scores, *positions, *call.score_more
        )
        allowed = _at_each_position(call.mask_mod, (), len(call.mask_more))(
            *positions, *call.mask_more
        )
    made = masked_scores if wanted.scores else softmax_weights
    return made(scores, allowed).to(query.dtype)


def _at_each_position(
    function: Callable[..., torch.Tensor], before: tuple[int, ...], more: int
) -> Callable[..., torch.Tensor]:
    """A function of scalar positions, over four dimensions of them."""
    none = (None,) * 4
    for i in (3, 2, 1, 0):
        in_dims = before + none[:i] + (0,) + none[i + 1 :] + (None,) * more
        function = torch.vmap(function, in_dims=in_dims)
    return function


def call_with_weights(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wanted: Attention | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """Call something, and compute the weights of each fused call that it makes.

    For collectors that run in the trace, such as a decorated model's.

    Returns:
        What the function returned, and one tensor for each fused call.
    """
    calls: list[FusedCall | FlexCall] = []
    with WatchFused(calls):
        value = function(*args, **kwargs)
    part = Attention() if wanted is None else wanted
    return value, [attention_weights(call, part) for call in calls]


_HALVES = (torch.float16, torch.bfloat16)


def _pick(value: torch.Tensor, positions: Positions, dim: int) -> torch.Tensor:
    """The wanted positions along a dimension, which stays."""
    if positions is None:
        return value
    if isinstance(positions, Slice):
        index: list[Any] = [slice(None)] * (-dim)
        index[0] = slice(positions.start, positions.stop, positions.step)
        return value[(..., *index)]
    picked = [value.select(dim, i) for i in positions]
    if len(picked) == 1:
        return picked[0].unsqueeze(dim)
    return torch.stack(picked, dim)
