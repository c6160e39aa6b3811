"""The stack of function modes of this thread.

Public torch tells of the innermost mode only by entering one.  Dynamo traces both.
Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode

__all__ = [
    "call_without_modes",
    "function_mode",
    "num_function_modes",
    "traceable",
]


def num_function_modes() -> int:
    """How many function modes are active in this thread."""
    return torch._C._len_torch_function_stack()


def call_without_modes(
    kind: type,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call something while the function modes of one class are not active.

    A mode would see what compiled code calls, and Dynamo would trace it as well.
    """
    modes: list[Any] = []
    try:
        while num_function_modes():
            modes.insert(0, _pop_mode())  # type: ignore[no-untyped-call]
        for mode in [mode for mode in modes if not isinstance(mode, kind)]:
            _push_mode(mode)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)
    finally:
        for _ in range(num_function_modes()):
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]


def traceable(called: Any) -> Any:
    """What a function mode calls in place of a function that Dynamo cannot trace there.

    ``Tensor.unflatten`` is written in Python and calls its base class's by ``super()``.
    """
    if torch.compiler.is_dynamo_compiling() and called is torch.Tensor.unflatten:
        return torch.unflatten
    return called


def function_mode(index: int) -> Any:
    """One of them; the last is the innermost."""
    return torch._C._get_function_stack_at(index)
