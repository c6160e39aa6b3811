"""Loops that somebody else has written: pipelines, an image encoder, a denoiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

import fxcapture as fxc
from fxcapture import Tap
from tests.integrations.small_models import TEXT

WORDS = ["[PAD]", "[UNK]", "[EOS]", "the", "cat", "sat", "on", "a", "mat", "dog"]
SETTINGS = {"backend": "eager", "fullgraph": True}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


@torch.no_grad()
def test_a_pipeline_that_generates_text() -> None:
    sizes = {**TEXT, "vocab_size": len(WORDS)}
    config = LlamaConfig(**sizes, pad_token_id=0, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    write = pipeline("text-generation", model=model, tokenizer=tokenizer())
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    asked["return_tensors"] = True
    want = write("the cat sat", **asked)
    captured = fxc.compile(model, {"h": Tap("model.layers.*", output=0)}, **SETTINGS)

    with captured.recording() as run:
        got = write("the cat sat", **asked)

    assert got == want
    assert [call.phase for call in run.calls] == ["prefill"] + ["decode"] * 3
    whole = torch.tensor([got[0]["generated_token_ids"][:-1]])
    states = model.model(whole, output_hidden_states=True).hidden_states
    torch.testing.assert_close(run.joined()["h"][0], states[1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_pipeline_that_extracts_features() -> None:
    model = BertModel(BertConfig(**{**TEXT, "vocab_size": len(WORDS)})).eval()
    read = pipeline("feature-extraction", model=model, tokenizer=tokenizer())
    texts = ["the cat sat on a mat", "a dog"]
    want = read(texts)
    spec = {"h": Tap("encoder.layer.*", output=0, select=0)}
    captured = fxc.compile(model, spec, **SETTINGS)

    with captured.recording() as run:
        got = read(texts)

    assert got == want
    assert len(run.calls) == len(texts)
    for call, text in zip(run.calls, texts, strict=True):
        wanted = model(ids_of(text), output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(call.records["h"][0], wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["get_image_features", "get_text_features"])
def test_an_encoder_of_a_model_of_images_and_texts(name: str) -> None:
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text)).eval()
    given: dict[str, Any]
    if name == "get_image_features":
        part, given = model.vision_model, {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        part, given = model.text_model, {"input_ids": torch.tensor([[3, 4, 5, 2]])}
    want = getattr(model, name)(**given)
    states = part(**given, output_hidden_states=True).hidden_states
    side = name.split("_")[1].replace("image", "vision")
    spec = {"h": Tap(f"{side}_model.encoder.layers.*", output=0)}
    encode = fxc.compile(getattr(model, name), spec, **SETTINGS)

    with encode.recording() as run:
        got = [getattr(model, name)(**given) for _ in range(2)]

    torch.testing.assert_close(got[1].pooler_output, want.pooler_output)
    assert len(run.calls) == 2
    for state, wanted in zip(run.calls[1].records["h"], states[1:], strict=True):
        torch.testing.assert_close(state, wanted)


class UNet(nn.Module):
    """Two scales, a skip, and a time that shifts the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.time = nn.Linear(1, 8)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.up = nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        below = torch.nn.functional.silu(self.down(x))
        shifted = below + self.time(t[:, None])[:, :, None, None]
        return self.up(torch.cat([self.middle(shifted), below], 1))


class Pipeline:
    """As diffusion libraries have it: it holds the model and a loop around it."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet

    def __call__(self, noise: torch.Tensor, steps: int) -> torch.Tensor:
        x = noise
        for i in range(steps):
            t = torch.full((x.shape[0],), 1 - i / steps)
            x = x - self.unet(x, t) / steps
        return x


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "middle"}])
def test_ten_steps_of_a_denoising_loop(settings: dict[str, Any]) -> None:
    unet = UNet().eval()
    draw, noise = Pipeline(unet), torch.randn(2, 3, 16, 16)
    seen: list[torch.Tensor] = []
    hook = unet.middle.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    want = draw(noise, 10)
    hook.remove()
    captured = fxc.compile(unet, {"middle": "middle"}, backend="eager", **settings)

    with captured.recording() as run:
        got = draw(noise, 10)

    torch.testing.assert_close(got, want)
    assert [call.step for call in run.calls] == list(range(10))
    assert {call.phase for call in run.calls} == {None}
    for call, wanted in zip(run.calls, seen, strict=True):
        torch.testing.assert_close(call.records["middle"][0], wanted)
    assert counters["stats"]["unique_graphs"] == 1
