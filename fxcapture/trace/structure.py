"""The shape of a module's output, apart from its tensors.

A graph carries tensors and integers, nothing else; what a module returns may be a
tuple, a dict, a dataclass, a mix of them with Python values between.  ``encode`` takes
such a value apart while it is traced: tensors go to one list, integers (which may be
symbolic) to another, and the rest becomes a short string.  ``parse`` turns the string
into a ``Structure`` and ``Structure.build`` puts a value of the same shape together
again from other tensors.

Terms
    leaf: a tensor, an integer, or a constant (``None``, bool, float, str, dtype, ...).
    opaque leaf: any other object, such as a key-value cache.  It is recorded by its
        class only; asking for it is an error.

Invariants
    ``encode`` uses only what Dynamo traces without a guard of its own: ``isinstance``,
    iteration, string formatting, and two functions whose result is a constant.
    Containers are rebuilt without running their constructors, so a rebuilt dataclass
    never validates or computes anything twice.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from fxcapture import _torch
from fxcapture.errors import ElementError, UnsupportedOutputError, nearest

__all__ = ["Structure", "build_container", "encode", "parse"]

_MAX_DEPTH = 24

# Classes and constants that structures mention, by number.  They are kept for the life
# of the process: one entry for each distinct class or constant that a captured module
# has ever returned, so it stays small.
_objects: list[Any] = []
_objects_lock = threading.Lock()


@_torch.constant
def _number(obj: Any) -> int:
    """A process-wide number for a class or a hashable constant."""
    with _objects_lock:
        for i, known in enumerate(_objects):
            if known is obj or (type(known) is type(obj) and known == obj):
                return i
        _objects.append(obj)
        return len(_objects) - 1


def encode(value: Any, tensors: list[Any], sizes: list[Any], depth: int = 0) -> str:
    """Take ``value`` apart; traced by Dynamo, so written in its plainest Python.

    Args:
        value: What a module returned or received.
        tensors: Receives the tensor leaves, in order; not copied.
        sizes: Receives the integer leaves (int or SymInt), in order.
        depth: Nesting so far; containers nested deeper than 24 become opaque.

    Returns:
        The structure as text, for :func:`parse`.
    """
    if value is None:
        return "N"
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "T"
    if isinstance(value, (enum.Enum, torch.dtype, torch.device)):
        return f"K{_number(value)}"
    if isinstance(value, bool):
        return "B1" if value else "B0"
    if isinstance(value, (int, torch.SymInt)):  # outside Dynamo a SymInt is no int
        sizes.append(value)
        return "I"
    if isinstance(value, str):
        return f"s{value!r}"
    if isinstance(value, float):
        return f"f{str(value)!r}"
    if depth > _MAX_DEPTH:
        return f"O{_number(type(value))}"
    if isinstance(value, dict):
        kind = "d" if type(value) is dict else f"D{_number(type(value))}"
        items = [
            f"{k!r}:{encode(v, tensors, sizes, depth + 1)}" for k, v in value.items()
        ]
        return kind + "{" + ",".join(items) + "}"
    if isinstance(value, (list, tuple)):
        cls = type(value)
        kind = "t" if cls is tuple else "l" if cls is list else f"S{_number(cls)}"
        items = [encode(v, tensors, sizes, depth + 1) for v in value]
        return kind + "(" + ",".join(items) + ")"
    if dataclasses.is_dataclass(value):
        items = []
        for field in dataclasses.fields(value):
            part = getattr(value, field.name, None)
            items.append(f"{field.name!r}:{encode(part, tensors, sizes, depth + 1)}")
        return f"C{_number(type(value))}" + "{" + ",".join(items) + "}"
    return f"O{_number(type(value))}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """One node of an output's shape.

    Attributes:
        kind: ``"tensor"``, ``"int"``, ``"const"``, ``"opaque"``, ``"sequence"``,
            ``"dict"`` or ``"dataclass"``.
        cls: The container's class, or the class of an opaque leaf.
        keys: Keys of a dict or field names of a dataclass, in order.
        children: The parts, in order.
        index: For a tensor or integer leaf, its place in the list it went to.
        value: For a constant leaf, the constant.
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    index: int = -1
    value: Any = None

    def leaves(self, kind: str) -> Iterator[int]:
        """Indices of the leaves of one kind (``"tensor"`` or ``"int"``), in order."""
        if self.kind == kind:
            yield self.index
        for child in self.children:
            yield from child.leaves(kind)

    def opaque(self, path: str = "") -> tuple[str, type] | None:
        """Where the first opaque leaf stands, and its class; ``None`` if none does."""
        if self.kind == "opaque":
            return path, self.cls or object
        names = self.keys or range(len(self.children))
        for name, child in zip(names, self.children, strict=True):
            found = child.opaque(f"{path}[{name!r}]")
            if found is not None:
                return found
        return None

    def build(
        self,
        tensor: Callable[[int], Any],
        size: Callable[[int], Any],
    ) -> Any:
        """A value of this shape, with leaves taken from ``tensor`` and ``size``.

        Args:
            tensor: Leaf index to tensor; the tensor is stored as it is, not copied.
            size: Leaf index to int.

        Raises:
            UnsupportedOutputError: the structure holds an opaque leaf.
        """
        if self.kind == "tensor":
            return tensor(self.index)
        if self.kind == "int":
            return size(self.index)
        if self.kind == "const":
            return self.value
        if self.kind == "opaque":
            raise UnsupportedOutputError(
                f"a value of class {self.cls.__name__ if self.cls else '?'} cannot be "
                "recorded",
                why="a graph returns tensors, integers and constants only",
                remedy="name a tensor element of the output with output=",
            )
        values = [child.build(tensor, size) for child in self.children]
        return build_container(self.kind, self.cls or object, self.keys, values)

    def element(self, name: int | str | None, what: str) -> Structure:
        """The part that ``output=name`` means.

        A value that is not a container is taken whole by 0, for layers that return a
        tuple in one version and its only element in the next; nothing else names it.

        Args:
            name: Position, key, field name, or ``None`` for the whole.
            what: The value in words, for the error message.

        Raises:
            ElementError: the value has no such part.
        """
        if name is None:
            return self
        is_size = self.cls is not None and issubclass(self.cls, torch.Size)
        if is_size or self.kind in ("tensor", "int", "const", "opaque"):
            if name == 0:
                return self
            raise self._no_element(name, what, f"{self.describe()} has no elements")
        if self.kind == "sequence":
            return self._element_of_sequence(name, what)
        if name in self.keys:
            return self.children[self.keys.index(name)]
        if isinstance(name, int):
            # Hugging Face's ModelOutput counts the fields that are not None, so that
            # out[0] is its first value; the same for a dataclass.
            present = [
                c for c in self.children if c.kind != "const" or c.value is not None
            ]
            if self.kind == "dataclass" or (self.cls and hasattr(self.cls, "to_tuple")):
                if -len(present) <= name < len(present):
                    return present[name]
                raise self._no_element(name, what, f"it has {len(present)} values")
        raise self._no_element(
            name,
            what,
            "its keys are " + (", ".join(map(repr, self.keys)) or "none"),
            nearest(str(name), map(str, self.keys)),
        )

    def _element_of_sequence(self, name: int | str, what: str) -> Structure:
        cls = self.cls or tuple
        if isinstance(name, int):
            if -len(self.children) <= name < len(self.children):
                return self.children[name]
            raise self._no_element(
                name, what, f"it is a {cls.__name__} of {len(self.children)} elements"
            )
        fields = _sequence_fields(cls)
        if name in fields:
            return self.children[fields.index(name)]
        why = f"it is a {cls.__name__} of {len(self.children)} elements"
        if fields:
            why += " with the fields " + ", ".join(fields)
        raise self._no_element(name, what, why, nearest(name, fields))

    def _no_element(
        self, name: int | str, what: str, why: str, near: Sequence[str] = ()
    ) -> ElementError:
        return ElementError(
            f"output={name!r} does not exist in {what}",
            why=why,
            nearest=near,
            remedy="name an element that exists, or output=None for the whole value",
        )

    def describe(self) -> str:
        """A short text such as ``tuple(tensor, None)``."""
        if self.kind == "const":
            return repr(self.value)
        if self.kind == "opaque":
            return f"<{self.cls.__name__ if self.cls else 'object'}>"
        if self.kind in ("tensor", "int"):
            return self.kind
        names = self.keys or ("",) * len(self.children)
        parts = [
            f"{k}={c.describe()}" if k != "" else c.describe()
            for k, c in zip(names, self.children, strict=True)
        ]
        return f"{self.cls.__name__ if self.cls else self.kind}({', '.join(parts)})"


