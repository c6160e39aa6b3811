"""Which tensors share memory, and how they lie in it.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxcapture._torch.transforms import is_transformed

__all__ = ["is_dense", "is_recorded", "storage_id", "surely_equal", "version_of"]


def storage_id(value: torch.Tensor) -> int | None:
    """A number that two tensors share where they share memory; ``None`` if unknown.

    Public storages can be compared by address only, and fake tensors have none.
    """
    if is_transformed(value):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, wrapped by a transform, ...
        return None


def surely_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are equal whatever the symbolic ones turn out to be.

    ``==`` on symbolic sizes would add a guard.
    """
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(left == right)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor's elements surely lie side by side, none of them twice."""
    expected: Any = 1
    dims = [
        (stride, size)
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if not surely_equal(size, 1)
    ]
    while dims:
        match = next((d for d in dims if surely_equal(d[0], expected)), None)
        if match is None:
            return False
        dims.remove(match)
        expected = expected * match[1]
    return True


def version_of(value: torch.Tensor) -> int:
    """How often something has written to a tensor, or to what it shares memory with."""
    return value._version


def is_recorded(value: torch.Tensor) -> bool:
    """Whether autograd has recorded how a tensor was made, and in memory of its own.

    A view of a leaf shares the memory of a parameter, or of what the caller passed.
    """
    if value.grad_fn is None:
        return False
    return not value._is_view() or value._base is None or not value._base.is_leaf


def is_subclass(value: torch.Tensor) -> bool:
    """Whether a tensor is of a class that decides itself which operators it knows."""
    if value.is_nested:
        return True
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return is_traceable_wrapper_subclass(value)
