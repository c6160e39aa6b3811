"""TransformerLens's names, against an independent recording of the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fxcapture as fxc
from fxcapture.errors import SpecError
from fxcapture.integrations import transformer_lens
from tests.inner.recorder import Recorder
from tests.inner.test_architectures import MODELS, assert_same, expected

FAMILIES = {
    "llama": ("layers.*", "self_attn"),
    "qwen3": ("layers.*", "self_attn"),
    "gpt2": ("h.*", "attn"),
    "gpt_neox": ("layers.*", "attention"),
}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_gives_its_value(family: str, kernel: str) -> None:
    torch.manual_seed(0)
    found = MODELS[family]
    model = found.make(attn_implementation=kernel).eval()
    blocks, attention = FAMILIES[family]
    seen: dict[str, list[Any]] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            value = output[0] if isinstance(output, tuple) else output
            seen[path] = [given, value]

        return hook

    handles = [
        module.register_forward_hook(note(path), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    noted = Recorder(model).run(model, **found.inputs)
    for handle in handles:
        handle.remove()
    names = transformer_lens.names(model)
    spec = {n: transformer_lens.tap(model, n.replace("{}", "*")) for n in names}
    with torch.no_grad():
        captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
        records = captured(**found.inputs)[1]

    layers = [blocks.replace("*", str(i)) for i in range(2)]
    middle = {
        "blocks.{}.hook_resid_pre": [seen[p][0] for p in layers],
        "blocks.{}.hook_resid_post": [seen[p][1] for p in layers],
        "blocks.{}.hook_attn_out": [seen[f"{p}.{attention}"][1] for p in layers],
        "blocks.{}.hook_mlp_out": [seen[f"{p}.mlp"][1] for p in layers],
    }
    at = f"{blocks}.{attention}"
    if kernel == "eager":
        middle |= {
            "blocks.{}.attn.hook_rot_q": expected(noted, f"{at}::matmul[0]", 0),
            "blocks.{}.attn.hook_z": expected(noted, f"{at}::matmul[1]", None),
            "blocks.{}.attn.hook_attn_scores": expected(noted, f"{at}::softmax", 0),
            "blocks.{}.attn.hook_pattern": expected(noted, f"{at}::softmax", None),
        }
    else:
        fused = f"{at}::scaled_dot_product_attention"
        middle |= {
            "blocks.{}.attn.hook_rot_q": expected(noted, fused, 0),
            "blocks.{}.attn.hook_rot_k": expected(noted, fused, 1),
            "blocks.{}.attn.hook_z": expected(noted, fused, None),
        }
    if family != "gpt_neox":  # attention and MLP stand side by side there
        middle["blocks.{}.hook_resid_mid"] = [
            seen[p][0] + seen[f"{p}.{attention}"][1] for p in layers
        ]
    if family in ("llama", "qwen3"):
        middle["blocks.{}.mlp.hook_post"] = [
            seen[f"{p}.mlp.act_fn"][1] * seen[f"{p}.mlp.up_proj"][1] for p in layers
        ]
    for name, values in middle.items():
        assert_same(records[name], values)
    assert set(records) == set(names)
    assert all(len(values) == (2 if "{}" in n else 1) for n, values in records.items())


def test_one_block_of_a_model_with_a_head_and_options() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    model = transformers.GPT2LMHeadModel(config)
    tap = transformer_lens.tap(model, "blocks.1.attn.hook_pattern", heads=[0])
    assert tap == fxc.AttentionWeights("transformer.h.1.attn", heads=[0])
    tap = transformer_lens.tap(model, "blocks.0.hook_resid_mid", reduce="last")
    assert tap == fxc.Tap("transformer.h.0::add[0]", reduce="last")


def test_a_name_that_there_is_not() -> None:
    model = MODELS["llama"].make()
    with pytest.raises(SpecError, match=r"hook_resid_middle.*is not a name") as caught:
        transformer_lens.tap(model, "blocks.0.hook_resid_middle")
    assert "nearest matches: blocks.{}.hook_resid_mid" in str(caught.value)
    with pytest.raises(SpecError, match="the table covers llama, mistral"):
        transformer_lens.names(MODELS["vit"].make())
