"""What decorated calls need of Dynamo beyond its public interface.

Tested on torch 2.13.0.  Nothing here imports Dynamo: a process that never compiles never
loads it.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

__all__ = [
    "allow_collection_in_checkpoints",
    "begin_tracing",
    "constant",
    "no_tracing",
    "outside_dynamo",
    "untraced",
]

F = TypeVar("F", bound=Callable[..., Any])

_SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which imports Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def no_tracing() -> AbstractContextManager[Any]:
    """While it is held, no other thread traces anything; this one may."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if module is None else module.compile_lock


def allow_collection_in_checkpoints() -> Callable[[], None]:
    """Let the running trace append to a list inside an activation checkpoint.

    Dynamo refuses, since the recomputation in backward would not append again; that is
    just what a record wants.  The setting is global, and traces exclude each other, so
    it is changed for this trace only.

    Returns:
        A function that takes the setting back; it also happens when the trace is given
        up without calling it.
    """
    config = torch._dynamo.config
    before = getattr(config, _SETTING)
    setattr(config, _SETTING, True)

    def restore(value: bool = before) -> None:
        setattr(config, _SETTING, value)

    context = torch._guards.TracingContext.try_get()
    if context is None:
        restore()
        return lambda: None
    finalizer = weakref.finalize(context, restore)
    return finalizer


_untraced: list[Callable[..., Any]] = []
_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}


def untraced(function: F) -> F:
    """Keep Dynamo from compiling the frame of ``function`` by itself.

    What it calls may be compiled, and it may be traced as a part of its caller.  Takes
    effect with the first trace, so that nothing is imported before.
    """
    # Dynamo goes by the code object; a mark on the function object itself would keep it
    # from being traced as a part of its caller too.
    _untraced.append(
        types.FunctionType(
            function.__code__,
            function.__globals__,
            closure=function.__closure__,
        )
    )
    return function


def begin_tracing() -> None:
    """Make ``untraced`` take effect; called while a trace runs."""
    while _untraced:
        torch.compiler.disable(_untraced.pop(), recursive=False)


def outside_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, and let Dynamo compile nothing of it.

    After a graph break Dynamo compiles whatever Python runs next, also the preparation
    of a capture, which is of no use, of some cost, and guarded on values that change.
    """
    if get_eval_frame_callback() is None:
        return function(*args)
    if function not in _disabled:
        _disabled[function] = torch.compiler.disable(function)
    return _disabled[function](*args)


untraced(outside_dynamo)
