"""What decorated calls need of Dynamo beyond its public interface.

Tested on torch 2.13.0 and 2.14.1.  Nothing here imports Dynamo: a process that never
compiles never loads it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

__all__ = [
    "allow_collection_in_checkpoints",
    "begin_tracing",
    "end_collection",
    "end_piece",
    "outside_dynamo",
    "untraced",
]

F = TypeVar("F", bound=Callable[..., Any])

_SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


#: Traces under way that collect, innermost last, and the setting before the first.
_collecting: list[weakref.finalize[..., Any]] = []
_before: list[Any] = []


def allow_collection_in_checkpoints() -> None:
    """Let the running trace append to a list inside an activation checkpoint.

    Dynamo refuses, since the recomputation in backward would not append again; that is
    just what a record wants.  The setting is global, but traces exclude each other: it
    holds until ``end_collection``, or until a trace that was given up is cleaned up.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    if not _collecting:
        _before[:] = [getattr(torch._dynamo.config, _SETTING)]
        setattr(torch._dynamo.config, _SETTING, True)
    _collecting.append(weakref.finalize(context, _end))


def end_collection() -> None:
    """Take back the innermost ``allow_collection_in_checkpoints``."""
    if _collecting:
        _collecting[-1]()


def _end() -> None:
    _collecting[:] = [f for f in _collecting if f.alive]
    if not _collecting and _before:
        setattr(torch._dynamo.config, _SETTING, _before.pop())


_untraced: list[types.CodeType] = []
_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}


def untraced(function: F) -> F:
    """Keep Dynamo from compiling the frame of ``function`` by itself.

    What it calls may be compiled, and it may be traced as a part of its caller.  Takes
    effect with the first trace, so that nothing is imported before.
    """
    # By the code object: a mark on the function object, which the public decorators
    # leave, would keep it from being traced as a part of its caller too.
    _untraced.append(function.__code__)
    return function


def begin_tracing() -> None:
    """Make ``untraced`` take effect; called while a trace runs."""
    # Again with every trace, since torch._dynamo.reset() may take it back.
    for code in _untraced:
        torch._dynamo.eval_frame.skip_code(code)


def end_piece() -> None:
    """End the graph that is being traced; called in a trace only."""
    torch._dynamo.graph_break()  # type: ignore[no-untyped-call]


def outside_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, and let Dynamo compile nothing of it.

    After a graph break Dynamo compiles whatever Python runs next, also the preparation
    of a capture, which is of no use, of some cost, and guarded on values that change.
    """
    if get_eval_frame_callback() is None:
        return function(*args)
    if function not in _disabled:
        disable: Callable[..., Any] = torch.compiler.disable
        _disabled[function] = disable(function)
    return _disabled[function](*args)


untraced(outside_dynamo)
