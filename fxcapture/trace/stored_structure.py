"""Structures as JSON values, read where the classes in them may be missing.

Terms
    stand-in: what a value is built as where its class is not loaded: a plain ``dict``
        for a dictionary class, a named tuple with the same fields for a dataclass or a
        named tuple.

Invariants
    Reading imports nothing unless it is trusted, and calls nothing that a loaded class
    brings along.  A container's class is used if it is loaded under the very name and
    can be filled without running code of its own; a stand-in is used otherwise.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import keyword
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxcapture.errors import CaptureError, SpecError
from fxcapture.spec.documents import Reader
from fxcapture.spec.stored import Trust, check_name
from fxcapture.trace.structure import Structure

__all__ = ["structure_from_json", "structure_to_json"]

_LEAVES = ("tensor", "int", "const", "opaque")
_CONTAINERS = ("sequence", "dict", "dataclass")
_LITERALS = (str, int, bool, bytes, float, complex, type(None))
_MAX_KEY = 10_000


def structure_to_json(structure: Structure) -> dict[str, Any]:
    """What :func:`structure_from_json` reads.

    Raises:
        CaptureError: a dictionary has a key that has no written form.
    """
    out: dict[str, Any] = {"kind": structure.kind}
    if structure.cls is not None:
        out["class"] = f"{structure.cls.__module__}:{structure.cls.__qualname__}"
        out["fields"] = list(getattr(structure.cls, "_fields", ()))
    if structure.keys:
        out["keys"] = [_key_to_json(key) for key in structure.keys]
    if structure.children:
        out["children"] = [structure_to_json(c) for c in structure.children]
    if structure.index >= 0:
        out["index"] = structure.index
    if structure.kind == "const":
        out["value"] = _constant_to_json(structure.value)
    return out


def structure_from_json(data: Reader, trust: Trust) -> Structure:
    """The structure that a document holds.

    Raises:
        CaptureError: the document is not such a structure.
    """
    data.only("kind", "class", "fields", "keys", "children", "index", "value")
    kind = data.get("kind", str)
    if kind not in _LEAVES + _CONTAINERS:
        data.wrong("kind", kind, f"one of {', '.join(_LEAVES + _CONTAINERS)}")
    if kind in ("tensor", "int"):
        index = data.get("index", int)
        if index < 0:
            data.wrong("index", index, "an integer from zero on")
        return Structure(kind, index=index)
    if kind == "const":
        return Structure(kind, value=_constant_from_json(data, "value"))
    if kind == "opaque":
        return Structure(kind)
    name = _name(data, "class")
    fields = [data.check("fields", f, str) for f in data.get("fields", list)]
    keys = tuple(
        _key_from_json(data, key)
        for key in (data.get("keys", list) if "keys" in data.data else ())
    )
    children = tuple(
        structure_from_json(child, trust)
        for child in (data.each("children") if "children" in data.data else ())
    )
    cls = _container_class(data, name, kind, keys, trust)
    if kind == "sequence":
        names: Sequence[Any] = fields or children
    else:
        names = keys
    if len(names) != len(children) or len(set(keys)) != len(keys):
        data.fail(f"field {data.at('children')!r} has not one part for each key")
    if cls is None:
        kind, cls, keys = _stand_in(kind, name, fields, keys)
    return Structure(kind, cls=cls, keys=keys, children=children)


def _name(data: Reader, field: str) -> str:
    try:
        return check_name(data.get(field, str).replace(".<locals>", ""))
    except SpecError as error:
        data.fail(f"field {data.at(field)!r}: {error.what}; {error.why}", error)


# --------------------------------------------------------------------------------------
# Classes
# --------------------------------------------------------------------------------------


def _container_class(
    data: Reader, name: str, kind: str, keys: Sequence[Any], trust: Trust
) -> type | None:
    """The class of a container if it may be had and still is one."""
    if trust.covers_name(name) and data.data["class"] == name:
        try:
            found = trust.load(name)
        except SpecError as error:
            data.fail(f"field {data.at('class')!r}: {error.what}; {error.why}", error)
    else:
        found = _loaded(data.data["class"])
    if not isinstance(found, type) or hasattr(found, "__del__"):
        return None
    if kind == "dataclass":
        fits = dataclasses.is_dataclass(found) and {
            f.name for f in dataclasses.fields(found)
        }.issuperset(keys)
    elif kind == "dict":
        fits = issubclass(found, dict) and _is_filled_by_builtins(found)
    elif issubclass(found, tuple):
        # A torch.Size and its like are made by calling the class.
        fits = found is torch.Size or not issubclass(found, torch.Size)
    else:
        fits = issubclass(found, list) and _is_filled_by_builtins(found)
    return found if fits else None


def _is_filled_by_builtins(cls: type) -> bool:
    return isinstance(cls.__new__, types.BuiltinFunctionType)


def _loaded(name: str) -> Any:
    """A loaded class of this very name; ``None`` if there is none."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, (types.ModuleType, type)):
            return None
        # Not with getattr: modules and metaclasses may run code to find a name.
        found = vars(found).get(part)
    if isinstance(found, type) and f"{found.__module__}:{found.__qualname__}" == name:
        return found
    return None


