r"""Which modules a target means.

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
stored class           every module whose class, or a base of it, has that module and
                       qualified name (:class:`fxcapture.spec.stored.StoredClass`)
predicate              every module for which ``predicate(path, module)`` is true
list or tuple          the union of its members
=====================  ==========================================================

A backslash takes the character behind it as it is, in a path and outside of the
brackets of a glob: ``r"re\:x"`` is the module ``re:x``, ``r"l\*"`` the module ``l*``
and no other, ``r"blocks.\*.*"`` the children of ``blocks.*``.  A regular expression
has backslashes of its own.

Invariants
    Matching is by whole segments, never by substring.  A module object is matched
    once, under its first path; an exact path may be any of its names
    (:mod:`fxcapture.spec.module_table` says what a path is).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from torch import nn

from fxcapture.errors import (
    AmbiguousTargetError,
    SpecError,
    SpecTypeError,
    TargetNotFoundError,
    nearest,
)
from fxcapture.spec.documents import shorten
from fxcapture.spec.globs import escape, glob, has_wildcard, masked, unescape
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.stored import StoredClass, Trust, check_name, import_name

__all__ = ["Predicate", "Selector", "Target"]

Predicate = Callable[[str, nn.Module], bool]
#: What a user may write as a target.
Target = "str | type[nn.Module] | Predicate | Sequence[Target]"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """A target in its frozen form.

    Attributes:
        parts: Alternatives, each a string, a module class, one that is known by its
            stored name, or a predicate.
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
            TargetNotFoundError: a part matches no module and ``optional`` is false, or
                the part is a name that could also be a predicate's.
            AmbiguousTargetError: a class name names unrelated classes of the model.
        """
        found: set[str] = set()
        for part in self.parts:
            paths = set(self._match_part(part, table))
            if not paths and not (optional and _may_be_absent(part)):
                raise self._not_found(part, table)
            found |= paths
        return tuple(path for path in table.first if path in found)

    def _match_part(self, part: Any, table: ModuleTable) -> Iterator[str]:
        if isinstance(part, str):
            yield from self._match_text(part, table)
        elif isinstance(part, StoredClass):
            yield from self._where(table, lambda _, module: part.fits(module))
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
        elif (named := table.named(text)) is not None:
            yield named
        elif has_wildcard(text):
            fits = glob(text)
            yield from (first for path, first in table.aliases.items() if fits(path))
        elif (named := table.named(unescape(text))) is not None:
            yield named
        elif text.isidentifier():
            yield from self._match_class_name(text, table)

    def names(self, path: str) -> bool:
        """Whether a part names the module at ``path`` exactly."""
        return any(
            isinstance(part, str)
            and not part.startswith("re:")
            and path in (part, unescape(part))
            for part in self.parts
        )

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
        paths: list[str] = []
        if isinstance(part, str):
            text = part[3:] if part.startswith("re:") else unescape(part)
            tail = text.rsplit(".", 1)[-1]
            paths = nearest(text, table.aliases) or nearest(tail, table.aliases)
            near = [
                f"{escape(p)!r} ({type(table.first[table.aliases[p]][1]).__name__})"
                for p in paths
            ]
            near += nearest(text, classes)
        elif isinstance(part, type):
            near = nearest(part.__name__, classes)
        elif isinstance(part, StoredClass):
            near = nearest(re.split(r"[.:]", part.name)[-1], classes)
        why = f"the model has {len(table.first)} modules and none fits"
        if self.layer_name is not None:
            why += f" with layer_name={self.layer_name!r}"
        remedy = (
            "name a module that exists (model.named_modules() lists them), or "
            "pass optional=True if it may be absent"
        )
        if isinstance(part, StoredClass):
            module = part.name.partition(":")[0]
            why += (
                f"; {part.name!r} was read from a document and is not trusted, so it "
                "stands for a class of that name among the model's own"
            )
            remedy += (
                "; if it is a predicate, or a class under another name, and you trust "
                f'it, pass trust=["{module}"] where you read the document'
            )
        elif isinstance(part, str) and any(escape(p) != p for p in paths):
            remedy += (
                "; a backslash takes a character of a module's name as it is, such as "
                + next(repr(escape(p)) for p in paths if escape(p) != p)
            )
        return TargetNotFoundError(
            f"target {_show(part)} matches no module",
            why=why,
            nearest=near,
            remedy=remedy,
        )

    def to_json(self) -> list[Any]:
        """The parts as JSON values; strings as they are, objects by import path.

        Raises:
            SpecError: a class or predicate cannot be imported by name.
        """
        return [
            p if isinstance(p, str) else {_kind(p): import_name(p)} for p in self.parts
        ]

    @staticmethod
    def from_json(parts: Sequence[Any], trust: Trust) -> list[Any]:
        """What :meth:`to_json` wrote, as targets again.

        Args:
            parts: JSON values.
            trust: Whose objects are imported; a class of another module is known by
                its stored name.

        Raises:
            SpecError: a part is no string and names no object.
        """
        return [p if isinstance(p, str) else _part_from_json(p, trust) for p in parts]

    def __str__(self) -> str:
        text = ", ".join(map(_show, self.parts))
        return text if len(self.parts) == 1 else f"[{text}]"


def _show(part: Any) -> str:
    if isinstance(part, str):
        return repr(part)
    return getattr(part, "__qualname__", None) or repr(part)


def _kind(part: Any) -> str:
    """Under which key a part is stored; classes too were once stored as objects."""
    if isinstance(part, StoredClass):
        return "class" if part.certain else "object"
    return "class" if isinstance(part, type) else "object"


def _part_from_json(stored: Any, trust: Trust) -> Any:
    kind = next(iter(stored), None) if isinstance(stored, Mapping) else None
    if kind not in ("class", "object") or len(stored) != 1:
        raise SpecError(
            f"target {shorten(stored)} is not a stored target",
            why='expected a string, {"class": "module:Name"} or '
            '{"object": "module:name"}',
            remedy="write it with CaptureSpec.to_json",
        )
    name = check_name(stored[kind])
    if trust.covers_name(name):
        return trust.load(name)
    return StoredClass(name, certain=kind == "class")


def _may_be_absent(part: Any) -> bool:
    """Whether no match means that there is none: a stored name may be a predicate's."""
    return not isinstance(part, StoredClass) or part.certain


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
            except (re.error, OverflowError, RecursionError, MemoryError) as error:
                raise SpecError(
                    f"target {part!r} is not a regular expression",
                    why=str(error),
                    remedy="correct the pattern after 're:'",
                ) from error
        elif (bare := masked(part)) != bare.strip() or ".." in bare:
            raise SpecError(
                f"target {part!r} is not a dotted path",
                why="it has empty or blank segments",
                remedy="write a path such as 'model.layers.0', or a glob",
            )
        return
    if isinstance(part, StoredClass):
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
