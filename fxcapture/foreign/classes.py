"""Classes of the modules that a foreign graph names, without importing anything.

Terms
    loaded: its Python module is in ``sys.modules``, or the class is alive otherwise.
    shell: a module of a class without anything in it.

Invariants
    What a class returns is known by the declared type of its ``forward``, and nothing
    else: no source is read, nothing is run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = [
    "declares_tensor",
    "is_of_torch",
    "loaded_classes",
    "module_classes",
    "shell",
]


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


def is_of_torch(cls: type | None) -> bool:
    """Whether a class is one of ``torch.nn``."""
    return cls is not None and cls.__module__.startswith("torch.nn.")


def declares_tensor(cls: type | None) -> bool:
    """Whether ``forward`` is declared to return one tensor that the call made.

    A decorated ``forward`` is not: what is declared is the function inside, and a
    decorator may return anything.
    """
    if cls is None or issubclass(cls, nn.Identity):  # it hands its argument back
        return False
    # Through the class dictionaries: a scripted class's forward is a descriptor.
    forward = next(
        c.__dict__["forward"] for c in cls.__mro__ if "forward" in c.__dict__
    )
    if hasattr(forward, "__wrapped__"):
        return False
    declared: Any = getattr(forward, "__annotations__", {}).get("return")
    if isinstance(declared, str):
        first, *names = declared.strip("'\"").split(".")
        declared = forward.__globals__.get(first)
        for name in names:
            declared = getattr(declared, name, None)
    return isinstance(declared, type) and issubclass(declared, torch.Tensor)


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
