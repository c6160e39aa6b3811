"""Small models of this directory's tests, and the eager values of their modules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Long enough for a compilation on a busy machine.
PATIENCE_S = 60.0


class Chain(nn.Module):
    """Linear layers, one behind the other."""

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def outputs_of(model: nn.Module, names: list[str], *args: Any) -> list[Any]:
    """What the named modules return in an eager call, in call order."""
    seen: list[Any] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output: seen.append(output)
        )
        for name in names
    ]
    model(*args)
    for hook in hooks:
        hook.remove()
    return seen


def own_attributes(model: nn.Module) -> dict[str, list[str]]:
    """What stands in each instance: the same before a capture and after it."""
    return {path: sorted(module.__dict__) for path, module in model.named_modules()}


def in_a_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start something; the result waits for it, and gives its value or its error."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE_S)
        assert done, "the thread has not ended"
        [(value, error)] = done
        if error is not None:
            raise error
        return value

    return join
