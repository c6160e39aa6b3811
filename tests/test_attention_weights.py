"""Attention weights beside a fused kernel are what eager attention returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)

import fxcapture as fxc
from fxcapture.errors import SpecError, SpecTypeError, UnsupportedOutputError
from fxcapture.spec.attention import Attention
from fxcapture.spec.attention_tap import AttentionWeights
from fxcapture.trace import attention_kernel
from fxcapture.trace.attention import FusedCall, attention_weights, call_with_weights
from fxcapture.trace.attention_kernel import ATTENTION_WEIGHTS, softmax_weights
from tests.modes import MODES, compile_in

transformers = pytest.importorskip("transformers")

# Dynamo looks at .grad of a region's inputs, which are no leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    # torch's own indexing under vmap makes an instance of an autograd function.
    pytest.mark.filterwarnings("ignore:.*should not be instan:DeprecationWarning"),
    # flex_attention warns where it runs outside of a graph.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*_compile flag:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*_compile flag:FutureWarning"),
]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 31}
IDS = torch.arange(14).reshape(2, 7)
PADDING = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])


def llama() -> tuple[Any, Any, str]:
    config = transformers.LlamaConfig(**SIZES, **GROUPED)
    return transformers.LlamaModel, config, "layers.*.self_attn"


def qwen3() -> tuple[Any, Any, str]:
    config = transformers.Qwen3Config(**SIZES, **GROUPED)
    return transformers.Qwen3Model, config, "layers.*.self_attn"


def mistral() -> tuple[Any, Any, str]:
    config = transformers.MistralConfig(**SIZES, **GROUPED, sliding_window=3)
    return transformers.MistralModel, config, "layers.*.self_attn"


def bert() -> tuple[Any, Any, str]:
    config = transformers.BertConfig(**SIZES, vocab_size=31)
    return transformers.BertModel, config, "encoder.layer.*.attention.self"


def t5() -> tuple[Any, Any, str]:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=31
    )
    return transformers.T5EncoderModel, config, "encoder.block.*.layer.0.SelfAttention"


def clip() -> tuple[Any, Any, str]:
    config = transformers.CLIPTextConfig(**SIZES, vocab_size=31, eos_token_id=2)
    return transformers.CLIPTextModel, config, "re:.*layers.\\d+.self_attn"


MODELS = {f.__name__: f for f in (llama, qwen3, mistral, bert, t5, clip)}


def pair(name: str) -> tuple[nn.Module, nn.Module, str]:
    """One model with fused and one with eager attention, of the same weights."""
    cls, config, target = MODELS[name]()
    torch.manual_seed(0)
    made = []
    for kind in ("sdpa", "eager"):
        own = copy.deepcopy(config)
        own._attn_implementation = kind
        made.append(cls(own).eval())
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1], target


@pytest.mark.parametrize(
    ("name", "masked"),
    [(name, True) for name in MODELS] + [("llama", False), ("t5", False)],
)
def test_weights_equal_those_of_eager_attention(name: str, masked: bool) -> None:
    fused, eager, target = pair(name)
    inputs = {"input_ids": IDS} | ({"attention_mask": PADDING} if masked else {})
    spec = {
        "all": AttentionWeights(target, select=[0, -1]),
        "part": AttentionWeights(target, heads=[3, 0], queries=[0, -3]),
    }
    captured = fxc.compile(fused, spec, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output, records = captured(**inputs)
        wanted = eager(**inputs, output_attentions=True).attentions
        plain = fused(**inputs)

    assert torch.equal(output.last_hidden_state, plain.last_hidden_state)
    assert [i for i, v in enumerate(records["all"]) if v is None] == list(
        range(1, len(wanted) - 1)
    )
    for i in (0, -1):
        torch.testing.assert_close(records["all"][i], wanted[i], rtol=1e-5, atol=1e-6)
    for got, whole in zip(records["part"], wanted, strict=True):
        part = whole[:, [3, 0]][:, :, [0, -3]]
        torch.testing.assert_close(got, part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same(mode: str) -> None:
    fused, eager, target = pair("llama")
    spec = {"last": AttentionWeights(target, queries=-1)}
    captured = compile_in(mode, fused, spec, regions="layers.*")
    with torch.no_grad():
        for _ in range(2):
            _, records = captured(IDS, attention_mask=PADDING, use_cache=False)
        wanted = eager(IDS, attention_mask=PADDING, output_attentions=True).attentions

    for got, whole in zip(records["last"], wanted, strict=True):
        torch.testing.assert_close(got, whole[:, :, -1:], rtol=1e-5, atol=1e-6)


def test_a_key_value_cache_makes_the_weights_longer_than_the_queries() -> None:
    fused, eager, target = pair("llama")
    captured = fxc.compile(
        fused, {"a": AttentionWeights(target)}, backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        caches = [m(IDS[:, :5], use_cache=True).past_key_values for m in (fused, eager)]
        _, records = captured(IDS[:, 5:], past_key_values=caches[0])
        wanted = eager(
            IDS[:, 5:], past_key_values=caches[1], output_attentions=True
        ).attentions

    assert records["a"][0].shape == (2, 4, 2, 7)
    for got, whole in zip(records["a"], wanted, strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-6)


def test_the_kernel_stays_and_nothing_is_computed_for_layers_not_selected() -> None:
    fused, _, target = pair("llama")
    graphs: dict[str, Any] = {}
    for name, spec in (
        ("one", {"a": AttentionWeights(target, select=[1])}),
        ("none", {"h": fxc.Tap("layers.1")}),
    ):
        captured = fxc.compile(fused, spec, backend="eager", fullgraph=True)
        with torch.no_grad():
            captured(IDS, attention_mask=PADDING, use_cache=False)
        graphs[name] = captured.graphs[0].graph
    count = {
        name: [
            sum(n.target is F.scaled_dot_product_attention for n in graph.nodes),
            sum(n.name.startswith("attention_weights") for n in graph.nodes),
        ]
        for name, graph in graphs.items()
    }

    assert count == {"one": [3, 1], "none": [3, 0]}


def test_a_new_selection_needs_no_new_trace() -> None:
    fused, eager, target = pair("llama")
    spec = {"a": AttentionWeights(target, select=[0])}
    captured = fxc.compile(fused, spec, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = eager(IDS, output_attentions=True).attentions
        for k in (0, 2, 1):
            records = captured(IDS, select={"a": [k]}).records

            torch.testing.assert_close(records["a"][k], wanted[k])


def test_treatments_apply_to_weights() -> None:
    fused, eager, target = pair("bert")
    spec = {
        "a": AttentionWeights(
            target, reduce=lambda w: w.mean(1), dtype=torch.float64, detach=True
        )
    }
    captured = fxc.compile(fused, spec, backend="aot_eager", fullgraph=True)
    _, records = captured(IDS)
    wanted = eager(IDS, output_attentions=True).attentions

    assert not records["a"][0].requires_grad
    torch.testing.assert_close(
        records["a"][0], wanted[0].mean(1).double(), rtol=1e-5, atol=1e-6
    )


def test_gradients_flow_through_weights() -> None:
    fused, eager, target = pair("llama")
    captured = fxc.compile(
        fused, {"a": AttentionWeights(target)}, backend="aot_eager", fullgraph=True
    )
    captured(IDS, use_cache=False).records["a"][1].square().sum().backward()
    eager(IDS, output_attentions=True).attentions[1].square().sum().backward()
    names = ["layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight"]

    for name in names:
        torch.testing.assert_close(
            fused.get_parameter(name).grad, eager.get_parameter(name).grad
        )


# -- the computation itself, against the kernel with a unit value matrix ---------------


def kernel_weights(call: FusedCall) -> torch.Tensor:
    """The fused kernel applied to the unit matrix returns its weights."""
    keys = call.key.shape[-2]
    value = torch.eye(keys, dtype=call.key.dtype).expand(*call.key.shape[:-2], -1, -1)
    return F.scaled_dot_product_attention(
        call.query,
        call.key,
        value,
        attn_mask=call.mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )


BOOLEAN = torch.rand(2, 1, 5, 6, generator=torch.manual_seed(0)) > 0.4
BOOLEAN[0, 0, 2] = False
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask, a row reads nothing": {"mask": BOOLEAN},
    "additive mask": {"mask": torch.randn(4, 5, 6)},
    "mask of one row": {"mask": torch.ones(2, 1, 1, 6).bool()},
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize(
    ("wanted", "heads", "queries"),
    [
        (Attention(), slice(None), slice(None)),
        (Attention([2, 0], slice(1, None, 2)), [2, 0], slice(1, None, 2)),
        (Attention([3], [-1]), [3], slice(4, None)),
    ],
)
@pytest.mark.parametrize("what", VARIANTS)
def test_weights_are_what_the_kernel_reads(
    what: str, wanted: Attention, heads: Any, queries: slice
) -> None:
    fields: dict[str, Any] = {
        "mask": None, "is_causal": False, "scale": None, "enable_gqa": False,
    } | VARIANTS[what]  # fmt: skip
    query = torch.randn(2, 4, 5, 8)
    key = torch.randn(2, 2 if fields["enable_gqa"] else 4, 6, 8)
    call = FusedCall(query, key, **fields)
    expected = kernel_weights(call)[:, heads][:, :, queries]

    got = attention_weights(call, wanted)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [torch.rand(6, 6) < 0.8, torch.randn(6, 6)],
    ids=["boolean", "additive"],
)
def test_a_mask_and_is_causal_both_hold(mask: torch.Tensor) -> None:
    if mask.dtype == torch.bool:
        mask[:, 0] = True
    # Of these sizes the kernel takes both; of others it raises.
    query, key = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    call = FusedCall(query, key, mask, is_causal=True, scale=None, enable_gqa=False)

    got = attention_weights(call, Attention())

    assert torch.equal(got, got.tril())
    try:
        expected = kernel_weights(call)
    except RuntimeError as error:
        if "attn_mask should not be set when is_causal" not in str(error):
            raise
        pytest.skip("this torch's kernel refuses both, from 2.14 on")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


MASKS: dict[str, Any] = {
    "none": None,
    "boolean": BOOLEAN,
    "boolean of two dimensions": BOOLEAN[1, 0],
    "additive for each head": torch.randn(4, 5, 6),
    "additive with a row of minus infinity": torch.zeros(2, 1, 5, 6).masked_fill(
        ~BOOLEAN, float("-inf")
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("mask", MASKS)
def test_the_kernel_for_little_memory_gives_the_same(
    mask: str, block_bytes: int, dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention_kernel, "_BLOCK_BYTES", block_bytes)
    query, key = torch.randn(2, 4, 5, 8).to(dtype), torch.randn(2, 1, 6, 8).to(dtype)
    given = MASKS[mask]
    got = ATTENTION_WEIGHTS(query, key, given, 0.3)
    scores = query.double() @ key.double().transpose(2, 3) * 0.3
    want = softmax_weights(scores, given).to(dtype)

    assert got.dtype == dtype
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype != torch.bfloat16 else {}
    torch.testing.assert_close(got, want, **exact)


def test_the_kernel_keeps_the_rules_of_operators() -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    torch.library.opcheck(ATTENTION_WEIGHTS, (query, key, BOOLEAN, 0.3))


def test_half_precision_is_summed_in_float32_and_returned_in_half() -> None:
    call = FusedCall(
        torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 2, 6, 8).bfloat16(),
        None, False, None, False,
    )  # fmt: skip
    got = attention_weights(call, Attention())

    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.sum(-1), torch.ones(1, 2, 5).bfloat16(), atol=2e-2,
                               rtol=0)  # fmt: skip


# -- flex attention --------------------------------------------------------------------


class FlexAttends(nn.Module):
    """Grouped queries, a score function that reads a parameter, a causal window."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
        key = self.key(x).view(batch, length, 2, 4).transpose(1, 2)

        def score(value, b, h, q, k):
            return value + self.bias[h] * (q - k)

        out = flex_attention(
            query, key, key, score_mod=score, block_mask=self.window(length),
            enable_gqa=True,
        )  # fmt: skip
        return x + out.transpose(1, 2).reshape(batch, length, 16)

    def window(self, length: int) -> BlockMask:
        return create_block_mask(
            lambda b, h, q, k: (q >= k) & (q - k < 3) & (q != 2),
            None, None, length, length, device="cpu",
        )  # fmt: skip

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """The same by hand."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
        key = self.key(x).view(batch, length, 2, 4).transpose(1, 2)
        scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 2
        q, k = torch.arange(length)[:, None], torch.arange(length)
        scores = scores + self.bias[:, None, None] * (q - k)
        allowed = (q >= k) & (q - k < 3) & (q != 2)
        scores = scores.masked_fill(~allowed, float("-inf"))
        return torch.softmax(scores, -1).nan_to_num(0.0)


class FlexStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FlexAttends() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "layers.*"}])
def test_weights_beside_flex_attention(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = FlexStack().eval()
    x = torch.randn(2, 6, 16)
    spec = {
        "a": AttentionWeights("layers.*", heads=[2, 0], queries=slice(1, None)),
        "h": fxc.Tap("layers.*", initial=True),
    }
    captured = fxc.compile(model, spec, backend="aot_eager", **settings)
    with torch.no_grad():
        captured(x)
        output, records = captured(x)
        wanted = model(x)
    torch.testing.assert_close(output, wanted, rtol=0, atol=0)
    for layer, state, got in zip(
        model.layers, records["h"], records["a"], strict=False
    ):
        with torch.no_grad():
            weights = layer.weights(state)[:, [2, 0], 1:]
        torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        found = fxc.verify(captured, x)
    assert found.differences["a"] < 1e-6


@pytest.mark.parametrize("masked", [False, True])
def test_weights_beside_transformers_flex_attention_equal_eager_ones(
    masked: bool,
) -> None:
    cls, config, target = MODELS["llama"]()
    torch.manual_seed(0)
    config._attn_implementation = "flex_attention"
    flexible = cls(config).eval()
    _, eager, _ = pair("llama")
    eager.load_state_dict(flexible.state_dict())
    mask = PADDING if masked else None
    captured = fxc.compile(
        flexible, {"a": AttentionWeights(target, select=[0, -1])},
        # Not one graph, also without capture: building the block mask warns.
        backend="aot_eager",
    )  # fmt: skip
    with torch.no_grad():
        found = captured(IDS, attention_mask=mask, use_cache=False).records["a"]
        wanted = eager(IDS, attention_mask=mask, output_attentions=True).attentions

    assert [w is None for w in found] == [False, True, False]
    rows = slice(None) if mask is None else mask.bool()[0]
    for i in (0, 2):
        torch.testing.assert_close(
            found[i][0][:, rows], wanted[i][0][:, rows], rtol=1e-5, atol=1e-6
        )


# -- what is refused -------------------------------------------------------------------


def run(model: nn.Module, tap: fxc.Tap, *args: Any) -> None:
    fxc.compile(model, {"a": tap}, backend="eager")(*args)


def test_a_module_without_a_fused_call_says_what_to_do() -> None:
    fused, eager, target = pair("llama")

    with pytest.raises(UnsupportedOutputError, match="no attention weights") as caught:
        run(fused, AttentionWeights("layers.*.mlp"), IDS)
    assert "scaled_dot_product_attention nor flex_attention" in str(caught.value)
    with pytest.raises(UnsupportedOutputError, match=r"attn_implementation=\"sdpa"):
        run(eager, AttentionWeights(target), IDS)


def test_a_module_with_several_fused_calls_says_to_target_those_below() -> None:
    fused, _, _ = pair("llama")

    with pytest.raises(UnsupportedOutputError, match="it made 3 fused calls"):
        run(fused, AttentionWeights(""), IDS)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttentionWeights("x", heads="all"), SpecTypeError, "heads='all'"),
        (lambda: AttentionWeights("x", queries=[]), SpecError, "selects nothing"),
        (lambda: AttentionWeights("x", queries=slice(0, 9, -1)), SpecError, "step"),
        (
            lambda: fxc.Tap("x", output=0, attention=Attention()),
            SpecError,
            "no part of what the module returns",
        ),
    ],
)
def test_malformed_taps_are_refused(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_tap_travels_as_json() -> None:
    spec = fxc.CaptureSpec(
        {
            "a": AttentionWeights("x", heads=[2, 0], queries=slice(-2, None)),
            "b": AttentionWeights("x"),
        }
    )

    assert fxc.CaptureSpec.from_json(spec.to_json()) == spec


def test_verify_compares_weights_with_the_kernel() -> None:
    fused, _, target = pair("llama")
    spec = {"a": AttentionWeights(target, heads=[1, 0], queries=slice(2, None))}
    captured = fxc.compile(fused, spec, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found = fxc.verify(captured, IDS, attention_mask=PADDING, use_cache=False)

    assert found.differences["a"] < 1e-6


def test_a_collector_in_the_trace_can_ask_for_weights() -> None:
    fused, eager, _ = pair("llama")
    with torch.no_grad():
        _, weights = call_with_weights(fused, (IDS,), {"use_cache": False})
        wanted = eager(IDS, output_attentions=True).attentions

    assert len(weights) == 3
    torch.testing.assert_close(weights[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hooked", [False, True])
def test_weights_inside_a_checkpoint_are_right_in_pieces(hooked: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x[:, None]
            return F.scaled_dot_product_attention(
                self.query(heads), heads, heads
            ).squeeze(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attends(), Attends()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    model = Model()
    if hooked:
        model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    spec = {"a": AttentionWeights("layers.*"), "h": fxc.Tap("layers.*", initial=True)}
    captured = fxc.compile(model, spec, backend="aot_eager")
    found = fxc.verify(captured, torch.randn(2, 5, 8))

    assert found.differences["a"] < 1e-6
    assert found.differences["h"] == 0.0


def test_a_region_computes_weights_for_selected_layers_only() -> None:
    fused, eager, target = pair("llama")
    ran: list[bool] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        outputs: Any = gm.graph.output_node().args[0]
        weights = len(outputs) > 1
        computed = [n for n in gm.graph.nodes if "weights" in str(n.target)]
        assert weights or not computed

        def run(*args: Any) -> Any:
            ran.append(weights)
            return gm.forward(*args)

        return run

    spec = {"a": AttentionWeights(target, select=[1])}
    captured = fxc.compile(fused, spec, backend=backend, regions="layers.*")
    call = {"attention_mask": PADDING, "use_cache": False}
    wanted = eager(IDS, attention_mask=PADDING, output_attentions=True).attentions

    def layers_with_weights(select: Any) -> list[int]:
        ran.clear()
        records = captured.select(a=select)(IDS, **call).records
        kept = [i for i, v in enumerate(records["a"]) if v is not None]
        for i in kept:
            torch.testing.assert_close(records["a"][i], wanted[i], rtol=1e-5, atol=1e-6)
        assert len(ran) == len(wanted) == len(records["a"])
        return [i for i, weights in enumerate(ran) if weights]

    last = len(wanted) - 1
    with torch.no_grad():
        assert layers_with_weights([1]) == [1]
        assert layers_with_weights([0, last]) == [0, last]
        assert layers_with_weights([]) == []
        assert layers_with_weights(slice(1, None)) == list(range(1, last + 1))
        # Which is the last is known when the call is over.
        assert layers_with_weights([-1]) == list(range(last + 1))
    # A checkpoint would compute the layer again, and has to find it as it was.
    assert layers_with_weights([1]) == list(range(last + 1))
