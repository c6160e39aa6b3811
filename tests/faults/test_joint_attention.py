"""Attention weights of code that is not written for tracing with a function mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc

HEADS, WIDTH = 4, 16


class JointAttention(nn.Module):
    """Image and text attend to both; heads are split with ``Tensor.unflatten``."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def heads(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        both = torch.cat([self.text(t), self.image(x)], 1)
        q, k, v = both.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.norm(q), k, v

    def forward(
        self, x: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.heads(x, t)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return y[:, t.shape[1] :], y[:, : t.shape[1]]

    def weights(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.heads(x, t)
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = JointAttention()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        a, b = self.attention(x, t)
        return x + a, t + b


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x, t = checkpoint(block, x, t, use_reentrant=False)
            else:
                x, t = block(x, t)
        return x

    def weights(self, x: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for block in self.blocks:
            found.append(block.attention.weights(x, t))
            x, t = block(x, t)
        return found


def image_to_text(weights: torch.Tensor) -> torch.Tensor:
    return weights[..., :4].mean(1)


SPEC = {
    "a": fxc.AttentionWeights(
        "blocks.*.attention", queries=slice(4, None), reduce=image_to_text
    ),
    "x": fxc.Tap("blocks.*", output=0),
}
MODES: dict[str, Any] = {
    "one graph": {"fullgraph": True},
    "pieces": {},
    "regions": {"regions": "blocks.*", "fullgraph": True},
    "export": None,
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_where_heads_are_split_with_unflatten(mode: str) -> None:
    """Attention maps of a joint-attention block (attention-map-diffusers#11)."""
    model = Transformer().eval()
    x, t = torch.randn(2, 9, WIDTH), torch.randn(2, 4, WIDTH)
    with torch.no_grad():
        expected = [image_to_text(w[:, :, 4:]) for w in model.weights(x, t)]
        if MODES[mode] is None:
            call: Any = fxc.export(model, (x, t), spec=SPEC)
        else:
            call = fxc.compile(model, SPEC, backend="aot_eager", **MODES[mode])
        output, records = call(x, t)
        torch.testing.assert_close(output, model(x, t))
    assert len(records["x"]) == 3
    for got, want in zip(records["a"], expected, strict=True):
        torch.testing.assert_close(got, want)


def test_weights_inside_a_checkpoint_that_is_one_graph() -> None:
    model = Transformer(checkpointed=True)
    x, t = torch.randn(2, 9, WIDTH), torch.randn(2, 4, WIDTH)
    captured = fxc.compile(model, SPEC, backend="aot_eager", fullgraph=True)
    output, records = captured(x, t)
    expected = [image_to_text(w[:, :, 4:]) for w in model.weights(x, t)]
    for got, want in zip(records["a"], expected, strict=True):
        torch.testing.assert_close(got, want)
    output.sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x, t).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
