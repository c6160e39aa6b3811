"""What an exported program's outputs mean, as a document that travels with it.

Terms
    layout: which named output of a program feeds which slot of which record.

Invariants
    A program runs without its model's code: reading a manifest imports nothing unless
    it is trusted.  What is read is checked whole: every leaf of a structure has its
    output.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from fxcapture.errors import CaptureError
from fxcapture.plan.records import Captured, Records
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.documents import Reader, read_document, shorten
from fxcapture.spec.stored import Trust, trusting
from fxcapture.trace.stored_structure import structure_from_json, structure_to_json
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


@functools.lru_cache
def _inputs(spec: str) -> dict[str, Collection[int]]:
    """The positions that are inputs, of each record of a stored spec; for printing."""
    taps = json.loads(spec).get("taps")
    found: dict[str, Collection[int]] = {}
    for name, tap in taps.items() if isinstance(taps, dict) else ():
        if not isinstance(tap, dict):
            continue  # whoever asks for the spec itself is told
        if tap.get("point") == "input":
            found[name] = range(sys.maxsize)
        elif tap.get("initial"):
            found[name] = (0,)
    return found


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

    def split(self, returned: Any) -> Captured:
        """What a program or package returned, as its output and the records."""
        output, values = returned if self.keep_output else (None, returned)
        return Captured(output, self.read(values))

    def read(self, values: Mapping[str, Any]) -> Records:
        """Records of a run, from the values of the added outputs by name.

        Raises:
            CaptureError: an output has no value.
        """
        names = [o.name for o in self.outputs]
        given = values if isinstance(values, Mapping) else {}
        if missing := [name for name in names if name not in given]:
            raise CaptureError(
                f"the output {missing[0]!r} has no value",
                why="records are made of the values of all added outputs",
                remedy="pass what the program returned, under the names of "
                "manifest.outputs",
            )
        cut = {o.name: values[o.name].detach() for o in self.outputs if o.detach}
        values = {**values, **cut}
        return Records(
            {
                record.name: tuple(s and s.read(values) for s in record.slots)
                for record in self.records
            },
            {record.name: record.paths for record in self.records},
            inputs=_inputs(self.spec) if self.spec else None,
        )

    def describes(self, out_spec: Any) -> bool:
        """Whether a program of this output pytree returns what is said here."""
        added = out_spec
        if self.keep_output:
            parts = out_spec.children()
            added = parts[1] if len(parts) == 2 else out_spec
        names = {output.name for output in self.outputs}
        return added.type is dict and set(added.context) == names

    def load_spec(self, trust: Iterable[str] | Trust = ()) -> CaptureSpec:
        """The spec.

        Args:
            trust: As for :meth:`CaptureSpec.from_json`.

        Raises:
            CaptureError: the spec could not be stored.
            SpecError: it is malformed, or names an object that is not trusted.
        """
        if self.spec is None:
            raise CaptureError(
                f"the spec {self.spec_text} was not stored",
                why="it holds an object that cannot be imported by name",
                remedy="use paths, importable classes and importable functions",
            )
        return CaptureSpec.from_json(self.spec, trust)

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
    def from_json(text: str, trust: Iterable[str] | Trust = ()) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Args:
            text: The document.
            trust: Modules whose container classes are imported if need be.

        Raises:
            CaptureError: the text is not such a document.
        """
        what = "the program's manifest cannot be read"
        data = read_document(text, what, CaptureError, "export the model again")
        if "format" not in data.data:
            data.get("format", int)
        found = data.data["format"]
        if type(found) is not int or found != _FORMAT:
            raise CaptureError(
                f"the program's manifest has format {shorten(found)}",
                why=f"this version of fxcapture reads format {_FORMAT}",
                remedy="use the version that wrote it, or export the model again",
            )
        data.only("format", *(field.name for field in dataclasses.fields(Manifest)))
        spec = data.data.get("spec") if "spec" in data.data else data.get("spec", dict)
        versions = data.get("versions", dict)
        outputs = tuple(map(_output_from_json, data.each("outputs")))
        names = {output.name for output in outputs}
        trusted = trusting(trust)
        return Manifest(
            spec=None if spec is None else json.dumps(data.check("spec", spec, dict)),
            spec_text=data.get("spec_text", str),
            keep_output=data.get("keep_output", bool),
            outputs=outputs,
            records=tuple(
                _record_from_json(record, names, trusted)
                for record in data.each("records")
            ),
            versions=tuple(
                (name, data.check("versions", version, str))
                for name, version in versions.items()
            ),
        )


def _output_from_json(data: Reader) -> OutputInfo:
    data.only("name", "dtype", "shape", "detach")
    for size in (shape := data.get("shape", list)):
        if type(size) not in (int, str):
            data.wrong("shape", shape, "integers, and symbolic sizes as strings")
    return OutputInfo(
        name=data.get("name", str),
        dtype=data.get("dtype", str),
        shape=tuple(shape),
        detach=data.get("detach", bool) if "detach" in data.data else False,
    )


def _record_from_json(data: Reader, names: set[str], trust: Trust) -> RecordLayout:
    data.only("name", "paths", "slots")
    slots = data.get("slots", list)
    return RecordLayout(
        name=data.get("name", str),
        paths=tuple(data.check("paths", p, str) for p in data.get("paths", list)),
        slots=tuple(
            None
            if slot is None
            else _slot_from_json(data.inside(f"slots[{i}]", slot), names, trust)
            for i, slot in enumerate(slots)
        ),
    )


def _slot_to_json(slot: SlotLayout) -> dict[str, Any]:
    return {
        "structure": structure_to_json(slot.structure),
        "tensors": slot.tensors,
        "sizes": slot.sizes,
    }


def _slot_from_json(data: Reader, names: set[str], trust: Trust) -> SlotLayout:
    data.only("structure", "tensors", "sizes")
    stored = data.inside("structure", data.get("structure", dict))
    structure = structure_from_json(stored, trust)
    tensors = tuple(_leaf(data, "tensors", pair) for pair in data.get("tensors", list))
    sizes = tuple(_leaf(data, "sizes", pair) for pair in data.get("sizes", list))
    for field, kind, leaves in (
        ("tensors", "tensor", tensors),
        ("sizes", "int", sizes),
    ):
        known = {index for index, _ in leaves}
        if missing := [i for i in structure.leaves(kind) if i not in known]:
            data.fail(f"field {data.at(field)!r} says nothing of leaf {missing[0]}")
        for _, source in leaves:
            if source not in names and (field == "tensors" or type(source) is not int):
                data.wrong(field, source, "the name of an output of the program")
    return SlotLayout(structure=structure, tensors=tensors, sizes=sizes)


def _leaf(data: Reader, field: str, pair: Any) -> tuple[int, Any]:
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or type(pair[0]) is not int
        or type(pair[1]) not in (int, str)
    ):
        data.wrong(field, pair, "a leaf's number and its output")
    return pair[0], pair[1]
