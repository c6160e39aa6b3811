"""A method of a model as a module of its own, so that it can be compiled and exported.

Terms
    entry: what a caller calls: the model itself, or a method such as ``encode_image``.

Invariants
    The modules, parameters and buffers are the model's own, under its names.  The
    method is called as the model's class defines it; nothing is written to the model.
    A target that is the root (``""``) is the call of the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fxcapture import _torch

__all__ = ["MethodEntry", "as_module"]


class MethodEntry(nn.Module):
    """A module whose call is the call of a method; made by :func:`as_module`.

    There is a class for each, so that ``forward`` has the method's signature.

    Args:
        method: The bound method of a module.
    """

    _fxc_method: Callable[..., Any]
    _fxc_model: nn.Module

    def __init__(self, method: Any) -> None:
        super().__init__()
        own = self.__dict__
        _torch.share_tables(self, method.__self__)
        own["_fxc_method"] = method
        own["_fxc_model"] = method.__self__
        own["training"] = method.__self__.training

    @property
    def fxc_name(self) -> str:
        """The method's name."""
        return self._fxc_method.__name__

    @property
    def fxc_model(self) -> nn.Module:
        """The model that it is a method of."""
        return self._fxc_model

    def train(self, mode: bool = True) -> MethodEntry:
        """Set the model's mode."""
        self._fxc_model.train(mode)
        self.__dict__["training"] = mode
        return self

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_fxc_model")
        if model is None:
            raise AttributeError(name)
        return getattr(model, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return as_module, (self._fxc_method,)


def as_module(entry: Any) -> Any:
    """A bound method of a module as a module; anything else as it is."""
    if not inspect.ismethod(entry) or not isinstance(entry.__self__, nn.Module):
        return entry
    model = entry.__self__
    # What a captured model hands out for a method knows the method.
    method = getattr(entry.__func__, "fxc_method", entry)
    name = f"{type(model).__name__}_{method.__name__}"

    def forward(self: MethodEntry, /, *args: Any, **kwargs: Any) -> Any:
        return self._fxc_method(*args, **kwargs)

    forward.__signature__ = inspect.signature(method.__func__)  # type: ignore[attr-defined]
    kind = type(name, (MethodEntry,), {"forward": forward, "__module__": __name__})
    return kind(method)
