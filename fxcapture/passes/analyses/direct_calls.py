"""Which nodes stand in a direct call of an inner module, ``child.forward(x)``.

Such a call does not show in the tree of modules that a node tells of.  The lines of
code that made the node show it: one lies in the code of the inner module's ``forward``,
and the line that calls it says so.  (A module that the code makes on the way, and that
is in no tree, may have the same code: its calls are those of the module around.)
"""

from __future__ import annotations

import inspect
import re
import types
from typing import Any, NamedTuple

from torch import fx, nn

__all__ = ["Lines", "forwards_inside", "stands_in"]

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in .*\n(.*)')


class Lines(NamedTuple):
    """Where the code of a function stands."""

    file: str
    first: int
    last: int


def forwards_inside(module: nn.Module) -> tuple[frozenset[Lines], frozenset[Lines]]:
    """The code of ``forward`` of a module, and of the modules inside of it.

    Code that both have is the module's own: a call of it cannot be told.
    """
    own = frozenset(_forwards(type(module)))
    inner = frozenset(
        lines for cls in {type(m) for m in module.modules()} for lines in _forwards(cls)
    )
    return own, inner - own


def _forwards(cls: type) -> list[Lines]:
    found = []
    for base in cls.__mro__:
        function: Any = base.__dict__.get("forward")
        code = getattr(inspect.unwrap(function), "__code__", None) if function else None
        if isinstance(code, types.CodeType):
            lines = [line for *_, line in code.co_lines() if line is not None]
            found.append(Lines(code.co_filename, min(lines), max(lines)))
    return found


def stands_in(node: fx.Node, code: tuple[frozenset[Lines], frozenset[Lines]]) -> bool:
    """Whether a node was made by a direct call of an inner module.

    Args:
        node: A node that stands in the module, by the tree of modules.
        code: What :func:`forwards_inside` says of the module.
    """
    own, inner = code
    inside, caller = False, ""
    for file, line, text in _FRAME.findall(node.stack_trace or ""):
        if _lies_in(file, int(line), own):
            inside = False  # what is around the module does not count
        elif _lies_in(file, int(line), inner) and ".forward(" in caller:
            inside = True
        caller = text
    return inside


def _lies_in(file: str, line: int, code: frozenset[Lines]) -> bool:
    return any(c.file == file and c.first <= line <= c.last for c in code)
