"""Example arguments of a model, as the functions that do not run it take them.

``captured(*args, **kwargs)`` takes a model's arguments as the model does; a function
that has options of its own takes them as a tuple and a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxcapture.errors import SpecTypeError

__all__ = ["example_arguments"]


def example_arguments(
    args: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call of a model.

    Args:
        args: A sequence of arguments, or one tensor for a model that takes one.
        kwargs: Keyword arguments.

    Raises:
        SpecTypeError: one of the two is something else.
    """
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(args, Mapping):
        raise SpecTypeError(
            f"args is of type {type(args).__name__}",
            why="arguments by name are kwargs",
            remedy="pass kwargs=..., or (mapping,) if the model takes it as it is",
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise SpecTypeError(
            f"args is of type {type(args).__name__}",
            remedy="pass a tuple of the model's positional arguments",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecTypeError(
            f"kwargs is of type {type(kwargs).__name__}",
            why="it holds the model's keyword arguments by name",
            remedy="pass a mapping; positional arguments stand in one tuple in front",
        )
    return tuple(args), dict(kwargs or {})
