"""Files and arguments that a captured program cannot be made of, or called with."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fxcapture.errors import CaptureError, install_extra, nearest

__all__ = ["check_file", "check_installed", "refusing"]

_GUARD = "Guard failed: "


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse what is no archive, before torch logs a page about it.

    Raises:
        FileNotFoundError: there is no such file; it names those that are there.
        CaptureError: it is something else.
    """
    file = Path(path)
    if not file.exists():
        here = sorted(p.name for p in file.parent.glob("*.pt2"))
        near = ", ".join(nearest(file.name, here) or here[:5])
        raise FileNotFoundError(
            errno.ENOENT,
            "there is no such file"
            + (f"; {file.parent.resolve()} has {near}" if near else ""),
            str(path),
        )
    if not zipfile.is_zipfile(file):
        raise CaptureError(
            f"{str(path)!r} holds no captured program",
            why="it is no .pt2 archive, or was cut short when it was written",
            remedy="write it with CapturedProgram.save or CapturedProgram.package",
        )


def check_installed(module: str, extra: str) -> None:
    """Refuse to go on without an optional package.

    Raises:
        ModuleNotFoundError: it is not installed; the text says what to install.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"this needs {module}, which is not installed\n"
            f"  what to do: {install_extra(extra)}",
            name=module,
        )


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn what torch raises of arguments that no program was exported for into ours.

    Raises:
        CaptureError: the call inside met such arguments.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        ours = _refused(error)
        if ours is None:
            raise
        raise ours from error


def _refused(error: Exception) -> CaptureError | None:
    text = str(error).strip()
    if text.startswith(_GUARD):
        return CaptureError(
            "the program was not exported for such arguments",
            why=f"it holds for {text.removeprefix(_GUARD)} alone: a size that the "
            "export was not told to keep free is that of its example arguments",
            remedy="export it with dynamic_shapes={argument: {dimension: "
            "torch.export.Dim.AUTO}}, or pass arguments of the example's sizes",
        )
    if "input tree spec" in text:
        return CaptureError(
            "the program does not take these arguments",
            why=" ".join(text.split()),
            remedy="pass as many arguments as the export was given, by position or by "
            "name as they were then",
        )
    return None
