"""The models that the benchmarks share: a Llama of any size, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxcapture as fxc


def llama(**changes: Any) -> nn.Module:
    """8 layers, hidden 256, unless ``changes`` says otherwise; in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024,
        "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def token_ids(batch: int, length: int) -> torch.Tensor:
    """Token ids below 1024, shape (batch, length)."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 1024, (batch, length), generator=draw)


def hidden_states(*positions: int, **fields: Any) -> fxc.CaptureSpec:
    """Hidden states of these layers (all, without any), embedding output first."""
    tap = fxc.Tap(
        "model.layers.*",
        output=0,
        select=list(positions) or None,
        initial=True,
        **fields,
    )
    return fxc.CaptureSpec({"hidden_states": tap})


def quiet() -> None:
    """What a machine's processor lacks is no news here."""
    import warnings

    warnings.filterwarnings("ignore")
