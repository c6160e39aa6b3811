"""Function transforms: vmap, grad, jvp.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "in_transform",
    "indexing_by_tensors",
    "is_transformed",
    "transform_function",
]


def transform_function(name: str) -> Callable[..., Any]:
    """What Dynamo's graphs call to take a value out of a function transform."""
    from torch._functorch import predispatch

    return getattr(predispatch, name)  # type: ignore[no-any-return]


def is_transformed(value: torch.Tensor) -> bool:
    """Whether a tensor belongs to a level of a function transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def in_transform() -> bool:
    """Whether a function transform (``vmap``, ``grad``, ...) runs eagerly around us."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def indexing_by_tensors() -> contextlib.AbstractContextManager[Any]:
    """A time in which ``t[i]`` works with a scalar tensor that vmap has batched.

    What ``flex_attention`` itself holds around the functions that it is given.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
