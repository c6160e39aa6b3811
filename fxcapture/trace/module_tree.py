"""Whether a module tree is still what it was."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch import nn

from fxcapture import _torch

__all__ = ["ModuleTree"]


@final
class ModuleTree:
    """A module tree as it was; no module is kept alive.

    Asked at each call, of every module: its loops run in C.

    Args:
        model: The root.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = list(map(weakref.ref, modules))
        self._state = _state(modules)

    def is_same(self) -> bool:
        """Whether each module is there, by the same names and of the same class."""
        modules = [ref() for ref in self._modules]
        found = [m for m in modules if m is not None]
        return len(found) == len(modules) and _state(found) == self._state


def _state(modules: Sequence[nn.Module]) -> list[Any]:
    """What a tree is like; equal for equal trees of modules that are alive."""
    # A scripted module's table of children is of another type, and nothing in it is
    # overridden.
    tables = [m._modules for m in modules if isinstance(m._modules, dict)]
    return [
        list(map(len, tables)),
        list(_chain(tables)),
        list(map(id, _chain([table.values() for table in tables]))),
        list(map(type, modules)),
        list(map(_torch.is_compiled_in_place, modules)),
    ]


_chain: Callable[[Any], Iterator[Any]] = itertools.chain.from_iterable
