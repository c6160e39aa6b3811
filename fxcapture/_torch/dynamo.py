"""What Dynamo says of a trace, what it caches by, and its exceptions.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["constant", "is_traced", "own_code", "recompile_limit"]


F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object and globals that nothing else has.

    Dynamo caches what it compiled by code object, keeps what it learned of shapes by
    the code's file, line and name, and puts compiled functions into the globals.  So
    the copy shares nothing with another, and takes all of it along when it goes.

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
    return made


def is_traced() -> bool:
    """Whether the code that asks is being traced.

    ``torch.compiler.is_compiling`` says so of the process: it is true in every thread
    while one of them compiles.  Dynamo takes ``is_dynamo_compiling`` for true where it
    traces, and it is false elsewhere; the tracers that run the code for real
    (non-strict export, ``make_fx``) have a dispatch mode on this thread.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def recompile_limit() -> int:
    """How often Dynamo compiles a function again, as the user has set it."""
    return int(torch._dynamo.config.recompile_limit)


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
