"""Classes of the modules that a foreign graph names, without importing anything.

Terms
    loaded: its Python module is in ``sys.modules``, or the class is alive otherwise.
    shell: a module of a class without anything in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["loaded_classes", "module_classes", "shell"]


@functools.lru_cache(maxsize=1024)
def loaded_classes(name: str) -> tuple[type, ...]:
    """The loaded classes of this dotted name."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:i]))
        if found is None:
            continue
        for part in parts[i:]:
            found = getattr(found, part, None)
        if isinstance(found, type):
            return (found,)
        break
    return tuple(
        cls
        for cls in module_classes()
        if f"{cls.__module__}.{cls.__qualname__}" == name
    )


def module_classes() -> Iterator[type]:
    """Every loaded module class."""
    stack = [nn.Module]
    seen: set[type] = set()
    while stack:
        for cls in type.__subclasses__(stack.pop()):
            if cls not in seen:
                seen.add(cls)
                stack.append(cls)
                yield cls


def shell(cls: type | None, name: str) -> nn.Module:
    """A module of a class without anything in it; never called.

    Selectors match by class and path, and this has both.
    """
    if cls is None or not issubclass(cls, nn.Module):
        cls = type(name or "Module", (nn.Module,), {"forward": _no_forward})
    made: nn.Module = object.__new__(cls)
    nn.Module.__init__(made)
    return made


def _no_forward(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError
