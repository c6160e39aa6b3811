"""One function call inside of a module: its name, its arguments, its marks.

Terms
    called: what the code calls: a function, a method of a tensor, or an operator.
    argument: what a call passes for a parameter, named as in the signature of a Python
        function, or else in the schema of the operator that it stands for.

Invariants
    Only calls that return a tensor, or a container with one, count.  A call that the
    compiler makes of its own is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxcapture import _torch
from fxcapture.spec.function import canonical_name, is_reflected
from fxcapture.trace.signature import (
    Parameters,
    argument,
    parameters_of_function,
)

__all__ = [
    "argument_of",
    "holds_tensor",
    "name_of",
    "own_name",
    "parameters_of",
    "writes_to_arguments",
]


def name_of(called: Any) -> str:
    """The name of what the code calls; empty for what is no function call of its own.

    Dynamo takes it for a constant of the called object.
    """
    return _name_of(called)


@_torch.constant
def _name_of(called: Any) -> str:
    if isinstance(called, str):
        return canonical_name(called)
    name = _torch.operator_name_of(called)
    if name is None:
        name = getattr(called, "__name__", "")
    return "" if name in _ATTRIBUTES else canonical_name(name)


#: Reading an attribute of a tensor: to torch a call of the property's getter, in a
#: graph of Dynamo's a node of these.
_ATTRIBUTES = frozenset({"__get__", "__set__", "getattr", "_get_data_attr"})


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor or a container with one in it."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return any([holds_tensor(v) for v in value])  # noqa: C419 - Dynamo traces it
    return False


@_torch.constant
def writes_to_arguments(called: Any, keywords: Sequence[str]) -> bool:
    """Whether a call may write to what it receives: an in-place form, or ``out=``."""
    name = called if isinstance(called, str) else getattr(called, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    reads = name.startswith("__") and not name.startswith(("__i", "__set"))
    return (
        in_place
        or "out" in keywords
        or "inplace" in keywords
        or (name.strip("_") in _IN_PLACE_NAMES and not reads)
    )


_IN_PLACE_NAMES = frozenset({
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand",
    "ior", "ixor", "ilshift", "irshift", "setitem",
})  # fmt: skip


def argument_of(
    called: Any, which: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One argument of a call; can be traced.

    Args:
        called: What is called.
        which: The parameter, by position or name.
        args: What the call passes by position.
        kwargs: What it passes by keyword.
    """
    parameters, which, reverses, names = _looked_up(
        called, which, len(args), tuple(kwargs)
    )
    if reverses:
        args = (args[1], args[0], *args[2:])
    named = dict(zip(names, kwargs.values(), strict=True))
    return argument(parameters, which, args, named)


@_torch.constant
def _looked_up(
    called: Any, which: int | str, number: int, keywords: tuple[str, ...]
) -> tuple[Parameters, int | str, bool, list[str]]:
    """How to find one argument of a call.

    Returns:
        The parameters; the wanted one by its name there; whether the operands swap;
        and the names there of the arguments that are passed by keyword.
    """
    parameters = parameters_of(called, number)
    name = called if isinstance(called, str) else getattr(called, "__name__", "")
    if isinstance(which, str):
        which = own_name(parameters, which)
    names = [own_name(parameters, keyword) for keyword in keywords]
    return parameters, which, is_reflected(name), names


#: Names by which torch takes the same argument: a method's first is ``self``, the
#: function's ``input``, and there are those that NumPy has.
_SAME = (
    frozenset({"self", "input", "x", "a", "x1"}),
    frozenset({"other", "x2"}),
    frozenset({"dim", "axis"}),
    frozenset({"keepdim", "keepdims"}),
)


def own_name(parameters: Parameters, name: str) -> str:
    """The name that a parameter has among these, of those that torch takes for it."""
    if name not in parameters.names:
        for same in _SAME:
            if name in same:
                return next((n for n in parameters.names if n in same), name)
    return name


def parameters_of(called: Any, number: int = 0) -> Parameters:
    """The parameters of what the code calls.

    Args:
        called: A function, or the name of a tensor's method.
        number: How many arguments are passed by position.
    """
    try:
        found = _signature(called)
    except TypeError:  # not hashable
        found = None
    if found is not None:
        return found
    name = _name_of(called)
    best: Parameters | None = None
    for schema in _torch.schemas_of(called) or _torch.schemas_of_name(name):
        names = tuple(a.name for a in schema.arguments)
        positional = sum(not a.kwarg_only for a in schema.arguments)
        defaults = tuple(
            a.default_value
            if isinstance(a.default_value, (bool, int, float, str))
            else None
            for a in schema.arguments
        )
        made = Parameters(names, defaults, False, False, positional)
        if best is None or (best.positional < number <= positional):
            best = made
    return best or Parameters((), (), True, True)


@functools.lru_cache(maxsize=1024)
def _signature(called: Any) -> Parameters | None:
    """The signature of a Python function; ``None`` where an operator's schema rules."""
    if isinstance(called, str) or not inspect.isfunction(called):
        return None
    if called.__module__ == "torch._tensor" and called.__name__.startswith("__"):
        return None  # an operator's wrapper, of ``(*args, **kwargs)``
    found = parameters_of_function(called)
    if found.takes_more or found.takes_named:
        # A wrapper, or around a method that is no Python function: ``__pow__``.
        wrapped: Callable[..., Any] | None = getattr(called, "__wrapped__", None)
        found = found if wrapped is None else parameters_of_function(wrapped)
    return None if found.takes_more and not found.names else found
