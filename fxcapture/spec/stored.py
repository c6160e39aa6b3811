"""Objects that a stored document names, and what it takes to have them.

Terms
    stored name: ``module:qualname`` of a class or function, as documents spell it.
    trust: modules whose objects a document may name; each stands for itself and for
        everything below it.

Invariants
    Nothing is imported, fetched from a loaded module or called because a document says
    so; only because the caller trusts the module.  A class that is not trusted stands
    for itself by its name, and is found among the classes of a model's own modules.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
from collections.abc import Iterable
from typing import Any, final

from torch import nn

from fxcapture.errors import SpecError, SpecTypeError

__all__ = ["StoredClass", "Trust", "check_name", "import_name", "trusting"]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAX_NAME = 1000


def check_name(name: Any) -> str:
    """A stored name, as it is.

    Raises:
        SpecError: it is no ``module:qualname``.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise SpecError(
            f"{str(name)[:80]!r} names no object",
            why="expected a module's dotted name, a colon and a name in that module",
            remedy="write package.module:name",
        )
    return name


@final
@dataclasses.dataclass(frozen=True, slots=True)
class StoredClass:
    """A module class that is known by its stored name alone.

    Attributes:
        name: The stored name.
        certain: The document says that it is a class; else it may be any object.
    """

    name: str
    certain: bool = True

    def fits(self, module: nn.Module) -> bool:
        """Whether the class of a module, or one of its bases, has the name."""
        return any(_name_of(base) == self.name for base in type(module).__mro__)

    def __repr__(self) -> str:
        return self.name


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Trust:
    """Which modules a document may name objects of; see :func:`trusting`."""

    modules: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether a module, or one above it, is trusted."""
        return any(module == m or module.startswith(f"{m}.") for m in self.modules)

    def covers_name(self, name: str) -> bool:
        """Whether the module of a stored name is trusted."""
        return self.covers(name.partition(":")[0])

    def load(self, name: str) -> Any:
        """The object of a stored name, imported if need be.

        Raises:
            SpecError: its module is not trusted, or has no such object.
        """
        module = check_name(name).partition(":")[0]
        if not self.covers(module):
            raise SpecError(
                f"{name!r} is not trusted",
                why="a stored document names this object, and to have it would run "
                f"code of the module {module!r}",
                remedy=f'if you trust it, pass trust=["{module}"] where you read it '
                f"(--trust {module} on the command line)",
            )
        try:
            found = _fetch(name)
        except (ImportError, AttributeError) as error:
            raise SpecError(
                f"{name!r} cannot be imported",
                why=f"{type(error).__name__}: {error}",
                remedy="correct the name, or make the module importable",
            ) from error
        home = getattr(found, "__module__", None) or module
        # A trusted module's namespace also holds what it imports of others.
        if isinstance(found, types.ModuleType) or not self.covers(str(home)):
            raise SpecError(
                f"{name!r} is not trusted",
                why=f"it is a {type(found).__name__} that is not defined in a trusted "
                f"module, but in {home}",
                remedy="name the object where it is defined, and trust that module",
            )
        return found


def trusting(trust: Iterable[str] | Trust) -> Trust:
    """What a caller trusts.

    Args:
        trust: Names of modules; ``"pkg"`` and ``"pkg.*"`` both mean the module ``pkg``
            and every module below it.

    Raises:
        SpecTypeError: it is something else.
    """
    if isinstance(trust, Trust):
        return trust
    try:
        names: list[Any] = [trust] if isinstance(trust, str) else list(trust)
    except TypeError:
        names = [trust]
    modules = []
    for name in names:
        bare = name.removesuffix(".*") if isinstance(name, str) else ""
        if not _MODULE.fullmatch(bare):
            raise SpecTypeError(
                f"trust={trust!r} is not a list of modules",
                why=f"{name!r} is no dotted name",
                remedy='name modules: trust=["mypackage"] trusts it and all below it',
            )
        modules.append(bare)
    return Trust(tuple(modules))


def import_name(obj: Any) -> str:
    """``module:qualname`` of a class or function that can be imported again.

    Raises:
        SpecError: it is a lambda, is local to a function, or is not importable.
    """
    if isinstance(obj, StoredClass):
        return obj.name
    name = _name_of(obj)
    try:
        same = bool(_NAME.fullmatch(name)) and _fetch(name) is obj
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise SpecError(
            f"{obj!r} cannot be written to JSON",
            why="only an object that can be imported by name can be stored",
            remedy="define it at the top level of a module",
        )
    return name


def _name_of(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '')}:{getattr(obj, '__qualname__', '')}"


def _fetch(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for i, part in enumerate(qualname.split(".")):
        if i and not isinstance(found, type):
            # What a module imports, or a function holds, is not that module's own.
            raise AttributeError(f"{type(found).__name__} in {module!r} is no class")
        found = getattr(found, part)
    return found
