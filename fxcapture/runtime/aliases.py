"""What memory can be reached from a value that a caller holds."""

from __future__ import annotations

import collections
import gc
import types
from typing import Any

import torch
from torch import nn

from fxcapture import _torch

__all__ = ["storages_in"]


def storages_in(value: Any) -> set[int | None]:
    """The memory of every tensor that can be reached from a value, in any object."""
    found: set[int | None] = set()
    seen: set[int] = set()
    rest = collections.deque([value])
    while rest:
        item = rest.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.add(_torch.storage_id(item))
        elif isinstance(item, (tuple, list, dict)) or _is_plain_object(item):
            rest.extend(gc.get_referents(item))
    return found


def _is_plain_object(item: Any) -> bool:
    """Whether an object may be a container of the user's own."""
    skipped = (type, nn.Module, types.ModuleType, types.FunctionType, types.CodeType)
    return gc.is_tracked(item) and not isinstance(item, skipped)