def _stand_in(
    kind: str, name: str, fields: Sequence[str], keys: tuple[Any, ...]
) -> tuple[str, type, tuple[Any, ...]]:
    if kind == "dict":
        return "dict", dict, keys
    names = [str(key) for key in keys] if kind == "dataclass" else list(fields)
    if not names:
        return "sequence", tuple, ()
    last = name.rpartition(":")[2].rpartition(".")[2]
    if keyword.iskeyword(last):
        last += "_"
    # rename: a field of a class in another process may not be a valid name here.
    return "sequence", collections.namedtuple(last, names, rename=True), ()  # type: ignore[misc]


# --------------------------------------------------------------------------------------
# Constants and keys
# --------------------------------------------------------------------------------------


def _constant_to_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        cls = type(value)
        return {
            "enum": f"{cls.__module__}:{cls.__qualname__}",
            "member": value.name,
            "value": value.value if isinstance(value.value, (int, str)) else None,
        }
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return value


def _constant_from_json(data: Reader, name: str) -> Any:
    value = data.data.get(name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    stored = data.inside(name, value)
    if stored.data.keys() == {"dtype"}:
        # Not with getattr: torch imports parts of itself for a name that it lacks.
        found = vars(torch).get(stored.get("dtype", str))
        if not isinstance(found, torch.dtype):
            stored.wrong("dtype", stored.data["dtype"], "the name of a torch.dtype")
        return found
    if stored.data.keys() == {"device"}:
        try:
            return torch.device(stored.get("device", str))
        except RuntimeError as error:
            stored.fail(str(error).splitlines()[0], error)
    stored.only("enum", "member", "value")
    member = stored.get("member", str)
    plain = stored.data.get("value")
    if not isinstance(plain, (int, str, type(None))):
        stored.wrong("value", plain, "an integer or a string")
    _name(stored, "enum")
    cls = _loaded(stored.data["enum"])
    known: Mapping[str, Any] = cls.__members__ if type(cls) is enum.EnumMeta else {}
    if member in known:
        return known[member]
    return member if plain is None else plain


def _key_to_json(key: Any) -> Any:
    """A literal as text, so that ``1`` and ``"1"`` stay apart; others as constants."""
    if _is_literal(key):
        return repr(key)
    if type(key) is tuple:
        return {"tuple": [_key_to_json(part) for part in key]}
    stored = _constant_to_json(key)
    if stored is key:
        raise CaptureError(
            f"a dictionary with the key {key!r} cannot be stored",
            why=f"a key of type {type(key).__name__} has no written form",
            remedy="name an element of the output with output=",
        )
    return stored


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_literal, key))
    # Infinity and not-a-number have no literal.
    return type(key) in _LITERALS and not (isinstance(key, float) and key - key != 0)


def _key_from_json(data: Reader, stored: Any) -> Any:
    if isinstance(stored, dict):
        if stored.keys() == {"tuple"}:
            parts = Reader.get(data.inside("keys", stored), "tuple", list)
            return tuple(_key_from_json(data, part) for part in parts)
        return _constant_from_json(data.inside("keys", {"keys": stored}), "keys")
    text = data.check("keys", stored, str)
    try:
        if len(text) > _MAX_KEY:
            raise ValueError(f"it has more than {_MAX_KEY} characters")
        key = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        data.fail(f"field {data.at('keys')!r}: {text[:80]!r} is no literal", error)
    if not _is_literal(key):
        data.wrong("keys", text, "literals that can be keys")
    return key
