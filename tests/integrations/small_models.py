"""transformers' models from small configurations, with random weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
    WhisperConfig,
    WhisperModel,
)

Made = tuple[Any, dict[str, torch.Tensor]]
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "attn_implementation": "eager",
}


def ids(rows: int = 2, columns: int = 7) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns) % 60


def llama(**fields: Any) -> Made:
    config = LlamaConfig(**TEXT, num_key_value_heads=2, **fields)
    return LlamaModel(config), {"input_ids": ids()}


def qwen3() -> Made:
    config = Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)
    return Qwen3Model(config), {"input_ids": ids()}


def bert() -> Made:
    return BertModel(BertConfig(**TEXT)), {"input_ids": ids()}


def t5() -> Made:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        attn_implementation="eager",
    )
    return T5Model(config), {"input_ids": ids(), "decoder_input_ids": ids(2, 5)}


def clip() -> Made:
    model = CLIPVisionModel(CLIPVisionConfig(**VISION))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


def llava() -> Made:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_index=63,
        attn_implementation="eager",
    )
    input_ids = ids()
    input_ids[:, 1:5] = 63  # four patches
    return LlavaForConditionalGeneration(config), {
        "input_ids": input_ids,
        "pixel_values": torch.randn(2, 3, 16, 16),
    }


def qwen2_moe() -> Made:
    config = Qwen2MoeConfig(
        **TEXT,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen2MoeModel(config), {"input_ids": ids()}


def whisper(encoder_layers: int = 2, decoder_layers: int = 2) -> Made:
    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    return WhisperModel(config), {
        "input_features": torch.randn(2, 8, 20),
        "decoder_input_ids": ids(2, 5),
    }


MODELS: dict[str, Callable[[], Made]] = {
    "llama": llama,
    "qwen3": qwen3,
    "bert": bert,
    "t5": t5,
    "clip": clip,
    "llava": llava,
    "qwen2_moe": qwen2_moe,
    "whisper": whisper,
}
RECORDS = [
    prefix + name
    for prefix in ("", "encoder_", "decoder_")
    for name in ("hidden_states", "attentions")
] + ["cross_attentions", "router_logits"]


def records(output: Any) -> dict[str, Any]:
    """The captured fields of an output object."""
    return {n: output[n] for n in RECORDS if getattr(output, n, None) is not None}
