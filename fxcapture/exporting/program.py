"""An exported program that returns records: called, saved, loaded and converted.

Terms
    captured program: an ``ExportedProgram`` with taps as named outputs, and the
        manifest that says what they mean.
    package: the same, compiled ahead of time by AOTInductor, see ``package``.

Invariants
    Loading and running a program or a package needs torch and this package only: the
    model's code is not imported, and neither is any library that it came from, unless
    the caller trusts it.  What torch itself does with a file is torch's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.export import ExportedProgram

from fxcapture import _torch
from fxcapture.errors import CaptureError
from fxcapture.exporting import rebuild
from fxcapture.exporting.archive import read_part, reading
from fxcapture.exporting.manifest import Manifest
from fxcapture.exporting.package import METADATA
from fxcapture.exporting.refusals import check_file, check_installed, refusing
from fxcapture.inspect.nothing import Nothing, find_nothing
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.sites import SiteTable
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.stored import Trust, trusting

__all__ = ["CapturedProgram", "load"]

_FILE = "fxcapture.json"
_log = logging.getLogger("fxcapture")


@final
class CapturedProgram:
    """An exported program that returns its output and the records.

    Made by :func:`export`, :func:`load` and :func:`fxcapture.instrument`.

    Attributes:
        program: The ``ExportedProgram``.  It returns ``(output, {name: tensor, ...})``,
            or the dictionary alone under ``keep_output=False``; names are
            ``{record}_{position}``, see ``manifest.outputs``.
        manifest: What its added outputs mean.
        sites: The sites that the export found; empty after :func:`load`.
    """

    def __init__(
        self,
        program: ExportedProgram,
        manifest: Manifest,
        *,
        sites: SiteTable | None = None,
        spec: CaptureSpec | None = None,
        trust: Trust = Trust(),  # noqa: B008 - frozen
    ) -> None:
        self.program = program
        self.manifest = manifest
        self._spec = spec
        self._trust = trust
        self.sites = SiteTable() if sites is None else sites
        self._module: nn.Module | None = None

    @property
    def spec(self) -> CaptureSpec:
        """The spec it was made with.

        Raises:
            CaptureError: the spec holds an object that could not be stored.
            SpecError: it names an object that :func:`load` was not told to trust.
        """
        if self._spec is None:
            self._spec = self.manifest.load_spec(self._trust)
        return self._spec

    @property
    def nothing(self) -> dict[str, Nothing]:
        """The records that can hold nothing but ``None``, by name, with why."""
        return find_nothing(self.manifest.records, [self.program.graph_module])

    def module(self) -> nn.Module:
        """The program as a module of its own; see ``ExportedProgram.module``."""
        return self.program.module()

    def read(self, values: Mapping[str, Any]) -> Records:
        """Records from the dictionary that the program returned.

        Args:
            values: Output name to tensor; not copied.  Also what another runtime, such
                as ONNX Runtime, returned under these names.
        """
        return self.manifest.read(values)

    def __call__(self, *args: Any, **kwargs: Any) -> Captured:
        """Run the program.

        Parameters and buffers are the program's; buffers that the model writes to are
        written.  Records are tensors of their own, with gradients unless detached.

        Args:
            *args: The model's arguments.
            **kwargs: Its keyword arguments, and the ``capture_inputs`` of the export.

        Raises:
            CaptureError: arguments are passed by position that were exported by name,
                or the program was not exported for such arguments.
        """
        if self._module is None:
            self._module = self.program.module()
        args, kwargs = rebuild.arrange(self.program, args, kwargs)
        with refusing():
            raw = self._module(*args, **kwargs)
        return self.manifest.split(raw)

    def run_decompositions(self, *args: Any, **kwargs: Any) -> CapturedProgram:
        """The same program after ``ExportedProgram.run_decompositions``."""
        made = self.program.run_decompositions(*args, **kwargs)
        rebuild.restore_names(made, [o.name for o in self.manifest.outputs])
        return CapturedProgram(
            made, self.manifest, sites=self.sites, spec=self._spec, trust=self._trust
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name for each output tensor, the model's own first.

        The model's are called after their place (``last_hidden_state``, ``0_1``, or
        ``output`` if there is one only); the added ones as in ``manifest.outputs``.
        """
        added = [o.name for o in self.manifest.outputs]
        if not self.manifest.keep_output:
            return tuple(added)
        own = rebuild.own_output_names(self.portable(), len(added))
        taken = set(added)
        return (*(f"output_{n}" if n in taken else n for n in own), *added)

    def onnx(self, path: str | os.PathLike[str] | None = None, **kwargs: Any) -> Any:
        """Convert to ONNX; the outputs are called ``output_names``.

        Needs the ``onnx`` extra.  ``read`` makes records of what ONNX Runtime returns.

        Args:
            path: Where to write the model; ``None`` to only return it.
            **kwargs: Further keywords of ``torch.onnx.export``.

        Returns:
            The ``torch.onnx.ONNXProgram``.

        Raises:
            ModuleNotFoundError: a package of the ``onnx`` extra is not installed.
        """
        for module in ("onnx", "onnxscript"):
            check_installed(module, "onnx")
        program = self.portable()
        args, example_kwargs = program.example_inputs or ((), {})
        made = torch.onnx.export(
            program,
            tuple(args),
            kwargs=dict(example_kwargs),
            dynamo=True,
            output_names=list(self.output_names),
            **kwargs,
        )
        if path is not None:
            made.save(Path(path))  # type: ignore[union-attr]
        return made

    def portable(self) -> ExportedProgram:
        """The program without classes of the model's in its output.

        A dictionary class, such as ``ModelOutput``, becomes a ``dict`` with the same
        keys, another one a tuple: the program can then be loaded without the model's
        code.  Parameters are shared with ``program``.
        """
        return rebuild.with_plain_output(self.program)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.pt2`` file for :func:`load` (``torch.export.load`` reads it too).

        Raises:
            CaptureError: torch cannot serialise the program.
        """
        try:
            torch.export.save(
                self.portable(),
                Path(path),
                extra_files={_FILE: self.manifest.to_json()},
            )
        except Exception as error:
            raise CaptureError(
                f"the program cannot be saved to {str(path)!r}",
                why=f"{type(error).__name__}: {error}",
                remedy="see the reason; torch.export.save writes graphs of registered "
                "operators, with inputs of registered types",
            ) from error

    def package(
        self,
        path: str | os.PathLike[str],
        *,
        inductor_configs: Mapping[str, Any] | None = None,
    ) -> Path:
        """Compile with AOTInductor into one file for :func:`load_package`.

        Args:
            path: The file to write; it must end in ``.pt2``.
            inductor_configs: As for ``torch._inductor.aoti_compile_and_package``.

        Returns:
            Where the package is.
        """
        made = _torch.aoti_package(
            self.portable(),
            str(path),
            dict(inductor_configs or {}),
            {METADATA: self.manifest.to_json()},
        )
        return Path(made)

    def __repr__(self) -> str:
        names = ", ".join(o.name for o in self.manifest.outputs)
        lines = [self.manifest.spec_text, f"  outputs: {names}"]
        lines += [f"  {nothing}" for nothing in self.nothing.values()]
        return "CapturedProgram(" + "\n".join(lines) + ")"


def load(path: str | os.PathLike[str], *, trust: Iterable[str] = ()) -> CapturedProgram:
    """Read what :meth:`CapturedProgram.save` wrote.

    The manifest is data, and imports nothing.  The program in the file is read by
    ``torch.export.load``, which is not made for files from people you do not trust.

    Args:
        path: The file.
        trust: Modules whose objects the file may name: the container classes of
            records, and with ``.spec`` the classes and functions of the spec.

    Raises:
        CaptureError: the file holds no captured program, or is damaged.
        FileNotFoundError: there is no such file.
    """
    check_file(path)
    trusted = trusting(trust)
    text = read_part(path, _FILE)
    if text is None:
        raise CaptureError(
            f"{str(path)!r} holds no captured program",
            why="it is an exported program without a manifest of fxcapture's",
            remedy="load it with torch.export.load and pass it to fxcapture.instrument",
        )
    manifest = reading(path, lambda: Manifest.from_json(text, trusted))
    program = reading(path, lambda: torch.export.load(Path(path)))
    if not manifest.describes(program.call_spec.out_spec):
        raise CaptureError(
            f"{str(path)!r} is damaged",
            why="its manifest speaks of other outputs than the program returns",
            remedy="export the model again",
        )
    return CapturedProgram(program, manifest, trust=trusted)
