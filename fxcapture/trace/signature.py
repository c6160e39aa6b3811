"""The parameters of a module's ``forward``, and the arguments of one call.

Terms
    argument: what a call passes for a parameter, however it is passed, or the
        parameter's default.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "NoArgument",
    "Parameters",
    "argument",
    "describe_forward",
    "has_forward",
    "parameters_of_function",
]


class NoArgument:
    """Stands for an argument of a call that cannot be told, or does not exist."""


_NO_ARGUMENT = NoArgument()


class Parameters(NamedTuple):
    """Parameters of a ``forward``; ``self`` is none.

    Attributes:
        names: Those that have a name, in order.
        defaults: Their default values; ``None`` for one that is no plain constant.
        takes_more: It has ``*args``.
        takes_named: It has ``**kwargs``.
        positional: How many of ``names`` may be passed by position: the first ones.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    takes_more: bool
    takes_named: bool
    positional: int = 0


def describe_forward(module: nn.Module) -> Parameters:
    """The parameters of a module's ``forward``.

    A library that puts a ``forward(*args, **kwargs)`` of its own into the instance
    hides them; then those of the class's ``forward`` are meant.
    """
    found = parameters_of_function(module.forward)
    if not found.names and found.takes_more and "forward" in module.__dict__:
        behind = parameters_of_function(getattr(type(module), "forward", None), skip=1)
        found = behind if behind.names else found
    return found


def parameters_of_function(function: Any, skip: int = 0) -> Parameters:
    """The parameters of any function; of one without a signature, none by name.

    Args:
        function: The function.
        skip: How many of the first ones are no parameters of a call: ``self``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):  # builtin or scripted: no signature to read
        return Parameters((), (), True, True)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    plain = (bool, int, float, str)
    return Parameters(
        tuple(p.name for p in named),
        tuple(p.default if isinstance(p.default, plain) else None for p in named),
        any(p.kind is p.VAR_POSITIONAL for p in parameters),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        sum(p.kind is not p.KEYWORD_ONLY for p in named),
    )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a container such as ``ModuleList`` cannot."""
    if "forward" in module.__dict__:
        return True
    # Through the class dictionaries: a scripted module's ``forward`` is a descriptor
    # that works on instances only.
    owner = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    return owner is not nn.Module


def argument(
    parameters: Parameters,
    which: int | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One argument of a call; can be traced.

    Args:
        parameters: Those of the module's ``forward``.
        which: The parameter, by position or name.
        args: What the call passes by position.
        kwargs: What it passes by keyword.
    """
    names, defaults, _, _, positional = parameters
    if isinstance(which, int):
        if which < len(args):
            return args[which]
        if which >= len(names):
            return _NO_ARGUMENT
        name = names[which]
    else:
        name = which
    if name in kwargs:
        return kwargs[name]
    if name not in names:
        return _NO_ARGUMENT
    position = names.index(name)
    if position < len(args) and position < positional:
        return args[position]
    return defaults[position]
