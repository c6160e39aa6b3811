"""The eager reference for attention weights and scores beside fused calls."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxcapture.trace.listen import unheard

__all__ = ["NoteWeights"]

_LN_2 = math.log(2)


class NoteWeights(TorchFunctionMode):
    """Notes the weights and the scores of fused calls.

    The weights are what a call makes of the unit matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        unheard(self._note, (func, args), {"kwargs": kwargs})
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        fused = torch.nn.functional.scaled_dot_product_attention
        if func is fused:
            bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args,
                             strict=False)) | kwargs  # fmt: skip
            key = bound["key"]
            unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            unit = unit.expand(*key.shape[:-2], -1, -1)
            more = {"value": unit, "dropout_p": 0.0}
            if len(args) > 5:
                more |= {"is_causal": args[5]}
            weights: Any = fused(**(bound | more)).detach()
            self.weights.append((weights, _scores(**(bound | more)).detach()))
        elif func is torch.ops.higher_order.flex_attention:
            query, key, _, *more_args = args
            unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            unit = unit.expand(*key.shape[:-2], -1, -1)
            weights, log_sum, *_ = func(query, key, unit, *more_args, **kwargs)
            # The operator's sums are of powers of two.
            scores = weights.log() + log_sum.unsqueeze(-1).to(weights.dtype) * _LN_2
            self.weights.append((weights.detach(), scores.detach()))
        elif func is torch.nn.functional.multi_head_attention_forward:
            named = inspect.signature(func).bind(*args, **kwargs).arguments
            told = {"need_weights": True, "average_attn_weights": False}
            weights = func(**(named | told | {"training": False}))[1]
            self.weights.append((weights.detach().nan_to_num(), None))


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> torch.Tensor:
    """What the softmax of a fused call sees, as torch's documentation has it."""
    size = query.shape[-1]
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (size**-0.5 if scale is None else scale)
    if is_causal:
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~earlier.to(scores.device), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores if attn_mask is None else scores + attn_mask
