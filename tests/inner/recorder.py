"""An independent reference: what the function calls of an eager run take and give.

Knows nothing of the package: a function mode that copies what it sees, and forward
hooks that say which module runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Noted", "Recorder"]


class Noted(NamedTuple):
    """One call: the module's path, the function's name, and copies of what it saw."""

    path: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def copies(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return [copies(v) for v in value]
    return {k: copies(v) for k, v in value.items()} if type(value) is dict else value


class Recorder(TorchFunctionMode):
    """Notes every function call while the model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.noted: list[Noted] = []
        self._paths = [""]
        self._handles = []
        for path, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter(path), prepend=True),
                module.register_forward_hook(lambda *_: self._leave()),
            ]

    def _enter(self, path: str) -> Any:
        return lambda *_: self._paths.append(path)

    def _leave(self) -> None:
        self._paths.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = copies(tuple(args)), copies(dict(kwargs))
        result = func(*args, **kwargs)
        path = self._paths[-1]
        self.noted.append(Noted(path, name.strip("_"), *given, copies(result)))
        return result

    def run(self, model: nn.Module, **inputs: Any) -> list[Noted]:
        """Call the model once; its calls."""
        with torch.no_grad(), self:
            model(**inputs)
        for handle in self._handles:
            handle.remove()
        return self.noted
