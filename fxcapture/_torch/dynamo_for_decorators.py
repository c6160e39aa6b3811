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
    "begin_collection",
    "begin_nested",
    "end_collection",
    "end_nested",
    "local_of_trace",
    "outside_dynamo",
    "untraced",
]

F = TypeVar("F", bound=Callable[..., Any])

_SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def local_of_trace(name: str) -> Any:
    """The object that a local variable of the code that is being traced stands for.

    For functions that Dynamo calls while it traces and whose result is a constant.  To
    hand them the object as an argument would guard the trace on its identity, so that
    no two models could share one.

    Args:
        name: A local variable of the traced function that makes the call.
    """
    translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    variable: Any = translator.output.current_tx.symbolic_locals[name].realize()
    if hasattr(variable, "value"):
        return variable.value
    return translator.output.get_submodule(variable.module_key)


#: How deep each trace under way is in nested calls, see ``begin_nested``.
_depths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def begin_nested() -> bool:
    """Count a call that the running trace enters; whether it stands in another one.

    What is counted goes with the trace, also if that is given up.
    """
    for code in _untraced:
        # With every trace, since torch._dynamo.reset() may take it back.
        torch._dynamo.eval_frame.skip_code(code)
    context = torch._guards.TracingContext.get()
    depth = _depths.get(context, 0)
    _depths[context] = depth + 1
    return depth > 0


def end_nested() -> None:
    """Take back ``begin_nested``."""
    _depths[torch._guards.TracingContext.get()] -= 1


#: Traces under way that collect, innermost last, and the setting before the first.
_collecting: list[weakref.finalize[..., Any]] = []
_before: list[Any] = []


def begin_collection() -> None:
    """Let the running trace append to a list inside an activation checkpoint.

    Dynamo refuses, since the recomputation in backward would not append again; that is
    just what a record wants.  The setting is global, but traces exclude each other: it
    holds until ``end_collection``, or until a trace that was given up is cleaned up.
    """
    if not _collecting:
        _before[:] = [getattr(torch._dynamo.config, _SETTING)]
        setattr(torch._dynamo.config, _SETTING, True)
    context = torch._guards.TracingContext.get()
    _collecting.append(weakref.finalize(context, _end))


def end_collection() -> None:
    """Take back the innermost ``begin_collection``."""
    if _collecting:
        _collecting[-1]()


def _end() -> None:
    _collecting[:] = [f for f in _collecting if f.alive]
    if not _collecting and _before:
        setattr(torch._dynamo.config, _SETTING, _before.pop())


_untraced: list[types.CodeType] = []


def untraced(function: F) -> F:
    """Keep Dynamo from compiling the frame of ``function`` by itself.

    What it calls may be compiled, and it may be traced as a part of its caller.  Takes
    effect with the first trace, so that nothing is imported before.
    """
    # By the code object: a mark on the function object, which the public decorators
    # leave, would keep it from being traced as a part of its caller too.
    _untraced.append(function.__code__)
    return function


def outside_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, and let Dynamo compile nothing of it.

    After a graph break Dynamo compiles whatever Python runs next, also the preparation
    of a capture, which is of no use, of some cost, and guarded on values that change.
    """
    if get_eval_frame_callback() is None:
        return function(*args)
    if not _disabled_call:
        disable: Callable[..., Any] = torch.compiler.disable
        _disabled_call.append(disable(_call))
    return _disabled_call[0](function, *args)


def _call(function: Callable[..., Any], /, *args: Any) -> Any:
    return function(*args)


#: ``_call`` as Dynamo leaves it alone: one for all functions, so that none is kept.
_disabled_call: list[Callable[..., Any]] = []

untraced(outside_dynamo)


def end_piece() -> None:
    """End the graph that is being traced; called in a trace only."""
    torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