def _sequence_fields(cls: type) -> tuple[str, ...]:
    """Field names of a named tuple or of a ``torch.return_types`` class."""
    named = getattr(cls, "_fields", None)
    if named is not None:
        return tuple(named)
    if cls.__module__ == "torch.return_types":
        # A struct sequence of C: fields are member descriptors, ordered by position.
        match = getattr(cls, "__match_args__", ())
        return tuple(match)
    return ()


def build_container(
    kind: str, cls: type, keys: Sequence[Any], values: list[Any]
) -> Any:
    """A container of a class, filled without running its constructor.

    Args:
        kind: As in :class:`Structure`.
        cls: The class.
        keys: Keys of a dict or field names of a dataclass.
        values: The parts, in order.
    """
    if kind == "sequence":
        return _build_sequence(cls, values)
    if kind == "dict":
        return _build_dict(cls, keys, values)
    return _build_dataclass(cls, keys, values)


def _build_sequence(cls: Any, values: list[Any]) -> Any:
    if cls is list:
        return values
    if issubclass(cls, list):
        made = cls.__new__(cls)
        list.extend(made, values)
        return made
    if cls.__module__ == "torch.return_types" or issubclass(cls, torch.Size):
        return cls(values)
    return tuple.__new__(cls, values)


def _build_dict(cls: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    if cls is dict:
        return dict(zip(keys, values, strict=True))
    made = cls.__new__(cls)
    # The nearest builtin base knows how to fill itself (OrderedDict keeps a list beside
    # the table); a subclass's own __setitem__ may do anything and is not run.
    base = next(b for b in cls.__mro__ if b.__module__ in ("builtins", "collections"))
    for key, value in zip(keys, values, strict=True):
        base.__setitem__(made, key, value)
    if dataclasses.is_dataclass(cls):
        present = dict(zip(keys, values, strict=True))
        for field in dataclasses.fields(cls):
            object.__setattr__(made, field.name, present.get(field.name))
    return made


def _build_dataclass(cls: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    made: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


def parse(text: str) -> Structure:
    """The structure that :func:`encode` wrote as ``text``."""
    reader = _Reader(text)
    structure = reader.read()
    assert reader.at == len(text), text
    return structure


class _Reader:
    """Recursive-descent reader of the text that ``encode`` writes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.num_tensors = 0
        self.num_sizes = 0

    def read(self) -> Structure:
        kind = self.text[self.at]
        self.at += 1
        if kind == "N":
            return Structure("const")
        if kind == "T":
            self.num_tensors += 1
            return Structure("tensor", index=self.num_tensors - 1)
        if kind == "I":
            self.num_sizes += 1
            return Structure("int", index=self.num_sizes - 1)
        if kind == "B":
            self.at += 1
            return Structure("const", value=self.text[self.at - 1] == "1")
        if kind == "s":
            return Structure("const", value=self._literal())
        if kind == "f":
            return Structure("const", value=float(self._literal()))
        if kind == "K":
            return Structure("const", value=_objects[self._integer()])
        if kind == "O":
            return Structure("opaque", cls=_objects[self._integer()])
        if kind in "tlS":
            cls = {"t": tuple, "l": list}.get(kind) or _objects[self._integer()]
            return Structure("sequence", cls=cls, children=tuple(self._items()))
        cls = dict if kind == "d" else _objects[self._integer()]
        keys, children = self._pairs()
        name = "dataclass" if kind == "C" else "dict"
        return Structure(name, cls=cls, keys=keys, children=children)

    def _items(self) -> Iterator[Structure]:
        self.at += 1  # (
        while self.text[self.at] != ")":
            yield self.read()
            if self.text[self.at] == ",":
                self.at += 1
        self.at += 1

    def _pairs(self) -> tuple[tuple[Any, ...], tuple[Structure, ...]]:
        keys: list[Any] = []
        children: list[Structure] = []
        self.at += 1  # {
        while self.text[self.at] != "}":
            keys.append(self._literal())
            self.at += 1  # :
            children.append(self.read())
            if self.text[self.at] == ",":
                self.at += 1
        self.at += 1
        return tuple(keys), tuple(children)

    def _integer(self) -> int:
        start = self.at
        while self.at < len(self.text) and self.text[self.at].isdigit():
            self.at += 1
        return int(self.text[start : self.at])

    def _literal(self) -> Any:
        """The Python literal that starts here; it ends where its value does."""
        start = self.at
        depth = 0
        while True:
            char = self.text[self.at]
            if char in "'\"":
                self._skip_string(char)
                if not depth and start + 1 < self.at:
                    break
                continue
            if not depth and char in ":,})":
                break
            depth += (char in "([") - (char in ")]")
            self.at += 1
        return ast.literal_eval(self.text[start : self.at])

    def _skip_string(self, quote: str) -> None:
        self.at += 1
        while self.text[self.at] != quote:
            self.at += 2 if self.text[self.at] == "\\" else 1
        self.at += 1
