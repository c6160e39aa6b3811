"""What Dynamo says of a trace, what it caches by, and its exceptions.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    get_eval_frame_callback,
    reset_code,
)

__all__ = [
    "constant",
    "end_piece",
    "is_traced",
    "is_written_down",
    "no_tracing",
    "outside_dynamo",
    "own_code",
    "recompile_limit",
    "skip_untraced",
    "untraced",
]


F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def no_tracing() -> contextlib.AbstractContextManager[Any]:
    """While it is held, no other thread traces anything; this one may."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if module is None else module.compile_lock


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object and globals that nothing else has.

    Dynamo caches what it compiled by code object, keeps what it learned of shapes by
    the code's file, line and name, and puts compiled functions into the globals.  So
    the copy shares nothing with another, and takes all of it along when it goes: what
    was compiled too, although Dynamo's cache of instructions keeps the code object.

    Args:
        function: A Python function.
        name: A name that is the same in the next process, for caches on disk.
    """
    assert isinstance(function, types.FunctionType)
    made = types.FunctionType(
        function.__code__.replace(co_name=name, co_qualname=name),
        dict(function.__globals__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    weakref.finalize(made, _drop_compiled, made.__code__).atexit = False
    return made


def _drop_compiled(code: types.CodeType) -> None:
    """Free what Dynamo compiled of a code object that runs no more.

    The guards too: finalisers of objects that they looked at, functions of torch among
    them, keep their Python side for ever.  Dynamo itself lets go of it only where one
    of these objects dies while the compiled code is there.
    """
    guards = [entry.guard_manager for entry in _debug_get_cache_entry_list(code)]
    reset_code(code)
    for manager in guards:
        vars(manager).clear()
        manager.cache_entry = manager.extra_state = None


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


@untraced
def is_traced() -> bool:
    """Whether the code that asks is being traced.

    ``torch.compiler.is_compiling`` says so of the process: it is true in every thread
    while one of them compiles.  Dynamo takes ``is_dynamo_compiling`` for true where it
    traces, and it is false elsewhere; the tracers that run the code for real
    (non-strict export, ``make_fx``) have a dispatch mode on this thread.

    Never compiled by itself, which would make it true: in a frame that Dynamo does not
    trace, it still compiles what the frame calls.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def recompile_limit() -> int:
    """How often Dynamo compiles a function again, as the user has set it."""
    return int(torch._dynamo.config.recompile_limit)


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


def skip_untraced() -> None:
    """Make ``untraced`` take effect; called with every trace.

    With every one, since ``torch._dynamo.reset()`` may take it back.
    """
    for code in _untraced:
        torch._dynamo.eval_frame.skip_code(code)


def is_written_down() -> bool:
    """Whether a tracer writes down the operators that this thread calls.

    Dynamo does not: it runs them on tensors without data to learn their results.
    """
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


def __getattr__(name: str) -> Any:
    # Dynamo's exceptions, looked up on first use: importing fxcapture must not import
    # Dynamo.
    names = {
        "BackendCompilerFailed": "BackendCompilerFailed",
        "DynamoError": "TorchDynamoException",
        "RecompileLimitHit": "FailOnRecompileLimitHit",
        "Unsupported": "Unsupported",
        "UserError": "UserError",
        "TensorifyRestart": "TensorifyScalarRestartAnalysis",
    }
    if name in names:
        from torch._dynamo import exc

        return getattr(exc, names[name])
    if name == "DataDependentError":
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        return GuardOnDataDependentSymNode
    raise AttributeError(name)
