"""What the arguments of a call say of it: their shapes, and its key-value cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["cache_of", "length_of", "shapes_of"]

#: What a cache is called, as an argument and as a field of the output.
_CACHES = ("past_key_values", "past_key_value", "cache_params", "cache")


def shapes_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Size]:
    """Argument name to shape, of the arguments that are tensors."""
    named = dict(zip(_names(type(model)), args, strict=False)) | dict(kwargs)
    return {n: v.shape for n, v in named.items() if isinstance(v, torch.Tensor)}


def cache_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = ()
) -> Any:
    """The cache among the arguments, or in the output; ``None`` if there is none."""
    named = dict(zip(_names(type(model)), args, strict=False)) | dict(kwargs)
    for name in _CACHES:
        found = named.get(name)
        if found is None and isinstance(output, Mapping):
            found = output.get(name)
        if found is None and not isinstance(output, Mapping):
            found = getattr(output, name, None)
        if found is not None:
            return found
    return None


def length_of(cache: Any, again: bool) -> int | None:
    """How many positions a cache holds; ``None`` where that is not known.

    Args:
        cache: The cache.
        again: The call before had it too, so that it need not be asked at any price:
            one whose length stands on the device would make the host wait.
    """
    asked = getattr(cache, "get_seq_length", None)
    if callable(asked):
        length = asked()
        if isinstance(length, torch.Tensor) and length.device.type != "cpu" and again:
            return None
        return int(length)
    if isinstance(cache, (tuple, list)) and cache:
        # The form before there were classes: a pair of tensors for each layer.
        first = cache[0][0] if isinstance(cache[0], (tuple, list)) else cache[0]
        return int(first.shape[-2]) if isinstance(first, torch.Tensor) else None
    return None


def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of ``forward``'s positional parameters, in order, without ``self``."""
    found = _known.get(cls)
    if found is None:
        kinds = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        parameters = inspect.signature(cls.forward).parameters.values()
        found = tuple([p.name for p in parameters if p.kind in kinds][1:])
        _known[cls] = found
    return found


_known: weakref.WeakKeyDictionary[type[nn.Module], tuple[str, ...]] = (
    weakref.WeakKeyDictionary()
)
