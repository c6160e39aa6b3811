"""Small models of this directory's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.q, self.norm = nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.q(self.norm(x)).relu()
        return y, y.softmax(-1)


class Block(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.attention, self.out = Attention(d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x)[0]) + x


class Stack(nn.Module):
    def __init__(self, depth: int = 3, d: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def hidden_states(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states


class Pair(nn.Module):
    """Two blocks, and a forward of the test's."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def left_behind(model: nn.Module) -> list[str]:
    """What an instance holds that a capture put there."""
    return [
        f"{path}.{key}"
        for path, module in model.named_modules()
        for key in module.__dict__
        if key in ("forward", "_call_impl") or "fxcapture" in key
    ]
