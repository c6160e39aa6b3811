"""What could be captured inside of modules: the function calls that each makes.

Terms
    function point: one function call of a module's first call.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final, overload

import torch

from fxcapture.inspect.estimate import format_bytes
from fxcapture.inspect.hearing import HeardCall
from fxcapture.plan.printing import preformatted
from fxcapture.plan.sites import format_table
from fxcapture.spec.function import numbered, site_path
from fxcapture.trace.functions import parameters_of
from fxcapture.trace.structure_text import encode, parse

__all__ = ["FunctionPoint", "FunctionSurvey", "Notes"]

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


#: Parameters that methods take as one list or as several integers.
_SEVERAL = ("size", "shape", "dims", "repeats")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPoint:
    """One function call inside of a module.

    Attributes:
        path: The target that means it and no other: ``"layers.0::add[1]"``.
        arguments: What it received, in words, by the names of its parameters.
        output: What it returned, in words.
        shapes: Shapes of the tensors in it.
        dtypes: Their dtypes, without the ``torch.`` prefix.
        num_bytes: Bytes that recording it would keep.
        line: File and line of the model's code that makes the call.
    """

    path: str
    arguments: str
    output: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_bytes: int
    line: str


@final
class FunctionSurvey(Sequence[FunctionPoint]):
    """The function calls inside of modules, in call order; prints as a table."""

    __slots__ = ("_points",)

    def __init__(self, points: Sequence[FunctionPoint]) -> None:
        self._points = tuple(points)

    @overload
    def __getitem__(self, index: int) -> FunctionPoint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FunctionPoint]: ...
    def __getitem__(
        self, index: int | slice
    ) -> FunctionPoint | Sequence[FunctionPoint]:
        return self._points[index]

    def __len__(self) -> int:
        return len(self._points)

    def __str__(self) -> str:
        rows = [("target", "arguments", "output", "shape", "dtype", "bytes", "line")]
        rows += [
            (
                point.path,
                point.arguments,
                point.output,
                " ".join("(" + ", ".join(map(str, s)) + ")" for s in point.shapes),
                " ".join(dict.fromkeys(point.dtypes)),
                format_bytes(point.num_bytes),
                point.line,
            )
            for point in self._points
        ]
        return format_table(rows)

    def __repr__(self) -> str:
        return f"FunctionSurvey({len(self)} calls)\n{self}"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


@final
class Notes:
    """Notes the function calls of the first call of each module.

    Attributes:
        points: What was noted.
    """

    def __init__(self) -> None:
        self.points: list[FunctionPoint] = []
        self._first: dict[str, dict[str, int]] = {}

    def begins(self, call: HeardCall) -> str:
        """The line of the code that makes the call."""
        return _line_of(sys._getframe(1))

    def ended(self, call: HeardCall, begun: Any, result: Any) -> None:
        """Note the call, if its module's call is the first."""
        if self._first.setdefault(call.path, call.counts) is not call.counts:
            return
        tensors: list[torch.Tensor] = []
        structure = parse(encode(result, tensors, []))
        self.points.append(
            FunctionPoint(
                path=numbered(site_path(call.path, call.name), call.index),
                arguments=_arguments(call),
                output=structure.describe(),
                shapes=tuple(tuple(t.shape) for t in tensors),
                dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
                num_bytes=sum(t.numel() * t.element_size() for t in tensors),
                line=begun,
            )
        )


def _line_of(frame: types.FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _TORCH)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _arguments(call: HeardCall) -> str:
    """The arguments as in a call, tensors by their shapes."""
    names: Sequence[str] = ()
    if call.called is not None:
        found = parameters_of(call.called, len(call.args)).names
        # A method's own tensor is called as the function's is.
        names = ["input" if name == "self" else name for name in found]
    if call.name == "to" or any(
        n in _SEVERAL and type(v) is int for n, v in zip(names, call.args, strict=False)
    ):
        names = names[:1]  # of several forms: x.view(2, -1)
    shown = [
        f"{names[i]}={_shown(value)}" if i < len(names) else _shown(value)
        for i, value in enumerate(call.args)
    ]
    shown += [f"{name}={_shown(value)}" for name, value in call.kwargs.items()]
    return ", ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "(" + ", ".join(map(str, value.shape)) + ")"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    text = str(value) if isinstance(value, torch.dtype) else repr(value)
    return text if len(text) <= 24 else f"<{type(value).__name__}>"
