"""``multi_head_attention_forward``, the call that ``nn.MultiheadAttention`` makes.

It projects, masks, attends and projects once more in one function, with a fused kernel
inside of it or without one.  What decides its weights is made of its arguments here.

Terms
    packed call: one call of the function.

Invariants
    A packed call stands for the same weights whatever ``need_weights`` is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

__all__ = ["PACKED", "PackedCall", "packed_call", "project"]

PACKED = F.multi_head_attention_forward


class PackedCall(NamedTuple):
    """The arguments of one packed call that decide its weights.

    Attributes:
        query: Of shape (queries, batch, size), or (queries, size) without a batch.
        key: Of shape (keys, batch, size), or (keys, size).
        num_heads: How many heads.
        weight: The three projections in one; ``None`` where each has its own.
        bias: Their biases in one.
        query_weight: The query's own projection.
        key_weight: The key's own projection.
        more_key: One more projected key, of shape (1, 1, size).
        add_zero: Whether a key of zeros stands behind the others.
        padding: Of shape (batch, keys), or (keys,): boolean (true: must not read) or
            additive.
        mask: Of shape (queries, keys) or (batch x heads, queries, keys), in the same
            form.
        static_key: The projected keys, of shape (batch x heads, keys, size of a head),
            in place of ``key``.
        is_causal: Query i reads the keys up to i, and the mask does not count.
    """

    query: torch.Tensor
    key: torch.Tensor
    num_heads: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    query_weight: torch.Tensor | None
    key_weight: torch.Tensor | None
    more_key: torch.Tensor | None
    add_zero: bool
    padding: torch.Tensor | None
    mask: torch.Tensor | None
    static_key: torch.Tensor | None
    is_causal: bool


def packed_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> PackedCall:
    """What decides the weights, of the arguments that the function takes."""
    separate = use_separate_proj_weight
    return PackedCall(
        query,
        key,
        num_heads,
        None if separate else in_proj_weight,
        in_proj_bias,
        q_proj_weight if separate else None,
        k_proj_weight if separate else None,
        bias_k,
        add_zero_attn,
        key_padding_mask,
        attn_mask,
        static_k,
        # Elsewhere it is a hint only: the mask says the same.
        is_causal and key_padding_mask is None and not need_weights,
    )


def project(
    call: PackedCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
    """The query, key, mask and causality of the attention in a packed call.

    Returns:
        New tensors: the query and the key of shape (batch, heads, length, size of a
        head), the mask additive, or ``None``; without the batch where the call has
        none.
    """
    query, key, padding = call.query, call.key, call.padding
    batched = query.dim() == 3
    if not batched:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        padding = None if padding is None else padding.unsqueeze(0)
    query_weight, key_weight = call.query_weight, call.key_weight
    query_bias = key_bias = None
    if call.weight is not None:
        query_weight, key_weight, _ = call.weight.chunk(3)
    if call.bias is not None:
        query_bias, key_bias, _ = call.bias.chunk(3)
    batch, heads = query.shape[1], call.num_heads
    query = _split(F.linear(query, query_weight, query_bias), heads)  # type: ignore[arg-type]
    if call.static_key is not None:
        key = call.static_key.view(batch, heads, *call.static_key.shape[1:])
    else:
        key = F.linear(key, key_weight, key_bias)  # type: ignore[arg-type]
        if call.more_key is not None:
            key = torch.cat([key, call.more_key.expand(1, batch, -1)])
        key = _split(key, heads)
    if call.add_zero:
        key = F.pad(key, (0, 0, 0, 1))
    mask = None if call.is_causal else call.mask
    if mask is not None:
        if mask.dim() == 3 and mask.shape[0] != 1:
            mask = mask.view(batch, heads, *mask.shape[1:])
        mask = _additive(mask, query.dtype, key.shape[-2])
    if padding is not None:
        padding = _additive(padding, query.dtype, key.shape[-2])
        padding = padding.unsqueeze(1).unsqueeze(1)
        mask = padding if mask is None else mask + padding
    if not batched:
        query, key = query.squeeze(0), key.squeeze(0)
        if mask is not None and mask.dim() == 4:
            mask = mask.squeeze(0)
    return query, key, mask, call.is_causal


def _split(value: torch.Tensor, heads: int) -> torch.Tensor:
    length, batch, size = value.shape
    return value.view(length, batch, heads, size // heads).permute(1, 2, 0, 3)


def _additive(mask: torch.Tensor, dtype: Any, keys: int) -> torch.Tensor:
    """A mask in its additive form; keys that the call adds may be read."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        mask = zeros.masked_fill(mask, -math.inf)
    return F.pad(mask, (0, keys - mask.shape[-1]))
