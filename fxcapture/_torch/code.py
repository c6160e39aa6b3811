"""Code objects, by which Dynamo keeps what it has compiled and learned.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["own_code"]

F = TypeVar("F", bound=Callable[..., Any])


def own_code(function: F, name: str) -> F:
    """The same function with a code object that nothing else has.

    Dynamo caches by code object, with a limit for each, so that functions which share
    one use up each other's limit.  What it has learned of shapes it keeps by file, line
    and name of the code.

    Args:
        function: The function.
        name: Of the code object; the same in the next process, so that caches on disk
            still hold.
    """
    assert isinstance(function, types.FunctionType)
    made = types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made  # type: ignore[return-value]
