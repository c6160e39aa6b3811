"""A captured program that AOTInductor has compiled ahead of time into one file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, final

from fxcapture import _torch
from fxcapture.errors import CaptureError
from fxcapture.exporting.archive import reading
from fxcapture.exporting.manifest import Manifest
from fxcapture.exporting.refusals import check_file
from fxcapture.plan.records import Captured
from fxcapture.spec.stored import trusting

__all__ = ["METADATA", "CapturedPackage", "load_package"]

#: The name of the manifest among a package's metadata.
METADATA = "fxcapture_manifest"


@final
class CapturedPackage:
    """A program compiled ahead of time; made by :func:`load_package`.

    Attributes:
        manifest: What its added outputs mean.
    """

    def __init__(self, compiled: Any, manifest: Manifest) -> None:
        self._compiled = compiled
        self.manifest = manifest

    def __call__(self, *args: Any, **kwargs: Any) -> Captured:
        """Run the package, with the program's arguments; no record has a gradient."""
        return self.manifest.split(self._compiled(*args, **kwargs))


def load_package(
    path: str | os.PathLike[str], *, trust: Iterable[str] = ()
) -> CapturedPackage:
    """Read what :meth:`CapturedProgram.package` wrote.

    A package is machine code: load it only if you would run a program from the same
    place.

    Args:
        path: The file.
        trust: Modules whose container classes the package's records may be of.

    Raises:
        CaptureError: the file holds no captured program, or is damaged.
        FileNotFoundError: there is no such file.
    """
    check_file(path)
    trusted = trusting(trust)
    compiled, metadata = reading(path, lambda: _torch.aoti_load(str(path)))
    if METADATA not in metadata:
        raise CaptureError(
            f"{str(path)!r} holds no captured program",
            why="it is an AOTInductor package without a manifest of fxcapture's",
            remedy="make it with CapturedProgram.package",
        )
    stored = metadata[METADATA]
    manifest = reading(path, lambda: Manifest.from_json(stored, trusted))
    return CapturedPackage(compiled, manifest)
