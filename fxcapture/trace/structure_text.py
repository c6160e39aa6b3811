"""The shape of an output as a short string, written while a model is traced.

A graph carries tensors and integers, nothing else; what a module returns may be a
tuple, a dict, a dataclass, a mix of them with Python values between.  ``encode`` takes
such a value apart: tensors go to one list, integers (which may be symbolic) to another,
and the rest becomes text.  ``parse`` turns the text into a
:class:`~fxcapture.trace.structure.Structure`.

Terms
    number: stands in the text for a class, or for a constant or key that has no literal
        (an enum's member, a dtype, ...).

Invariants
    ``encode`` uses only what Dynamo traces without a guard of its own: ``isinstance``,
    iteration, string formatting, and functions whose result is a constant.
    The text is of this process: numbers mean nothing in another.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxcapture import _torch
from fxcapture.errors import UnsupportedOutputError
from fxcapture.trace.structure import Structure

__all__ = ["encode", "map_tensors", "parse"]

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
            if known is obj or (
                # Equal containers may hold values of other types, as (1,) and (True,).
                type(known) is type(obj) and known == obj and repr(known) == repr(obj)
            ):
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
            f"{_key(k)}:{encode(v, tensors, sizes, depth + 1)}"
            for k, v in value.items()
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


def _key(key: Any) -> str:
    """A key of a dictionary: as a literal, or by its number."""
    if type(key) in (str, int, bool, bytes, type(None)):
        return repr(key)
    if type(key) is tuple:
        return "(" + "".join([_key(part) + "," for part in key]) + ")"
    if isinstance(key, torch.Tensor):
        # Numbers are kept for good, and tensors are not equal or unequal.
        raise UnsupportedOutputError(
            "a dictionary with a tensor as a key cannot be recorded",
            why="keys are constants of the graph",
            remedy="tap a module that returns the values otherwise",
        )
    return f"K{_number(key)}"


def parse(text: str) -> Structure:
    """The structure that :func:`encode` wrote as ``text``."""
    reader = _Reader(text)
    structure = reader.read()
    assert reader.at == len(text), text
    return structure


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A value of the same structure, with what ``change`` makes of each tensor.

    Raises:
        UnsupportedOutputError: the value holds an object that is no container.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    structure = parse(encode(value, tensors, sizes))
    return structure.build(lambda i: change(tensors[i]), sizes.__getitem__)


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
            keys.append(self._key())
            self.at += 1  # :
            children.append(self.read())
            if self.text[self.at] == ",":
                self.at += 1
        self.at += 1
        return tuple(keys), tuple(children)

    def _key(self) -> Any:
        if self.text[self.at] == "K":
            self.at += 1
            return _objects[self._integer()]
        if self.text[self.at] != "(":
            return self._literal()
        parts: list[Any] = []
        self.at += 1  # (
        while self.text[self.at] != ")":
            parts.append(self._key())
            self.at += 1  # ,
        self.at += 1
        return tuple(parts)

    def _integer(self) -> int:
        start = self.at
        while self.at < len(self.text) and self.text[self.at].isdigit():
            self.at += 1
        return int(self.text[start : self.at])

    def _literal(self) -> Any:
        """The Python literal that starts here; it ends where its value does."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ":,})":
            if self.text[self.at] in "'\"":
                self._skip_string(self.text[self.at])
            else:
                self.at += 1
        return ast.literal_eval(self.text[start : self.at])

    def _skip_string(self, quote: str) -> None:
        self.at += 1
        while self.text[self.at] != quote:
            self.at += 2 if self.text[self.at] == "\\" else 1
        self.at += 1
