"""Models that several test files use; tiny, seeded, in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 8


def mlp(depth: int = 3) -> nn.Sequential:
    """Linears with activations between: ``0``, ``2``, ``4`` are the linears."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).eval()


class Attention(nn.Module):
    """Returns (mixed, weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(self.query(h) @ self.key(h).mT, dim=-1)
        return weights @ h, weights


class Layer(nn.Module):
    """An attention and a linear, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = h + self.attn(h)[0] * scale
        return h + torch.tanh(self.mlp(h))


class Encoder(nn.Module):
    """Tokens, layers, norm; its attention weights are computed and dropped."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


def encoder(depth: int = 4) -> Encoder:
    """An :class:`Encoder`; the same weights every time."""
    torch.manual_seed(1)
    return Encoder(depth).eval()


def ids(*shape: int) -> torch.Tensor:
    """Token numbers for :func:`encoder`, :func:`llama` and :func:`bert`."""
    source = torch.Generator().manual_seed(5)
    return torch.randint(0, 16, shape or (2, 5), generator=source)


def rows(*shape: int) -> torch.Tensor:
    """Normally distributed input, ``(3, 8)`` by default."""
    source = torch.Generator().manual_seed(6)
    return torch.randn(shape or (3, WIDTH), generator=source)


def llama(layers: int = 2, **changes: Any) -> nn.Module:
    """A Llama of transformers, hidden size 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def bert(layers: int = 2) -> nn.Module:
    """A BERT of transformers, hidden size 32."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(4)
    return BertModel(config).eval()
