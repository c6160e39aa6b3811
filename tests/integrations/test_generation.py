"""Every step of a generation has the states of one full pass over what was generated.

Tokens and the number of compiled graphs are those of the model without capture.
Tolerance, in float32: 1e-5 absolute and 1e-4 relative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import fxcapture as fxc
from fxcapture import Tap
from tests.integrations.small_models import TEXT

TOKENS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 63, "vocab_size": 64}
IDS = torch.tensor([[5, 9, 11, 3, 7], [8, 2, 4, 1, 30]])
PADDED = torch.tensor([[5, 9, 11, 3, 7], [0, 0, 4, 1, 30]])


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**TEXT | TOKENS, num_key_value_heads=2))


def qwen3() -> Any:
    sizes = {"num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**TEXT | TOKENS, **sizes))


def gpt2() -> Any:
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=62,
        attn_implementation="eager", **TOKENS,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def t5() -> Any:
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=1, dropout_rate=0.0, **TOKENS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        num_mel_bins=8, max_source_positions=16, max_target_positions=64,
        bos_token_id=1, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, **TOKENS,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    return model


Make = Callable[[], Any]
LAYERS: dict[Make, str] = {
    llama: "model.layers.*",
    qwen3: "model.layers.*",
    gpt2: "transformer.h.*",
    t5: "decoder.block.*",
    whisper: "model.decoder.layers.*",
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
}
INPUTS = ("batch", "single", "padded")


def inputs(make: Make, kind: str) -> dict[str, torch.Tensor]:
    rows = 1 if kind == "single" else 2
    if make is whisper:
        draw = torch.Generator().manual_seed(0)
        return {"input_features": torch.randn(rows, 8, 32, generator=draw)}
    if kind == "padded":
        return {"input_ids": PADDED, "attention_mask": (PADDED != 0).long()}
    return {"input_ids": IDS[:rows]}


def made(make: Make) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return make().eval()


def one_pass(
    make: Make, captured: Any, given: dict[str, torch.Tensor], tokens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The states of the final sequence, all at once."""
    if make in (t5, whisper):
        more: dict[str, Any] = dict(given, decoder_input_ids=tokens)
    else:
        more = {"input_ids": tokens}
        if "attention_mask" in given:
            mask = torch.ones_like(tokens)
            mask[:, : IDS.shape[1]] = given["attention_mask"]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            more |= {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        return captured(**more, use_cache=False).records["h"]  # type: ignore[no-any-return]


def check(make: Make, mode: str, cache: str, kind: str) -> None:
    graphs: list[Any] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    given = inputs(make, kind)
    settings = {
        "max_new_tokens": 4, "min_new_tokens": 4, "output_scores": True,
        "return_dict_in_generate": True,
        **MODES[mode], **CACHES[cache],
    }  # fmt: skip
    plain = made(make)
    plain.forward = torch.compile(plain.forward, backend=backend)
    torch.manual_seed(1)
    expected = plain.generate(**given, **settings)
    num_graphs = len(graphs)
    graphs.clear()

    model = made(make)
    spec = {"h": Tap(LAYERS[make], output=0, initial=True)}
    captured = fxc.compile(model, spec, backend=backend)
    torch.manual_seed(1)
    with captured.recording() as run:
        result = captured.generate(**given, **settings)
    assert len(graphs) == num_graphs
    assert torch.equal(result.sequences, expected.sequences)
    assert [c.phase for c in run.calls] == ["prefill", *["decode"] * 3]
    assert [c.step for c in run.calls] == list(range(4))

    joined = run.joined(result.beam_indices if mode == "beams" else None)["h"]
    states = one_pass(make, captured, given, result.sequences[:, :-1])
    there = torch.ones(states[0].shape[:2], dtype=torch.bool)
    if "attention_mask" in given and make not in (t5, whisper):
        there[:, : IDS.shape[1]] = given["attention_mask"].bool()
    for got, wanted in zip(joined, states, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got[there], wanted[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "mode", "cache", "kind"),
    [
        (llama, "beams", "static", "padded"),
        (qwen3, "sampled", "dynamic", "padded"),
        (gpt2, "greedy", "static", "single"),
        (t5, "beams", "dynamic", "batch"),
        (whisper, "sampled", "static", "batch"),
    ],
)
def test_a_generation_is_one_full_pass(
    make: Make, mode: str, cache: str, kind: str
) -> None:
    check(make, mode, cache, kind)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "mode", "cache", "kind"),
    [
        case
        for case in itertools.product(LAYERS, MODES, CACHES, INPUTS)
        if not (case[0] is whisper and case[3] == "padded")
    ],
)
def test_every_generation_is_one_full_pass(
    make: Make, mode: str, cache: str, kind: str
) -> None:
    check(make, mode, cache, kind)
