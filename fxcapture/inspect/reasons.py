"""Reasons that stem from Dynamo, in few words and with the names of the user's model.

Dynamo's own text has a heading, then explanations, hints, links and the user's stack;
it calls inputs of a graph ``l_model_modules_layers_modules_0_parameters_weight_``.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["one_line", "with_user_names"]

_MEMBER = re.compile(r"\bl_model((?:_(?:modules|parameters|buffers)_\w+?)+)_(?!\w)")
_ARGUMENT = re.compile(r"\bl_(?:args_(\d+)|kwargs_(\w+?))_(?!\w)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in \w+\n +(\S.*)')


def one_line(reason: str | None) -> str:
    """The heading, and the innermost line of the user's code; empty without a reason.

    Example::

        Data-dependent branching (net.py, line 36: if h.sum() > 0:)
    """
    text = (reason or "").strip()
    if not text:
        return ""
    heading = text.splitlines()[0].strip()
    places = _PLACE.findall(text.partition("from user code:")[2])
    if not places:
        return heading
    file, line, code = places[-1]
    return f"{heading} ({Path(file).name}, line {line}: {code})"


def with_user_names(reason: str) -> str:
    """A reason with the paths of parameters and the names of arguments.

    Example::

        shares memory with the model's 'layers.0.weight'
    """

    def member(match: re.Match[str]) -> str:
        path = re.sub(r"_(modules|parameters|buffers)_", ".", match[1]).strip(".")
        return f"the model's {path!r}"

    def argument(match: re.Match[str]) -> str:
        return f"the argument {match[1] or repr(match[2])}"

    reason = reason.replace("the input l_", "l_")
    return _ARGUMENT.sub(argument, _MEMBER.sub(member, reason))
