"""Attention weights on the CPU in no more memory than they take themselves.

Computed by ordinary operators, scores and weights are two tensors of the same size at
the peak.  This operator fills the weights row block by row block, each of which stays
in the processor's cache.

Only where nothing has to be differentiated: autograd keeps the weights anyway.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

__all__ = ["ATTENTION_WEIGHTS", "masked_scores", "softmax_weights"]

_BLOCK_BYTES = 2**20  # of scores at a time: half of a common second-level cache

_LIBRARY: Any = torch.library.Library("fxcapture", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention_weights(Tensor query, Tensor key, Tensor? mask, float scale) -> Tensor"
)


def _attention_weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax of the masked scores.

    Args:
        query: Of shape (..., queries, size).
        key: Of shape (..., keys, size); leading dimensions broadcast.
        mask: Boolean (true: may read) or additive; broadcasts to (..., queries, keys).
        scale: Factor of the scores.
    """
    out = _fake(query, key, mask, scale)
    if not out.numel():
        return out
    *leading, queries, keys = out.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    rows = max(1, _BLOCK_BYTES // (keys * precise.itemsize))
    query = query.expand(*leading, *query.shape[-2:])
    key = key.expand(*leading, *key.shape[-2:])
    shared = _shared_dimensions(mask, len(leading))
    if mask is not None:
        mask = mask.expand(out.shape)
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        made_for: tuple[int, ...] | None = None
        for place in itertools.product(*map(range, leading)):
            # Heads mostly share a mask, which is made ready once for all of them.
            own = tuple(i for i, s in zip(place, shared, strict=True) if not s)
            if mask is not None and own != made_for:
                bias, nothing = _bias(mask[place][block], precise)
                made_for = own
            left, right = query[place][block].to(precise), key[place].to(precise).T
            if mask is None:
                scores = torch.mm(left * scale, right)
            else:
                scores = torch.addmm(bias, left, right, alpha=scale)
            part = out[place][block]
            if out.dtype == precise:
                torch.softmax(scores, dim=-1, out=part)
            else:
                part.copy_(torch.softmax(scores, dim=-1))
            if mask is not None and nothing is not None:
                part.masked_fill_(nothing, 0.0)
    return out


def _shared_dimensions(mask: torch.Tensor | None, leading: int) -> list[bool]:
    """For each leading dimension, whether all of it has one mask."""
    sizes = () if mask is None else mask.shape[:-2]
    return [True] * (leading - len(sizes)) + [size == 1 for size in sizes]


def _bias(
    mask: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A mask in its additive form, and the rows that may read nothing, if any."""
    if mask.dtype == torch.bool:
        nothing = ~mask.any(dim=-1, keepdim=True)
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf)
    else:
        nothing = (mask == -math.inf).all(dim=-1, keepdim=True)
        bias = mask.to(dtype)
    return bias, nothing if nothing.any() else None


def masked_scores(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores with a mask applied.

    Args:
        scores: The scaled scores.
        mask: Boolean (true: may read) or additive, or ``None``.
    """
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


def softmax_weights(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; a row that may read nothing is zero.

    Args:
        scores: The scaled scores.
        mask: Boolean (true: may read) or additive, or ``None``.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    scores = masked_scores(scores, mask)
    # The softmax of a row of infinities is not a number; the kernel reads nothing.
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)


def _fake(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    return query.new_empty((*leading, query.shape[-2], key.shape[-2]))


_LIBRARY.impl("attention_weights", _attention_weights, "CPU")
torch.library.register_fake("fxcapture::attention_weights", _fake, lib=_LIBRARY)
ATTENTION_WEIGHTS = torch.ops.fxcapture.attention_weights.default
