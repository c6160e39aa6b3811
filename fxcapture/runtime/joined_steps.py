"""The steps of a generation as one tensor for each entry of each record.

Terms
    positions: dimension 1 of a value that has one entry for each token of its call.

Invariants
    A token that a later step computes anew (a draft that was rejected) stands once, as
    the later step has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from fxcapture.errors import CaptureError
from fxcapture.plan.records import Records
from fxcapture.trace.structure_text import encode, parse

__all__ = ["join_steps"]

#: What the tokens of a call are passed as; the decoder's come first.
_TOKENS = (
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "input_ids",
    "inputs_embeds",
)


class _Step(Protocol):
    @property
    def records(self) -> Records: ...
    @property
    def step(self) -> int: ...
    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...
    @property
    def past(self) -> int | None: ...


def join_steps(calls: Sequence[_Step], beam_indices: torch.Tensor | None) -> Records:
    """The latest generation's records; see ``CallRecording.joined``."""
    start = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].step == 0), None)
    if start is None:
        raise CaptureError(
            "the steps cannot be joined",
            why="keep= has let go of the first one"
            if calls
            else "nothing was recorded",
            remedy="record the whole generation, with keep=None",
        )
    steps = calls[start:]
    rows = None if beam_indices is None else _rows_of(steps, beam_indices)
    names = list(steps[0].records)
    values = {}
    for name in names:
        entries = [step.records[name] for step in steps]
        if len({len(e) for e in entries}) > 1:
            _refuse(name, "its number of positions differs between steps")
        values[name] = tuple(
            [
                _join(f"{name}[{i}]", [e[i] for e in entries], steps, rows)
                for i in range(len(entries[0]))
            ]
        )
    return Records(values, {name: steps[0].records.paths(name) for name in names})


def _rows_of(steps: Sequence[_Step], beam_indices: torch.Tensor) -> list[torch.Tensor]:
    """For each step, the row that each sequence came from; -1 after its end."""
    if beam_indices.dim() != 2 or beam_indices.shape[1] < len(steps):
        raise CaptureError(
            f"beam_indices has the shape {list(beam_indices.shape)}",
            why=f"it needs a row for each sequence, and {len(steps)} steps",
            remedy="pass generate(..., return_dict_in_generate=True).beam_indices",
        )
    return list(beam_indices[:, : len(steps)].unbind(1))


def _join(
    what: str,
    entries: Sequence[Any],
    steps: Sequence[_Step],
    rows: list[torch.Tensor] | None,
) -> Any:
    taken: list[tuple[str, list[torch.Tensor], list[int]]] = []
    for entry in entries:
        tensors: list[torch.Tensor] = []
        sizes: list[int] = []
        taken.append((encode(entry, tensors, sizes), tensors, sizes))
    text, _, sizes = taken[0]
    if any(other != text for other, _, _ in taken):
        _refuse(what, "its structure differs between steps")
    return parse(text).build(
        lambda i: _join_tensors(what, [t[i] for _, t, _ in taken], steps, rows),
        sizes.__getitem__,
    )


def _join_tensors(
    what: str,
    parts: list[torch.Tensor],
    steps: Sequence[_Step],
    rows: list[torch.Tensor] | None,
) -> torch.Tensor:
    if rows is not None:
        parts = [_follow(p, row) for p, row in zip(parts, rows, strict=True)]
    rests = {(p.shape[:1], p.shape[2:]) for p in parts}
    tokens = [_num_tokens(step) for step in steps]
    along = all(
        p.dim() > 1 and p.shape[1] == n for p, n in zip(parts, tokens, strict=True)
    )
    if not along and len({p.shape for p in parts}) == 1 and parts[0].dim():
        return torch.stack(parts, 1)
    if not along or len(rests) > 1:
        shapes = ", ".join(str(list(p.shape)) for p in parts[:3])
        _refuse(what, f"its shapes are {shapes}, not (batch, positions, ...)")
    kept: list[torch.Tensor] = []
    length = 0
    for part, step in zip(parts, steps, strict=True):
        past = length if step.past is None else step.past
        while kept and past < length:  # computed anew from here
            cut = min(length - past, kept[-1].shape[1])
            kept[-1] = kept[-1][:, : kept[-1].shape[1] - cut]
            length -= cut
            if not kept[-1].shape[1]:
                kept.pop()
        kept.append(part)
        length += part.shape[1]
    return torch.cat(kept, 1)


def _follow(part: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The rows that the sequences came from; zero for those that have ended."""
    row = row.to(part.device)
    taken = part[row.clamp(min=0)]
    ended = (row < 0).reshape(-1, *[1] * (part.dim() - 1))
    return taken.masked_fill(ended, 0)


def _num_tokens(step: _Step) -> int | None:
    """How many tokens a step's call was given."""
    shapes = step.shapes
    named = [shapes[name] for name in _TOKENS if name in shapes]
    named += [shape for shape in shapes.values() if len(shape) > 1]
    return named[0][1] if named and len(named[0]) > 1 else None


def _refuse(what: str, why: str) -> NoReturn:
    raise CaptureError(
        f"the steps of {what} cannot be joined",
        why=why,
        remedy="join what is (batch, positions, ...), and read the rest from run.calls",
    )
