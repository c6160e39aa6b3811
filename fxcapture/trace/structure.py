"""The shape of a module's output, apart from its tensors.

What a module returns may be a tuple, a dict, a dataclass, a mix of them with Python
values between.  :mod:`fxcapture.trace.structure_text` takes such a value apart while it
is traced; ``Structure.build`` puts one of the same shape together again from other
tensors.

Terms
    leaf: a tensor, an integer, or a constant (``None``, bool, float, str, dtype, ...).
    opaque leaf: any other object, such as a key-value cache.  It is recorded by its
        class only; asking for it is an error.

Invariants
    Containers are rebuilt without running their constructors, so a rebuilt dataclass
    never validates or computes anything twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from fxcapture.errors import ElementError, UnsupportedOutputError, nearest

__all__ = ["Structure", "build_container"]


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
