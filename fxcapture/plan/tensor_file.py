"""Tensors in one file, in the safetensors format, with torch alone.

The format is eight bytes with the length of a header, the header (a JSON object: name
to dtype, shape and place), and the tensors' bytes.  Every reader of safetensors reads
these files, and this reads every file of theirs.

Invariants
    A file is complete or not there: it gets its name when all of it is written.
    Reading believes nothing: sizes are held against the file's before memory is asked
    for, no byte belongs to two tensors, and nothing is imported or run.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fxcapture import _torch
from fxcapture.errors import CaptureError
from fxcapture.spec.documents import MAX_CHARACTERS, Reader, read_document

__all__ = ["read_tensors", "write_tensors"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
#: The largest size that torch can address.
_MAX_SIZE = 2**63


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of tensors.

    Args:
        path: Where to; a file that is there is replaced.
        tensors: By name, of any device, dense; each is written whole.
        metadata: Texts to go with them.

    Raises:
        CaptureError: a tensor has no place in the format.
        OSError: the file cannot be written.
    """
    _check_byte_order()
    # Wide dtypes first, so that each tensor starts at a multiple of its item's size.
    order = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + _check_tensor(name, tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    made = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with made.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                # One at a time: no more than one copy on the host is alive.
                dense = tensors[name].detach().cpu().resolve_conj().resolve_neg()
                dense = dense.contiguous()
                file.write(_bytes_of(dense))
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def read_tensors(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, each in memory of its own on the CPU, and its texts.

    Raises:
        CaptureError: the file is not of the format, or is damaged.
        OSError: it cannot be read.
    """
    _check_byte_order()
    what = f"{str(path)!r} is not a safetensors file"
    remedy = "pass a file that Records.save or safetensors has written, undamaged"

    def refuse(why: str) -> CaptureError:
        return CaptureError(what, why=why, remedy=remedy)

    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_CHARACTERS):
            raise refuse(f"its header would have {length:,} bytes, the file has {size}")
        document = read_document(file.read(length), what, CaptureError, remedy)
        metadata = document.get(_METADATA, dict) if _METADATA in document.data else {}
        for name, text in metadata.items():
            document.check(name, text, str)
        places = {}
        for name, entry in document.data.items():
            if name != _METADATA:
                places[name] = _place_of(document.inside(name, entry))
        order = sorted(places, key=lambda n: places[n][2:])
        end = 0
        for name in order:
            _, _, begin, stop = places[name]
            if begin != end:
                document.inside(name, document.data[name]).fail(
                    f"{name!r} starts at byte {begin}, the one before it ends at {end}"
                )
            end = stop
        if end != size - 8 - length:
            raise refuse(f"it has {size - 8 - length} bytes of data, not {end}")
        tensors = {}
        for name in order:
            dtype, shape, _, _ = places[name]
            tensor = torch.empty(shape, dtype=dtype)
            _fill(file, tensor)
            tensors[name] = tensor
    return {name: tensors[name] for name in places}, metadata


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise CaptureError(
            "records cannot be stored or loaded on this machine",
            why="the format is little-endian, and this machine is not",
            remedy="use torch.save and torch.load",
        )


def _check_tensor(name: str, tensor: torch.Tensor) -> int:
    """The number of bytes that a tensor takes.

    Raises:
        CaptureError: it has no place in the format.
    """
    dense = tensor.layout == torch.strided and not _torch.is_subclass(tensor)
    if not dense or tensor.dtype not in _NAMES or name == _METADATA:
        kind = str(tensor.dtype).removeprefix("torch.") if dense else "this layout"
        reason = f"the format has no tensors of {kind}"
        raise CaptureError(
            f"{name!r} cannot be stored as safetensors",
            why="the format keeps this name for itself"
            if name == _METADATA
            else reason,
            remedy="use torch.save, or convert the record first: records.to(...), "
            "Tap(dtype=...) or Tap(reduce=...)",
        )
    return tensor.numel() * tensor.element_size()


def _place_of(entry: Reader) -> tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape, and where the bytes begin and end."""
    entry.only("dtype", "shape", "data_offsets")
    name = entry.get("dtype", str)
    if name not in _DTYPES:
        entry.wrong("dtype", name, f"one of {', '.join(_DTYPES)}")
    shape = [entry.check("shape", n, int) for n in entry.get("shape", list)]
    if any(n < 0 for n in shape) or math.prod(n or 1 for n in shape) >= _MAX_SIZE:
        entry.wrong("shape", shape, "sizes that a tensor can have")
    offsets = [
        entry.check("data_offsets", n, int) for n in entry.get("data_offsets", list)
    ]
    width = math.prod(shape) * _DTYPES[name].itemsize
    if len(offsets) != 2 or offsets[0] < 0 or offsets[1] - offsets[0] != width:
        entry.wrong("data_offsets", offsets, f"two places {width} bytes apart")
    return _DTYPES[name], shape, offsets[0], offsets[1]


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a dense tensor on the CPU, not copied; needs no NumPy."""
    length = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * length).from_address(tensor.data_ptr()) if length else b""


def _fill(file: BinaryIO, tensor: torch.Tensor) -> None:
    memory = _bytes_of(tensor)
    if memory and file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CaptureError(
            "a file of tensors ended while it was read",
            why="something else wrote to it",
            remedy="load it again when nothing writes to it",
        )
