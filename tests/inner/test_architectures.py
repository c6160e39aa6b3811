"""Values inside twelve architectures, against an independent recording of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

import fxcapture as fxc
from tests.inner.recorder import Noted, Recorder

# Of transformers' own code.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools")

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IDS = torch.arange(14).view(2, 7) % 60 + 3
MASK = torch.ones_like(IDS)
# Without a padded row, transformers calls the kernel otherwise when it is not traced.
MASK[0, :2] = 0
TOKENS = {"input_ids": IDS, "attention_mask": MASK}
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Architecture(NamedTuple):
    """A model, and where its values are.

    Attributes:
        make: Makes it, with keywords of its config.
        inputs: What it is called with.
        blocks: Its layers.
        attention: Its attention modules; empty where it has none.
        gate: The call that is the activation of its MLP.
        middle: The residual between attention and MLP.
        more: Further values: name to target and, for an argument, its position.
    """

    make: Callable[..., nn.Module]
    inputs: dict[str, torch.Tensor]
    blocks: str
    attention: str
    gate: str
    middle: str
    more: dict[str, tuple[str, int | None]] = {}  # noqa: RUF012


def _of(name: str, fields: dict[str, Any]) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**fields, **more)
        return getattr(transformers, f"{name}Model")(config)  # type: ignore[no-any-return]

    return make


def _llama_like(name: str, act: str = "silu", **fields: Any) -> Architecture:
    return Architecture(
        _of(name, GROUPED | fields),
        TOKENS,
        "layers.*",
        "layers.*.self_attn",
        f"layers.*.mlp.act_fn::{act}",
        "layers.*::add[0]",
    )


ROUTER = {
    "router logits": ("layers.*.mlp.gate::linear", None),
    "router probabilities": ("layers.*.mlp.gate::softmax", None),
    "chosen experts": ("layers.*.mlp.gate::topk", None),
}
MODELS = {
    "llama": _llama_like("Llama"),
    "qwen3": _llama_like("Qwen3", head_dim=8),
    "gemma": _llama_like("Gemma", act="gelu", head_dim=8),
    "mistral": _llama_like("Mistral"),
    "gpt2": Architecture(
        _of(
            "GPT2",
            {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
            | {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
        ),
        TOKENS,
        "h.*",
        "h.*.attn",
        "h.*.mlp.act::mul[-1]",
        "h.*::add[0]",
    ),
    "gpt_neox": Architecture(
        _of("GPTNeoX", TEXT),
        TOKENS,
        "layers.*",
        "layers.*.attention",
        "layers.*.mlp.act::gelu",
        "layers.*::add[0]",
    ),
    "phi": Architecture(
        _of("Phi", TEXT),
        TOKENS,
        "layers.*",
        "layers.*.self_attn",
        "layers.*.mlp.activation_fn::mul[-1]",
        "layers.*::add[0]",
    ),
    "bert": Architecture(
        _of("Bert", {k: v for k, v in TEXT.items() if k != "use_cache"}),
        TOKENS,
        "encoder.layer.*",
        "encoder.layer.*.attention.self",
        "encoder.layer.*.intermediate.intermediate_act_fn::gelu",
        "encoder.layer.*.attention.output::add[0]",
    ),
    "t5": Architecture(
        _of(
            "T5",
            {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
            | {"num_decoder_layers": 2, "num_heads": 4, "use_cache": False},
        ),
        {**TOKENS, "decoder_input_ids": IDS[:, :5]},
        "*.block.*",
        "**.EncDecAttention",
        "**.DenseReluDense.act::relu",
        "*.block.*.layer.0::add[0]",
    ),
    "vit": Architecture(
        _of(
            "ViT",
            {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        ),
        {"pixel_values": PIXELS},
        "layers.*",
        "layers.*.attention",
        "layers.*.mlp.activation_fn::gelu",
        "layers.*::add[0]",
    ),
    "qwen2_moe": _llama_like(
        "Qwen2Moe",
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )._replace(gate="layers.*.mlp.shared_expert.act_fn::silu", more=ROUTER),
    "mamba": Architecture(
        # By default it runs other code where it is traced by Dynamo than elsewhere.
        _of("Mamba", {"vocab_size": 64, "hidden_size": 32, "state_size": 4}
            | {"num_hidden_layers": 2, "use_cache": False}
            | {"use_associative_scan": False}),
        TOKENS,
        "layers.*",
        "",
        "layers.*.mixer::silu[1]",
        "layers.*::add[0]",
        {
            "state": ("layers.*.mixer::matmul[-1]", 0),
            "step size": ("layers.*.mixer::softplus", None),
        },
    ),
}  # fmt: skip

#: By the kernel: value to (function call inside of the attention, its argument).
ATTENTION: dict[str, dict[str, tuple[str, int | None]]] = {
    "sdpa": {
        "q": ("scaled_dot_product_attention", 0),
        "k": ("scaled_dot_product_attention", 1),
        "v": ("scaled_dot_product_attention", 2),
        "each head": ("scaled_dot_product_attention", None),
    },
    "eager": {
        "q": ("matmul[0]", 0),
        "k": ("matmul[0]", 1),
        "v": ("matmul[1]", 1),
        "scores": ("softmax", 0),
        "weights": ("softmax", None),
        "each head": ("matmul[1]", None),
    },
}
#: Kernels that a model has; the others have both.
KERNELS = {"t5": ["eager"], "mamba": [""]}
CASES = [
    (name, kernel) for name in MODELS for kernel in KERNELS.get(name, ["eager", "sdpa"])
]


def wanted(name: str, kernel: str) -> dict[str, tuple[str, int | None]]:
    """The values of a model, each as a target and, for an argument, its position."""
    found = MODELS[name]
    values = {"gate": (found.gate, None), "middle": (found.middle, None), **found.more}
    for value, (call, argument) in ATTENTION.get(kernel, {}).items():
        values[value] = (f"{found.attention}::{call}", argument)
    return values


def expected(noted: list[Noted], target: str, argument: int | None) -> list[Any]:
    """What the recording says of a target, in the order in which the calls returned."""
    module, _, call = target.rpartition("::")
    name, _, index = call.rstrip("]").partition("[")
    pattern = re.escape(module).replace(r"\*\*", ".*").replace(r"\*", r"[^.]*")
    runs: dict[str, list[Noted]] = {}
    for one in noted:
        same = one.name == name or one.name == f"i{name}" or one.name == f"r{name}"
        if re.fullmatch(pattern, one.path) and same:
            runs.setdefault(one.path, []).append(one)
    chosen = [calls[int(index)] if index else calls for calls in runs.values()]
    flat = [c for found in chosen for c in (found if type(found) is list else [found])]
    assert flat, target
    return [c.result if argument is None else c.args[argument] for c in flat]


def assert_same(found: Any, other: Any) -> None:
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
        return
    assert len(found) == len(other)
    for one, two in zip(found, other, strict=True):
        assert_same(one, two)


def tap(target: str, argument: int | None) -> fxc.Tap:
    if argument is None:
        return fxc.Tap(target)
    return fxc.Tap(target, point="input", output=argument)


def _whole(model: nn.Module, spec: Any, inputs: Any, blocks: str) -> Any:
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    records = captured(**inputs)[1]
    assert len(captured.graphs) == 1
    return records


def _regions(model: nn.Module, spec: Any, inputs: Any, blocks: str) -> Any:
    return fxc.compile(model, spec, backend="eager", regions=blocks)(**inputs)[1]


def _export(model: nn.Module, spec: Any, inputs: Any, blocks: str) -> Any:
    return fxc.export(model, (), inputs, spec=spec)(**inputs)[1]


WAYS = {"whole": _whole, "regions": _regions, "export": _export}
#: In the suite each model runs whole; these in the other ways as well.
IN_SUITE = {
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("bert", "sdpa"),
    ("qwen2_moe", "sdpa"),
}


@pytest.mark.parametrize(
    ("name", "kernel", "way"),
    [
        pytest.param(
            *case,
            way,
            marks=() if way == "whole" or case in IN_SUITE else pytest.mark.nightly,
        )
        for case in CASES
        for way in WAYS
    ],
)
def test_values_equal_those_of_the_recording(name: str, kernel: str, way: str) -> None:
    torch.manual_seed(0)
    found = MODELS[name]
    options = {"attn_implementation": kernel} if kernel else {}
    model = found.make(**options).eval()
    values = wanted(name, kernel)
    spec = {value: tap(*where) for value, where in values.items()}
    if kernel == "sdpa":
        spec["scores"] = fxc.AttentionScores(found.attention)
        spec["weights"] = fxc.AttentionWeights(found.attention)
    noted = Recorder(model).run(model, **found.inputs)
    with torch.no_grad():
        records = WAYS[way](model, spec, found.inputs, found.blocks)
    for value, where in values.items():
        assert_same(records[value], expected(noted, *where))
    if kernel == "sdpa":
        calls = [n for n in noted if n.name == "scaled_dot_product_attention"]
        for i, call in enumerate(calls):
            scores = scores_of(*call.args[:3], **call.kwargs)
            assert_same(records["scores"][i], scores)
            # A query that may read nothing has no weights.
            assert_same(records["weights"][i], scores.softmax(-1).nan_to_num(0.0))


def scores_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The scores of a call, by its formula."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.masked_fill(~allowed, -torch.inf)
