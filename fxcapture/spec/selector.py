"""Which modules a target means.

Grammar, in order of precedence (the first form that applies decides):

=====================  ==========================================================
written                means
=====================  ==========================================================
``"re:PATTERN"``       regular expression, matched against the whole path
exact dotted path      the module at that path; ``""`` is the model itself
glob                   ``*`` is one path segment, ``**`` any number of segments,
                       ``?`` and ``[...]`` as in a shell, inside one segment
class name             every module whose class, or a base of it, has that name;
                       tried only where a plain word matches no path
``nn.Module`` class    every module that is an instance of it
predicate              every module for which ``predicate(path, module)`` is true
list or tuple          the union of its members
=====================  ==========================================================

Terms
    path: the dotted path the user sees.  Wrappers put names between (``_orig_mod``,
        ``module`` of a DataParallel, ``_fsdp_wrapped_module``,
        ``_checkpoint_wrapped_module``); they are looked through.
    real path: the path as ``named_modules`` spells it, wrappers included.

Invariants
    Matching is by whole segments, never by substring.  A module object is matched
    once, under its first path; an exact path may be any of its names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch import nn

from fxcapture.errors import (
    AmbiguousTargetError,
    SpecError,
    SpecTypeError,
    TargetNotFoundError,
    nearest,
)

__all__ = ["ModuleTable", "Predicate", "Selector", "Target"]

Predicate = Callable[[str, nn.Module], bool]
#: What a user may write as a target.
Target = "str | type[nn.Module] | Predicate | Sequence[Target]"

# Names that a wrapper puts into a path.  ``module`` is one only below a wrapper class,
# since a model may well have an attribute of that name.
_WRAPPER_NAMES = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
_GLOB = re.compile(r"[*?\[]")


def _is_wrapper(parent: nn.Module, name: str) -> bool:
    if name in _WRAPPER_NAMES:
        return True
    return name == "module" and isinstance(
        parent, (nn.DataParallel, nn.parallel.DistributedDataParallel)
    )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    real_path: str
    module: nn.Module


@final
class ModuleTable:
    """Every module of a model under the paths a user sees.

    Args:
        model: The root; its path is ``""``.

    Attributes:
        first: Path to (real path, module): each object once, under its first name; a
            wrapper stands for what it wraps, except that of ``torch.compile``, which
            Dynamo looks through itself.
        aliases: Every path, further names of a shared module included, to the path
            in ``first``.
        inner: (path, module) of modules that a wrapper hides: same path, other object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.first: dict[str, tuple[str, nn.Module]] = {}
        self.aliases: dict[str, str] = {}
        self.inner: list[_Entry] = []
        path_of: dict[int, str] = {}
        for entry in _walk(model, "", "", set()):
            key = id(entry.module)
            if key in path_of:
                self.aliases.setdefault(entry.path, path_of[key])
            elif entry.path in self.first:
                path_of[key] = entry.path
                real, wrapper = self.first[entry.path]
                if "_orig_mod" in wrapper._modules:
                    self.first[entry.path] = (entry.real_path, entry.module)
                    entry = _Entry(entry.path, real, wrapper)
                self.inner.append(entry)
            else:
                path_of[key] = entry.path
                self.first[entry.path] = (entry.real_path, entry.module)
                self.aliases[entry.path] = entry.path

    def candidates(self) -> Iterator[_Entry]:
        """Each module object once, those behind wrappers included."""
        hidden: dict[str, list[_Entry]] = {}
        for entry in self.inner:
            hidden.setdefault(entry.path, []).append(entry)
        for path, (real, module) in self.first.items():
            yield _Entry(path, real, module)
            yield from hidden.get(path, ())


