"""Saved files as archives, before torch reads them.

Invariants
    Whatever is wrong with a file is one error that names it.  A damaged file is not
    handed on: torch checks no sums, and unpickles a part that it cannot read otherwise.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from typing import TypeVar

from fxcapture.errors import CaptureError, FxCaptureError
from fxcapture.spec.documents import MAX_CHARACTERS

__all__ = ["read_part", "reading"]

_T = TypeVar("_T")


def reading(path: str | os.PathLike[str], read: Callable[[], _T]) -> _T:
    """What a reader makes of a file.

    Raises:
        CaptureError: the reader raised; says so of the file.
        FileNotFoundError: there is no such file.
    """
    try:
        return read()
    except FileNotFoundError:
        raise
    except FxCaptureError as error:
        what = f"{str(path)!r}: {error.what}"
        raise CaptureError(what, why=error.why, remedy=error.remedy) from error
    except Exception as error:
        raise CaptureError(
            f"{str(path)!r} cannot be read",
            why=f"{type(error).__name__}: {str(error) or 'no reason given'}",
            remedy="name a file that CapturedProgram.save or .package wrote, whole",
        ) from error


def read_part(path: str | os.PathLike[str], name: str) -> str | None:
    """An extra file in a saved program; ``None`` if there is none.

    Every part but the weights, which are raw bytes and may be many, is checked against
    its sum.

    Raises:
        CaptureError: the file is no archive, or is damaged.
        FileNotFoundError: there is no such file.
    """
    return reading(path, lambda: _read_part(path, name))


def _read_part(path: str | os.PathLike[str], name: str) -> str | None:
    found: bytes | None = None
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            folders = info.filename.split("/")
            if folders[1:3] == ["data", "weights"] and folders[-1][-5:] != ".json":
                continue
            wanted = folders[1:] == ["extra", name]
            if wanted and info.file_size > MAX_CHARACTERS:
                raise ValueError(f"{name} has {info.file_size:,} bytes")
            with archive.open(info) as part:
                while block := part.read(2**20):
                    if wanted:
                        found = (found or b"") + block
    return None if found is None else found.decode()
