"""What an exported program's outputs mean, as a document that travels with it.

Terms
    layout: which named output of a program feeds which slot of which record.
    stand-in: what a value is built as where its class is not loaded: a plain ``dict``
        for a dictionary class, a named tuple with the same fields for a dataclass or a
        named tuple.

Invariants
    Reading a manifest imports nothing.  A class is used where its module is loaded
    already, otherwise its stand-in is, so that a program runs without its model's code.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from fxcapture.errors import CaptureError
from fxcapture.plan.records import Records
from fxcapture.spec.tap import CaptureSpec
from fxcapture.trace.structure import Structure

__all__ = ["Manifest", "OutputInfo", "RecordLayout", "SlotLayout"]

_FORMAT = 1


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputInfo:
    """One output that the capture added.

    Attributes:
        name: Its name in the program.
        dtype: Its dtype, without the ``torch.`` prefix; ``"int"`` for an integer.
        shape: Its shape; a symbolic size as text.
        detach: The record is cut from autograd.  Said here too, since decompositions
            for inference drop the operation that cuts it.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    detach: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """How one recorded position is put together.

    Attributes:
        structure: Its shape.
        tensors: Tensor leaf to output name.
        sizes: Integer leaf to its value, or to the name of the output that holds it.
    """

    structure: Structure
    tensors: tuple[tuple[int, str], ...]
    sizes: tuple[tuple[int, int | str], ...]

    def read(self, values: Mapping[str, Any]) -> Any:
        """The value of this position; tensors are the ones in ``values``."""
        tensors = dict(self.tensors)
        sizes = dict(self.sizes)

        def size(index: int) -> int:
            known = sizes[index]
            return int(values[known]) if isinstance(known, str) else known

        return self.structure.build(lambda i: values[tensors[i]], size)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """One record: a slot for each position, ``None`` where not selected."""

    name: str
    paths: tuple[str, ...]
    slots: tuple[SlotLayout | None, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a captured program knows about its records.

    Attributes:
        spec: The spec as JSON; ``None`` if it holds something that cannot be stored,
            such as a lambda.
        spec_text: The spec in readable form.
        keep_output: Whether the program returns the model's own output.
        records: The layout.
        outputs: The outputs that the capture added, in order.
        versions: (package, version) of what made it.
    """

    spec: str | None
    spec_text: str
    keep_output: bool
    records: tuple[RecordLayout, ...]
    outputs: tuple[OutputInfo, ...]
    versions: tuple[tuple[str, str], ...]

    def read(self, values: Mapping[str, Any]) -> Records:
        """Records of a run, from the values of the added outputs by name."""
        cut = {o.name: values[o.name].detach() for o in self.outputs if o.detach}
        values = {**values, **cut}
        return Records(
            {
                record.name: tuple(s and s.read(values) for s in record.slots)
                for record in self.records
            },
            {record.name: record.paths for record in self.records},
        )

    def load_spec(self) -> CaptureSpec:
        """The spec; imports the classes that it names.

        Raises:
            CaptureError: the spec could not be stored.
        """
        if self.spec is None:
            raise CaptureError(
                f"the spec {self.spec_text} was not stored",
                why="it holds an object that cannot be imported by name",
                remedy="use paths, importable classes and importable functions",
            )
        return CaptureSpec.from_json(self.spec)

    def to_json(self) -> str:
        """The manifest as a JSON document."""
        return json.dumps(
            {
                "format": _FORMAT,
                "versions": dict(self.versions),
                "spec": None if self.spec is None else json.loads(self.spec),
                "spec_text": self.spec_text,
                "keep_output": self.keep_output,
                "outputs": [dataclasses.asdict(o) for o in self.outputs],
                "records": [
                    {
                        "name": record.name,
                        "paths": record.paths,
                        "slots": [s and _slot_to_json(s) for s in record.slots],
                    }
                    for record in self.records
                ],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            CaptureError: the text is not such a document.
        """
        try:
            data = json.loads(text)
            found = data["format"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CaptureError(
                "the program's manifest cannot be read",
                why=f"{type(error).__name__}: {error}",
                remedy="export the model again",
            ) from error
        if found != _FORMAT:
            raise CaptureError(
                f"the program's manifest has format {found!r}",
                why=f"this version of fxcapture reads format {_FORMAT}",
                remedy="use the version that wrote it, or export the model again",
            )
        spec = data["spec"]
        return Manifest(
            spec=None if spec is None else json.dumps(spec),
            spec_text=data["spec_text"],
            keep_output=data["keep_output"],
            outputs=tuple(
                OutputInfo(**{**o, "shape": tuple(o["shape"])}) for o in data["outputs"]
            ),
            records=tuple(
                RecordLayout(
                    name=r["name"],
                    paths=tuple(r["paths"]),
                    slots=tuple(s and _slot_from_json(s) for s in r["slots"]),
                )
                for r in data["records"]
            ),
            versions=tuple(data["versions"].items()),
        )


def _slot_to_json(slot: SlotLayout) -> dict[str, Any]:
    return {
        "structure": _structure_to_json(slot.structure),
        "tensors": slot.tensors,
        "sizes": slot.sizes,
    }


def _slot_from_json(data: Mapping[str, Any]) -> SlotLayout:
    return SlotLayout(
        structure=_structure_from_json(data["structure"]),
        tensors=tuple((i, name) for i, name in data["tensors"]),
        sizes=tuple((i, size) for i, size in data["sizes"]),
    )


# --------------------------------------------------------------------------------------
# Structures
# --------------------------------------------------------------------------------------


def _structure_to_json(structure: Structure) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": structure.kind}
    if structure.cls is not None:
        out["class"] = f"{structure.cls.__module__}:{structure.cls.__qualname__}"
        out["fields"] = list(getattr(structure.cls, "_fields", ()))
    if structure.keys:
        out["keys"] = [repr(key) for key in structure.keys]
    if structure.children:
        out["children"] = [_structure_to_json(c) for c in structure.children]
    if structure.index >= 0:
        out["index"] = structure.index
    if structure.kind == "const":
        out["value"] = _constant_to_json(structure.value)
    return out


def _structure_from_json(data: Mapping[str, Any]) -> Structure:
    kind = data["kind"]
    children = tuple(_structure_from_json(c) for c in data.get("children", ()))
    keys = tuple(ast.literal_eval(key) for key in data.get("keys", ()))
    cls: type | None = None
    if "class" in data:
        cls = _loaded_class(data["class"], kind)
    if cls is None and kind in ("sequence", "dict", "dataclass"):
        name = data["class"].rpartition(":")[2].rpartition(".")[2]
        kind, cls, keys = _stand_in(kind, name, data["fields"], keys)
    return Structure(
        kind,
        cls=cls,
        keys=keys,
        children=children,
        index=data.get("index", -1),
        value=_constant_from_json(data.get("value")),
    )


def _loaded_class(name: str, kind: str) -> type | None:
    """The class of a container if its module is loaded and it still is one."""
    obj = _loaded(name)
    if not isinstance(obj, type):
        return None
    fits = {
        "sequence": issubclass(obj, (tuple, list)),
        "dict": issubclass(obj, dict),
        "dataclass": dataclasses.is_dataclass(obj),
    }
    return obj if fits.get(kind) else None


def _loaded(name: str) -> Any:
    module, _, qualname = name.partition(":")
    obj: Any = sys.modules.get(module)
    for part in qualname.split("."):
        obj = getattr(obj, part, None)
    return obj


def _stand_in(
    kind: str, name: str, fields: Sequence[str], keys: tuple[Any, ...]
) -> tuple[str, type, tuple[Any, ...]]:
    if kind == "dict":
        return "dict", dict, keys
    names = list(keys) if kind == "dataclass" else list(fields)
    if not names:
        return "sequence", tuple, ()
    # rename: a field of a class in another process may not be a valid name here.
    return "sequence", collections.namedtuple(name, names, rename=True), ()  # type: ignore[misc]


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


def _constant_from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "device" in value:
        return torch.device(value["device"])
    cls = _loaded(value["enum"])
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        return cls[value["member"]]
    return value["member"] if value["value"] is None else value["value"]