def _walk(module: nn.Module, path: str, real: str, above: set[int]) -> Iterator[_Entry]:
    """Depth first, every name of every module; none is entered inside itself."""
    yield _Entry(path, real, module)
    if id(module) in above:
        return
    above = above | {id(module)}
    for name, child in module._modules.items():
        if child is None:
            continue
        real_child = f"{real}.{name}" if real else name
        if _is_wrapper(module, name):
            yield from _walk(child, path, real_child, above)
        else:
            yield from _walk(
                child, f"{path}.{name}" if path else name, real_child, above
            )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """A target in its frozen form.

    Attributes:
        parts: Alternatives, each a string, a module class or a predicate.
        layer_name: With classes, class names and predicates: the trailing path
            segments a match must end with.
    """

    parts: tuple[Any, ...]
    layer_name: str | None = None

    @classmethod
    def of(cls, target: Any, layer_name: str | None = None) -> Selector:
        """Freeze what a user wrote.

        Raises:
            SpecTypeError: a part is of no kind the grammar knows.
            SpecError: a pattern is malformed, or the target is empty.
        """
        parts = tuple(_flatten(target))
        if not parts:
            raise SpecError(
                f"target {target!r} is empty", remedy="name at least one module"
            )
        for part in parts:
            _check_part(part)
        if layer_name is not None and not isinstance(layer_name, str):
            raise SpecTypeError(
                f"layer_name {layer_name!r} is not a string",
                remedy='write the attribute name, such as layer_name="cross_attn"',
            )
        return cls(parts, layer_name.strip(".") if layer_name else None)

    def match(self, table: ModuleTable, *, optional: bool = False) -> tuple[str, ...]:
        """Paths of the matched modules, in module order.

        Raises:
            TargetNotFoundError: a part matches no module and ``optional`` is false.
            AmbiguousTargetError: a class name names unrelated classes of the model.
        """
        found: set[str] = set()
        for part in self.parts:
            paths = set(self._match_part(part, table))
            if not paths and not optional:
                raise self._not_found(part, table)
            found |= paths
        return tuple(path for path in table.first if path in found)

    def _match_part(self, part: Any, table: ModuleTable) -> Iterator[str]:
        if isinstance(part, str):
            yield from self._match_text(part, table)
        elif isinstance(part, type):
            yield from self._where(table, lambda p, m: isinstance(m, part))
        else:
            yield from self._where(table, part)

    def _match_text(self, text: str, table: ModuleTable) -> Iterator[str]:
        if text.startswith("re:"):
            pattern = re.compile(text[3:])
            yield from (
                first
                for path, first in table.aliases.items()
                if pattern.fullmatch(path)
            )
        elif text in table.aliases:
            yield table.aliases[text]
        elif (stripped := _strip_wrappers(text, table)) is not None:
            yield stripped
        elif _GLOB.search(text):
            matcher = _glob(text)
            yield from (first for path, first in table.aliases.items() if matcher(path))
        elif text.isidentifier():
            yield from self._match_class_name(text, table)

    def _match_class_name(self, name: str, table: ModuleTable) -> Iterator[str]:
        named: dict[type, None] = {}
        for entry in table.candidates():
            for base in type(entry.module).__mro__:
                if base.__name__ == name:
                    named.setdefault(base)
        roots = [
            c for c in named if not any(c is not o and issubclass(c, o) for o in named)
        ]
        if len(roots) > 1:
            raise AmbiguousTargetError(
                f"target {name!r} names {len(roots)} unrelated classes of the model",
                why=", ".join(f"{c.__module__}.{c.__qualname__}" for c in roots),
                remedy="pass the class itself as the target, or a path or glob",
            )
        classes = tuple(roots)
        yield from self._where(table, lambda _, module: isinstance(module, classes))

    def _where(self, table: ModuleTable, wanted: Predicate) -> Iterator[str]:
        for entry in table.candidates():
            if self._has_layer_name(entry.path) and wanted(entry.path, entry.module):
                yield entry.path

    def _has_layer_name(self, path: str) -> bool:
        if self.layer_name is None:
            return True
        return f".{path}".endswith(f".{self.layer_name}")

    def _not_found(self, part: Any, table: ModuleTable) -> TargetNotFoundError:
        classes = {
            f"{c.__name__} (class)": None
            for entry in table.candidates()
            for c in [type(entry.module)]
        }
        near: list[str] = []
        if isinstance(part, str):
            text = part.removeprefix("re:")
            tail = text.rsplit(".", 1)[-1]
            near = nearest(text, table.aliases) or nearest(tail, table.aliases)
            near = [
                f"{p!r} ({type(table.first[table.aliases[p]][1]).__name__})"
                for p in near
            ]
            near += nearest(text, classes)
        elif isinstance(part, type):
            near = nearest(part.__name__, classes)
        why = f"the model has {len(table.first)} modules and none fits"
        if self.layer_name is not None:
            why += f" with layer_name={self.layer_name!r}"
        return TargetNotFoundError(
            f"target {_show(part)} matches no module",
            why=why,
            nearest=near,
            remedy="name a module that exists (model.named_modules() lists them), or "
            "pass optional=True if it may be absent",
        )

    def to_json(self) -> list[Any]:
        """The parts as JSON values; strings as they are, objects by import path.

        Raises:
            SpecError: a class or predicate cannot be imported by name.
        """
        return [
            p if isinstance(p, str) else {"object": import_name(p)} for p in self.parts
        ]

    @staticmethod
    def from_json(parts: Sequence[Any]) -> list[Any]:
        """What :meth:`to_json` wrote, as targets again."""
        return [p if isinstance(p, str) else import_object(p["object"]) for p in parts]

    def __str__(self) -> str:
        text = ", ".join(map(_show, self.parts))
        return text if len(self.parts) == 1 else f"[{text}]"


