"""Attention weights of torch's own modules are what ``need_weights`` gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxcapture as fxc
from fxcapture.errors import UnsupportedOutputError
from fxcapture.testing import verify
from tests.modes import MODES, compile_in

# Dynamo looks at .grad of a region's inputs, which are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

BATCH, QUERIES, KEYS, SIZE, HEADS = 2, 5, 7, 8, 2
CAUSAL = torch.ones(QUERIES, QUERIES).triu(1).bool()
Records = dict[str, Any]


class Attends(nn.Module):
    """One ``nn.MultiheadAttention``, called as the test says."""

    def __init__(self, call: dict[str, Any], own: bool = False, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(SIZE, HEADS, dropout=0.5, **more)
        for parameter in self.attend.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.call = call
        self.own = own

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attend(x, y, y, **self.call)[0]
        return found

    def wanted(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        told = self.call | {"need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            weights: torch.Tensor = copy.deepcopy(self.attend).eval()(x, y, y, **told)[
                1
            ]
        return weights


def inputs(batch_first: bool, same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, SIZE)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    return (x, x) if same else (x, y)


def whole(model: nn.Module, spec: Any, *args: Any) -> Records:
    return fxc.compile(model, spec, backend="aot_eager", fullgraph=True)(*args).records


def pieces(model: nn.Module, spec: Any, *args: Any) -> Records:
    return compile_in("pieces", model, spec, regions="")(*args).records


def regions(model: nn.Module, spec: Any, *args: Any) -> Records:
    names = [n for n, m in model.named_modules() if isinstance(m, LAYERS)]
    at = names or ["attend"]
    return compile_in("regions", model, spec, regions=at)(*args).records  # type: ignore[arg-type]


def eager(model: nn.Module, spec: Any, *args: Any) -> Records:
    with torch.compiler.set_stance("force_eager"):
        return fxc.compile(model, spec)(*args).records


def exported(model: nn.Module, spec: Any, *args: Any) -> Records:
    return fxc.export(model, args, spec=spec)(*args).records


def exported_strictly(model: nn.Module, spec: Any, *args: Any) -> Records:
    return fxc.export(model, args, spec=spec, strict=True)(*args).records


def functional(model: nn.Module, spec: Any, *args: Any) -> Records:
    fn, params, buffers = fxc.functional(model, spec)
    return fn(params, buffers, *args).records


def functional_compiled(model: nn.Module, spec: Any, *args: Any) -> Records:
    fn, params, buffers = fxc.functional(model, spec)
    fn = torch.compile(fn, backend="aot_eager", fullgraph=True)
    return fn(params, buffers, *args).records


def inside_a_trace(model: nn.Module, spec: Any, *args: Any) -> Records:
    captured = fxc.compile(model, spec, backend="aot_eager")

    def around(*args: Any) -> Any:
        return captured(*args).records

    return torch.compile(around, backend="aot_eager", fullgraph=True)(*args)  # type: ignore[no-any-return]


LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
WAYS: list[Callable[..., Records]] = [
    whole, pieces, regions, eager, exported, exported_strictly, functional,
    functional_compiled, inside_a_trace,
]  # fmt: skip


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("need", [False, True], ids=["fused", "need_weights"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_multihead_attention_gives_its_weights_in_every_way(
    way: Callable[..., Records], need: bool, grad: bool
) -> None:
    model = Attends({"need_weights": need}, batch_first=True).eval()
    x, _ = inputs(batch_first=True, same=True)

    with torch.set_grad_enabled(grad):
        records = way(model, {"w": fxc.AttentionWeights("attend")}, x, x)

    close(records["w"][0], model.wanted(x, x))


PADDING = torch.tensor([[False] * 6 + [True], [False] * 4 + [True] * 3])
SOME = torch.arange(QUERIES * KEYS).reshape(QUERIES, KEYS) % 3 == 1
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mask": ({}, {}),
    "padding": ({"key_padding_mask": PADDING}, {}),
    "additive padding": ({"key_padding_mask": PADDING * -2.5}, {}),
    "boolean mask": ({"attn_mask": SOME}, {}),
    "additive mask": ({"attn_mask": SOME * -1.5}, {}),
    "a mask for each head": (
        {"attn_mask": torch.stack([SOME, SOME.flip(0), SOME.flip(1), ~SOME])},
        {},
    ),
    "both": ({"attn_mask": SOME, "key_padding_mask": PADDING}, {}),
    "keys of another size": ({"attn_mask": SOME}, {"kdim": SIZE, "vdim": SIZE}),
    "no bias": ({}, {"bias": False}),
    "one more key": ({"attn_mask": SOME}, {"add_bias_kv": True}),
    "a key of zeros": ({"key_padding_mask": PADDING}, {"add_zero_attn": True}),
}


@pytest.mark.parametrize("need", [False, True], ids=["fused", "need_weights"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch first"])
@pytest.mark.parametrize("case", CASES)
def test_masks_and_projections_are_those_of_the_call(
    case: str, batch_first: bool, need: bool
) -> None:
    call, more = CASES[case]
    model = Attends(call | {"need_weights": need}, batch_first=batch_first, **more)
    model.eval()
    if "kdim" in more:
        # Of equal sizes torch packs the projections all the same.
        model.attend = nn.MultiheadAttention(
            SIZE, HEADS, kdim=SIZE + 2, vdim=SIZE, batch_first=batch_first
        ).eval()
    x, y = inputs(batch_first)
    if "kdim" in more:
        wide = torch.cat([y, y[..., :2]], -1)

        def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
            return model.attend(x, y, y[..., :SIZE], **model.call)[0]

        model.forward = forward  # type: ignore[method-assign]
        told = call | {"need_weights": True, "average_attn_weights": False}
        wanted = model.attend(x, wide, wide[..., :SIZE], **told)[1]
        y = wide
    else:
        wanted = model.wanted(x, y)
    spec = {
        "all": fxc.AttentionWeights("attend"),
        "part": fxc.AttentionWeights("attend", heads=1, queries=[-1, 0]),
    }

    for way in (whole, eager, exported):
        records = way(model, spec, x, y)

        close(records["all"][0], wanted)
        close(records["part"][0], wanted[:, [1]][:, :, [-1, 0]])


@pytest.mark.parametrize("need", [False, True], ids=["fused", "need_weights"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_causal_call(need: bool, padded: bool) -> None:
    call: dict[str, Any] = {
        "need_weights": need,
        "is_causal": True,
        "attn_mask": CAUSAL,
    }
    if padded:
        call["key_padding_mask"] = PADDING[:, -QUERIES:]
    model = Attends(call).eval()
    x, _ = inputs(batch_first=False, same=True)
    if padded:  # no row may be without keys
        call["key_padding_mask"] = call["key_padding_mask"].flip(1).roll(1, 1)
        call["key_padding_mask"][:, 0] = False

    for way in (whole, eager, exported):
        records = way(model, {"w": fxc.AttentionWeights("attend")}, x, x)

        close(records["w"][0], model.wanted(x, x))


def test_a_call_without_a_batch_has_weights_without_one() -> None:
    mask = torch.stack([SOME, ~SOME]) & ~SOME.all(-1, keepdim=True)
    model = Attends({"attn_mask": mask, "key_padding_mask": PADDING[0]}).eval()
    x, y = (t[:, 0] for t in inputs(batch_first=False))
    spec = {"w": fxc.AttentionWeights("attend", queries=[2])}

    for way in (whole, eager, exported):
        found = way(model, spec, x, y)["w"][0]

        assert found.shape == (HEADS, 1, KEYS)
        close(found, model.wanted(x, y)[:, [2]])


def test_a_row_that_may_read_nothing_has_zeros() -> None:
    mask = SOME.clone()
    mask[1] = True
    model = Attends({"attn_mask": mask, "need_weights": False}).eval()
    x, y = inputs(batch_first=False)

    found = whole(model, {"w": fxc.AttentionWeights("attend")}, x, y)["w"][0]

    assert torch.equal(found[:, :, 1], torch.zeros(BATCH, HEADS, KEYS))
    close(found, model.wanted(x, y).nan_to_num())


def test_weights_are_those_before_dropout() -> None:
    model = Attends({}, batch_first=True).train()
    x, y = inputs(batch_first=True)

    for way in (whole, eager, functional):
        found = way(model, {"w": fxc.AttentionWeights("attend")}, x, y)["w"][0]

        close(found, model.wanted(x, y))


def test_the_module_may_write_to_its_query_afterwards() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends({"need_weights": False}, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = x + 0
            return x.mul_(self.inner(x, y))

    model = Writes().eval()
    x, y = inputs(batch_first=True)

    for way in (whole, eager, functional):
        found = way(model, {"w": fxc.AttentionWeights("")}, x, y)["w"][0]

        close(found, model.inner.wanted(x, y))


def test_gradients_flow_through_the_weights() -> None:
    model = Attends({"need_weights": False}, batch_first=True).eval()
    x, y = inputs(batch_first=True)
    grads = []
    for way in (whole, eager):
        model.zero_grad()
        found = way(model, {"w": fxc.AttentionWeights("attend")}, x, y)["w"][0]
        (found * found).sum().backward()
        assert model.attend.in_proj_weight.grad is not None
        grads.append(model.attend.in_proj_weight.grad.clone())
    told: Any = {"need_weights": True, "average_attn_weights": False}
    model.zero_grad()
    (model.attend(x, y, y, **told)[1] ** 2).sum().backward()

    for grad in grads:
        close(grad, model.attend.in_proj_weight.grad)  # type: ignore[arg-type]


# -- inside of torch's layers ----------------------------------------------------------


class Translates(nn.Module):
    """An encoder and a decoder of torch's own layers."""

    def __init__(self, batch_first: bool = True, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        told: Any = {"dim_feedforward": 12, "batch_first": batch_first} | more
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(SIZE, HEADS, **told),
            2,
            enable_nested_tensor=batch_first and not more,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(SIZE, HEADS, **told), 2
        )

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        memory = self.encoder(source, src_key_padding_mask=padding)
        mask = CAUSAL.to(source.device)
        found: torch.Tensor = self.decoder(
            target,
            memory,
            tgt_mask=mask,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        return found


def weights_of(model: nn.Module, *args: Any) -> dict[str, torch.Tensor]:
    """What each ``nn.MultiheadAttention`` returns when it is asked for its weights."""
    found: dict[str, torch.Tensor] = {}
    model = copy.deepcopy(model).eval()

    def ask(path: str, module: nn.Module) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            told: Any = {"need_weights": True, "average_attn_weights": False}
            found[path] = original(*args, **(kwargs | told))[1]
            return original(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]

    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            ask(path, module)
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    return found


def sentence(batch_first: bool = True) -> tuple[torch.Tensor, ...]:
    y, x = inputs(batch_first)
    return x, y, PADDING


RECORDS = {
    "encoder": "encoder.layers.*.self_attn",
    "decoder": "decoder.layers.*.self_attn",
    "cross": "decoder.layers.*.multihead_attn",
}


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_torch_s_layers_give_the_weights_of_the_attention_inside(
    way: Callable[..., Records], grad: bool
) -> None:
    model = Translates().eval()
    args = sentence()
    spec = {name: fxc.AttentionWeights(target) for name, target in RECORDS.items()}
    spec["layers"] = fxc.AttentionWeights("encoder.layers.*", queries=-1)
    wanted = weights_of(model, *args)

    with torch.set_grad_enabled(grad):
        records = way(model, spec, *args)

    for name, target in RECORDS.items():
        for i in range(2):
            close(records[name][i], wanted[target.replace("*", str(i))])
    for i in range(2):
        close(records["layers"][i], wanted[f"encoder.layers.{i}.self_attn"][:, :, -1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch first"])
def test_torch_s_layers_under_inference_mode(mode: str, batch_first: bool) -> None:
    model = Translates(batch_first, norm_first=True).eval()
    args = sentence(batch_first)
    wanted = weights_of(model, *args)
    regions = ["encoder.layers.*", "decoder.layers.*"]
    spec = {"last": fxc.AttentionWeights(RECORDS["encoder"], select=-1, heads=0)}
    captured = compile_in(mode, model, spec, regions=regions)  # type: ignore[arg-type]

    with torch.inference_mode():
        for _ in range(2):
            output, records = captured(*args)
        plain = model(*args)

    assert records["last"][0] is None
    close(records["last"][1], wanted["encoder.layers.1.self_attn"][:, :1])
    torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("way", [functional, functional_compiled], ids=["", "compiled"])
def test_what_an_encoder_layer_skips_can_be_had_of_a_function(
    way: Callable[..., Records],
) -> None:
    model = Translates().eval()
    args = sentence()
    spec = {"linear": fxc.Tap("encoder.layers.*.linear1")}

    with torch.no_grad():
        found = way(model, spec, *args)["linear"]
    wanted = eager(model, spec, *args)["linear"]

    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    assert model.encoder.layers[0].activation_relu_or_gelu == 1  # type: ignore[union-attr]


def test_an_export_with_a_reduction_that_has_an_input() -> None:
    model = Attends({}, batch_first=True).eval()
    x, y = inputs(batch_first=True)
    heads = torch.tensor([[1, 0], [1, 1]])
    spec = {"w": fxc.AttentionWeights("attend", reduce=fxc.reductions.mean(mask="m"))}

    program = fxc.export(model, (x, y), spec=spec, capture_inputs={"m": heads})

    found = program(x, y, m=heads).records["w"][0]
    weights = model.wanted(x, y)
    close(found, torch.stack([weights[0, 0], weights[1].mean(0)]))


def test_the_reference_agrees() -> None:
    model = Translates().eval()
    spec = {name: fxc.AttentionWeights(target) for name, target in RECORDS.items()}

    with torch.no_grad():
        report = verify(fxc.compile(model, spec, backend="aot_eager"), *sentence())

    assert set(report.differences) == set(RECORDS)
    assert max(report.differences.values()) < 1e-5


def test_a_record_of_none_names_the_tap_that_computes_the_weights() -> None:
    model = Translates().eval()
    captured = fxc.compile(
        model, {"w": fxc.Tap(RECORDS["decoder"], output=1)}, backend="eager"
    )
    captured(*sentence())

    assert "AttentionWeights('decoder.layers.0.self_attn')" in str(captured.explain())


def test_an_error_speaks_of_the_model_that_there_is() -> None:
    model = Translates().eval()
    spec = {"w": fxc.AttentionWeights("encoder.layers.*.linear1")}

    with pytest.raises(UnsupportedOutputError, match="no attention weights") as caught:
        eager(model, spec, *sentence())
    assert "attn_implementation" not in str(caught.value)
    assert "transformers" not in str(caught.value)


def test_a_call_of_the_function_itself() -> None:
    class Calls(Attends):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a = self.attend
            found: torch.Tensor = F.multi_head_attention_forward(
                x, y, y, SIZE, HEADS, a.in_proj_weight, a.in_proj_bias, None, None,
                False, 0.0, a.out_proj.weight, a.out_proj.bias, training=False,
                need_weights=False, static_k=y.reshape(KEYS, -1, SIZE // HEADS)
                .transpose(0, 1).contiguous(),
            )[0]  # fmt: skip
            return found

    model = Calls({}).eval()
    x, y = inputs(batch_first=False)
    packed = model.attend.in_proj_weight, model.attend.in_proj_bias
    query = F.linear(x, *(t.chunk(3)[0] for t in packed))
    query = query.reshape(QUERIES, -1, SIZE // HEADS).transpose(0, 1)
    key = y.reshape(KEYS, -1, SIZE // HEADS).transpose(0, 1)
    wanted = (query @ key.mT / math.sqrt(SIZE // HEADS)).softmax(-1)

    for way in (whole, eager):
        found = way(model, {"w": fxc.AttentionWeights("")}, x, y)["w"][0]
        close(found, wanted.view(BATCH, HEADS, QUERIES, KEYS))
