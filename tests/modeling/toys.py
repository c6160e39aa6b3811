"""Toy models for the decorators: importable, so that they pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxcapture.modeling.decorators import OutputRecorder, capture_outputs

DIM = 8
LAYERS = 4
LENGTH = LAYERS + 1


@dataclasses.dataclass
class Output:
    last_hidden_state: torch.Tensor | None = None
    past: Any = None
    hidden_states: tuple[Any, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(h @ h.transpose(-1, -2), -1)
        return self.project(weights @ h), weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(DIM, DIM)

    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = h + self.attention(h)[0]
        return h + torch.tanh(self.mlp(h))


class InPlaceBlock(Block):
    """Writes to its input and returns it."""

    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return h.add_(self.attention(h)[0])


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"num_hidden_layers": LAYERS} | fields))


class Base(nn.Module):
    """A stack of blocks and a final norm; sub-classes decorate ``forward``."""

    _can_record_outputs: dict[str, Any] | None = {  # noqa: RUF012
        "hidden_states": Block,
        "attentions": Attention,
    }

    def __init__(
        self,
        cfg: Any = None,
        block: Callable[[], nn.Module] = Block,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        self.config = config() if cfg is None else cfg
        self.layers = nn.ModuleList([block() for _ in range(layers)])
        self.norm = nn.LayerNorm(DIM)

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = x * 1.0
        for layer in self.layers:
            h = layer(h, **kwargs)
        return self.norm(h)


class Model(Base):
    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(x, **kwargs))


class Untied(Base):
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(x, **kwargs))


class DictModel(Base):
    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return {"last_hidden_state": self.run(x, **kwargs), "past": None}


class PlainModel(Base):
    """The same without the decorator."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(x, **kwargs))


class NoConfig(nn.Module):
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        h = x
        for layer in self.layers:
            h = layer(h)
        return Output(h)


class Named(Base):
    """Two attentions of one class in each block, told apart by layer_name."""

    class TwoWay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.crossattention = Attention()

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h = h + self.attention(h)[0]
            return h + self.crossattention(h.flip(1))[0]

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TwoWay,
        "attentions": OutputRecorder(Attention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(
            Attention, index=1, layer_name="crossattention"
        ),
    }

    def __init__(self) -> None:
        super().__init__(block=Named.TwoWay)

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return {"last_hidden_state": self.run(x)}


def expected(model: Base, x: torch.Tensor, *, tie: bool = True) -> list[torch.Tensor]:
    """The full hidden states, by calling the layers one by one."""
    states = [x * 1.0]
    for layer in model.layers:
        states.append(layer(states[-1].clone()))
    if tie:
        states[-1] = model.norm(states[-1])
    return states


def picked(record: Any) -> list[int] | None:
    """Positions that have a value."""
    if record is None:
        return None
    return [i for i, value in enumerate(record) if value is not None]


def assert_same(record: Any, want: Any) -> None:
    """Two records of equal shape and values."""
    assert (record is None) == (want is None), (record, want)
    if want is None:
        return
    assert isinstance(record, tuple)
    assert len(record) == len(want)
    for i, (a, b) in enumerate(zip(record, want, strict=True)):
        assert (a is None) == (b is None), f"entry {i}"
        if b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=f"entry {i}")


def overrides(model: nn.Module) -> list[str]:
    """What a capture could have left behind."""
    left = []
    for name, module in model.named_modules():
        for key in ("forward", "_call_impl", "_compiled_call_impl"):
            if key in module.__dict__:
                left.append(f"{name}.{key}")
        if module._forward_hooks or module._forward_pre_hooks:
            left.append(f"{name} hooks")
    return left


def leftovers(model: nn.Module) -> list[str]:
    """What a capture of any kind puts into instances, if it is still there."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key in module.__dict__
        if key.startswith("_fxcapture")
        or (key.endswith("call_impl") and module.__dict__[key] is not None)
    ]