def _show(part: Any) -> str:
    if isinstance(part, str):
        return repr(part)
    return getattr(part, "__qualname__", None) or repr(part)


def _flatten(target: Any) -> Iterator[Any]:
    if isinstance(target, Selector):
        yield from target.parts
    elif isinstance(target, (list, tuple, set, frozenset)):
        for part in target:
            yield from _flatten(part)
    else:
        yield target


def _check_part(part: Any) -> None:
    if isinstance(part, str):
        if part.startswith("re:"):
            try:
                re.compile(part[3:])
            except re.error as error:
                raise SpecError(
                    f"target {part!r} is not a regular expression",
                    why=str(error),
                    remedy="correct the pattern after 're:'",
                ) from error
        elif part != part.strip() or ".." in part:
            raise SpecError(
                f"target {part!r} is not a dotted path",
                why="it has empty or blank segments",
                remedy="write a path such as 'model.layers.0', or a glob",
            )
        return
    if isinstance(part, type):
        if not issubclass(part, nn.Module):
            raise SpecTypeError(
                f"target {part.__qualname__} is a class, but not a module class",
                remedy="pass a subclass of torch.nn.Module",
            )
        return
    if isinstance(part, nn.Module):
        raise SpecTypeError(
            f"target is a module object ({type(part).__name__})",
            why="a spec holds no module, so that it can be hashed, stored and reused",
            remedy="pass its path or its class",
        )
    if not callable(part):
        raise SpecTypeError(
            f"target {part!r} is of type {type(part).__name__}",
            why="a target is a path, a glob, 're:...', a module class, a class name, a "
            "predicate (path, module) -> bool, or a list of these",
            remedy="pass one of these",
        )


def _strip_wrappers(text: str, table: ModuleTable) -> str | None:
    """The path that ``text`` means if it spells wrapper names out."""
    for path, (real, _) in table.first.items():
        if text == real:
            return path
    for entry in table.inner:
        if text == entry.real_path:
            return entry.path
    # A wrapper around the model itself is gone by now; its name may still be spelt out.
    bare = ".".join(s for s in text.split(".") if s not in _WRAPPER_NAMES)
    return table.aliases.get(bare) if bare != text else None


@functools.lru_cache(maxsize=256)
def _glob(pattern: str) -> Callable[[str], bool]:
    pieces = pattern.split(".")

    def matches(i: int, segments: Sequence[str]) -> bool:
        if i == len(pieces):
            return not segments
        if pieces[i] == "**":
            return any(matches(i + 1, segments[k:]) for k in range(len(segments) + 1))
        return (
            bool(segments)
            and fnmatch.fnmatchcase(segments[0], pieces[i])
            and matches(i + 1, segments[1:])
        )

    return lambda path: matches(0, path.split(".") if path else [])


def import_name(obj: Any) -> str:
    """``module:qualname`` of a class or function that can be imported again.

    Raises:
        SpecError: it is a lambda, is local to a function, or is not importable.
    """
    name = f"{getattr(obj, '__module__', '')}:{getattr(obj, '__qualname__', '')}"
    try:
        same = import_object(name) is obj
    except (ImportError, AttributeError, ValueError):
        same = False
    if not same:
        raise SpecError(
            f"{obj!r} cannot be written to JSON",
            why="only an object that can be imported by name can be stored",
            remedy="define it at the top level of a module",
        )
    return name


def import_object(name: str) -> Any:
    """The object that :func:`import_name` named."""
    module, _, qualname = name.partition(":")
    obj: Any = importlib.import_module(module)
    for part in qualname.split("."):
        obj = getattr(obj, part)
    return obj
