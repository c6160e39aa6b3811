"""What decorated calls need of Dynamo beyond its public interface.

Tested on torch 2.13.0 and 2.14.1.  Nothing here imports Dynamo: a process that never
compiles never loads it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fxcapture._torch.dynamo import outside_dynamo, skip_untraced, untraced

__all__ = [
    "begin_collection",
    "begin_nested",
    "end_collection",
    "end_nested",
    "local_of_trace",
    "outside_dynamo",
    "untraced",
]

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
    skip_untraced()
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
