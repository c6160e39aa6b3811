"""Attention scores: what the softmax makes the weights of, beside each kind of call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxcapture as fxc
from fxcapture.errors import SpecError
from tests.test_attention_weights import FlexStack

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)


class Fused(nn.Module):
    """One fused call, with the keywords that it is made with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
        key = self.key(x).view(batch, length, 2, 4).transpose(1, 2)
        key = key.repeat_interleave(2, 1) if "enable_gqa" not in self.options else key
        out = F.scaled_dot_product_attention(query, key, key, **self.options)
        return out.transpose(1, 2).reshape(batch, length, 16)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """The same by hand, before the mask."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
        key = self.key(x).view(batch, length, 2, 4).transpose(1, 2)
        key = key.repeat_interleave(2, 1)
        return query @ key.mT * self.options.get("scale", 0.5)


BOOLEAN = torch.ones(6, 6, dtype=torch.bool).tril(1)
ADDITIVE = torch.linspace(-1, 1, 36).view(6, 6)
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({}, lambda s: s),
        ({"scale": 0.3}, lambda s: s),
        ({"enable_gqa": True}, lambda s: s),
        ({"attn_mask": BOOLEAN}, lambda s: s.masked_fill(~BOOLEAN, -torch.inf)),
        ({"attn_mask": ADDITIVE}, lambda s: s + ADDITIVE),
        (
            {"is_causal": True},
            lambda s: s.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf),
        ),
    ],
)
@torch.no_grad()
def test_scores_equal_those_by_hand(options: dict[str, Any], masked: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused(**options))
    spec = {
        "scores": fxc.AttentionScores("0"),
        "part": fxc.AttentionScores("0", heads=[3, 1], queries=-1),
    }
    expected = masked(model[0].scores(X))
    function, params, buffers = fxc.functional(model, spec)
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    for records in (
        captured(X)[1],
        function(params, buffers, X)[1],
        fxc.export(model, (X,), spec=spec)(X)[1],
    ):
        torch.testing.assert_close(records["scores"][0], expected)
        torch.testing.assert_close(records["part"][0], expected[:, [3, 1], -1:])
    assert fxc.verify(captured, X).differences["scores"] < 1e-5


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "layers.*"}])
@torch.no_grad()
def test_weights_are_the_softmax_of_the_scores_beside_flex_attention(
    settings: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    spec = {
        "scores": fxc.AttentionScores("layers.*", heads=[2, 0]),
        "weights": fxc.AttentionWeights("layers.*", heads=[2, 0]),
    }
    captured = fxc.compile(FlexStack().eval(), spec, backend="aot_eager", **settings)
    records = captured(torch.randn(2, 6, 16))[1]
    for scores, weights in zip(records["scores"], records["weights"], strict=True):
        assert scores.isneginf().any()
        assert not scores.isnan().any()
        made = scores.softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(made, weights)


@torch.no_grad()
def test_weights_are_the_softmax_of_the_scores_of_torch_s_own_module() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    spec = {
        "scores": fxc.AttentionScores("self_attn"),
        "weights": fxc.AttentionWeights("self_attn"),
    }
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    records = captured(X)[1]
    made = records["scores"][0].softmax(-1)
    torch.testing.assert_close(made, records["weights"][0])


@torch.no_grad()
def test_what_weights_are_computed_of_is_no_function_call() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    spec = {
        "weights": fxc.AttentionWeights("self_attn"),
        "calls": fxc.Tap("self_attn::linear", optional=True),
        "inner": fxc.Tap("self_attn::multi_head_attention_forward", output=0),
    }
    function, params, buffers = fxc.functional(model, spec)
    records = function(params, buffers, X)[1]
    assert records["calls"] == ()
    assert len(records["weights"]) == len(records["inner"]) == 1


def test_the_tap_is_stored_and_read() -> None:
    tap = fxc.AttentionScores("a", heads=[1], queries=slice(2, None))
    assert repr(tap).startswith("AttentionScores('a', ")
    assert fxc.Tap.from_json(tap.to_json()) == tap
    assert tap != fxc.AttentionWeights("a", heads=[1], queries=slice(2, None))
    stored = tap.to_json()
    stored["attention"]["scores"] = "x"
    with pytest.raises(SpecError, match="scores, which is true if it is there"):
        fxc.Tap.from_json(stored)
