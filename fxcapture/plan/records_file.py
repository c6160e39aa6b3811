"""Records as a safetensors file: the tensors, and a document that says what they are.

Invariants
    A tensor that stands in several places is written once.
    The document is data: reading it imports and runs nothing, unless trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch

from fxcapture import _torch
from fxcapture.errors import CaptureError, UnsupportedOutputError
from fxcapture.plan.plan import Plan, RecordPlan, Slot
from fxcapture.plan.tensor_file import read_tensors, write_tensors
from fxcapture.spec.documents import Reader, read_document, shorten
from fxcapture.spec.stored import Trust, trusting
from fxcapture.trace.mark import ENTRY, RESULT
from fxcapture.trace.stored_structure import structure_from_json, structure_to_json
from fxcapture.trace.structure import Structure
from fxcapture.trace.structure_text import encode, parse

__all__ = ["flatten", "read_records", "write_records"]

_FIELD = "fxcapture.records"
_FORMAT = 1
_Values = dict[str, tuple[Any, ...]]
_Paths = dict[str, tuple[str, ...]]


def flatten(values: Mapping[str, tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    """Every tensor of records, by a name of its own.

    Raises:
        CaptureError: two of them would have one name.
    """
    made: dict[str, torch.Tensor] = {}
    for name in values:
        for i, value in enumerate(values[name]):
            tensors: list[torch.Tensor] = []
            encode(value, tensors, [])
            for j, tensor in enumerate(tensors):
                own = _name(name, i, j, value)
                if own in made:
                    raise CaptureError(
                        f"two tensors would have the name {own!r}",
                        why="one record is named as positions of the other are",
                        remedy="give one of the records another name",
                    )
                made[own] = tensor
    return made


def _name(record: str, position: int, leaf: int, value: Any) -> str:
    whole = isinstance(value, torch.Tensor)
    return f"{record}/{position}" if whole else f"{record}/{position}/{leaf}"


def write_records(
    path: str | os.PathLike[str],
    values: Mapping[str, tuple[Any, ...]],
    paths: Mapping[str, tuple[str, ...]],
    plan: Plan | None,
) -> None:
    """Write records.

    Args:
        path: Where to.
        values: Record name to entries.
        paths: Record name to module paths.
        plan: Which positions were selected; ``None`` if that is not known.

    Raises:
        CaptureError: a value has no place in the format.
        OSError: the file cannot be written.
    """
    flatten(values)  # its names are told apart
    slots = {r.name: r.slots for r in plan.records} if plan else {}
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}
    records = []
    for name, entries in values.items():
        positions: list[dict[str, object] | None] = []
        known = slots.get(name, (None,) * len(entries))
        for i, (value, slot) in enumerate(zip(entries, known, strict=True)):
            if value is None and slot is None:
                positions.append(None)
                continue
            parts: list[torch.Tensor] = []
            sizes: list[int] = []
            structure = parse(encode(value, parts, sizes))
            stored = []
            for j, tensor in enumerate(parts):
                own = _name(name, i, j, value)
                found = names.setdefault(_identity(tensor), own)
                tensors.setdefault(found, tensor)
                stored.append(found)
            positions.append(
                {
                    "input": slot is not None and slot.entry,
                    "structure": structure_to_json(structure),
                    "tensors": stored,
                    "sizes": [int(size) for size in sizes],
                }
            )
        records.append(
            {"name": name, "paths": list(paths[name]), "positions": positions}
        )
    document = {"format": _FORMAT, "selection": plan is not None, "records": records}
    write_tensors(path, tensors, {_FIELD: json.dumps(document)})


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements of the same memory."""
    memory = _torch.storage_id(tensor)
    if memory is None:
        return id(tensor)
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return memory, place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def read_records(
    path: str | os.PathLike[str], trust: Iterable[str]
) -> tuple[_Values, _Paths, Plan | None]:
    """What :func:`write_records` was given, as it stands in the file.

    Raises:
        CaptureError: the file is no such file, or is damaged.
        OSError: it cannot be read.
    """
    trusted = trusting(trust)
    tensors, metadata = read_tensors(path)
    what = f"{str(path)!r} holds no records"
    remedy = "pass a file that Records.save has written, undamaged"
    if _FIELD not in metadata:
        raise CaptureError(
            what,
            why="it is a safetensors file, but does not say what its tensors are",
            remedy=f"{remedy}, or read its tensors with safetensors",
        )
    document = read_document(metadata[_FIELD], what, CaptureError, remedy)
    document.only("format", "selection", "records")
    if document.get("format", int) != _FORMAT:
        document.wrong("format", document.data["format"], f"{_FORMAT}")
    selection = document.get("selection", bool)
    values: _Values = {}
    paths: _Paths = {}
    plans = []
    table = _Table(tensors)
    for record in document.each("records"):
        record.only("name", "paths", "positions")
        name = record.get("name", str)
        if name in values:
            record.wrong("name", name, "a name that no other record has")
        places = [record.check("paths", p, str) for p in record.get("paths", list)]
        read = list(_positions(record, table, trusted))
        # Records that were made by hand may come without paths.
        if places and len(places) != len(read):
            record.wrong("paths", places, "one path for each position")
        values[name] = tuple([value for value, _ in read])
        paths[name] = tuple(places)
        plans.append(
            RecordPlan(name=name, paths=paths[name], slots=tuple([s for _, s in read]))
        )
    return values, paths, Plan(records=tuple(plans)) if selection else None


@final
class _Table:
    """The tensors of a file, each handed out once and copied from then on."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def take(self, name: str, place: Reader) -> torch.Tensor:
        if name not in self._tensors:
            place.fail(f"the file has no tensor {shorten(name)}")
        tensor = self._tensors[name]
        if name in self._taken:
            return tensor.clone()
        self._taken.add(name)
        return tensor


def _positions(
    record: Reader, tensors: _Table, trust: Trust
) -> Iterator[tuple[Any, Slot | None]]:
    """Each position's value, and a slot that says as much as is known of it."""
    for i, stored in enumerate(record.get("positions", list)):
        if stored is None:
            yield None, None
            continue
        position = record.inside(f"positions[{i}]", stored)
        position.only("input", "structure", "tensors", "sizes")
        structure = structure_from_json(
            position.inside("structure", position.get("structure", dict)), trust
        )
        names = [
            position.check("tensors", n, str) for n in position.get("tensors", list)
        ]
        sizes = [position.check("sizes", n, int) for n in position.get("sizes", list)]
        for kind, given in (("tensor", names), ("int", sizes)):
            if any(j >= len(given) for j in structure.leaves(kind)):
                position.fail(
                    f"{position.at('structure')!r} has more leaves than given"
                )
        given_tensors = [tensors.take(n, position) for n in names]
        yield (
            _build(position, structure, given_tensors, sizes),
            Slot(
                site=-1,
                kind=ENTRY if position.get("input", bool) else RESULT,
                structure=structure,
                leaves=(),
                sizes=(),
            ),
        )


def _build(
    position: Reader, structure: Structure, tensors: list[Any], sizes: list[int]
) -> Any:
    try:
        return structure.build(tensors.__getitem__, sizes.__getitem__)
    except (UnsupportedOutputError, TypeError, ValueError) as error:
        position.fail(f"no such value can be made: {error}", error)
