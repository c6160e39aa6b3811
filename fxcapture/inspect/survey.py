"""What could be captured: every module call of one run, without running anything.

Terms
    point: one module, with what its calls return.

Invariants
    The model is neither changed nor run: a copy of it runs on tensors without data, so
    that a model of any size can be surveyed, also one on the meta device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, overload

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import SpecTypeError, TraceError
from fxcapture.inspect.arguments import example_arguments
from fxcapture.inspect.estimate import format_bytes
from fxcapture.inspect.fake_run import Fakes
from fxcapture.inspect.hearing import hearing
from fxcapture.inspect.inside import FunctionPoint, FunctionSurvey, Notes
from fxcapture.plan.match import match
from fxcapture.plan.printing import preformatted
from fxcapture.plan.sites import (
    Site,
    SiteTable,
    format_table,
    group_marks,
    pair_hooked,
    site_of,
)
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.selector import Selector
from fxcapture.spec.tap import Tap
from fxcapture.trace.fused_layers import fused_attention
from fxcapture.trace.mark import Mark
from fxcapture.trace.method_entry import as_module
from fxcapture.trace.scope import Saved, enter, leave, way_to

__all__ = ["Point", "Survey", "sites"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One module that a run calls.

    Attributes:
        path: Its path.
        class_name: Its class.
        num_calls: How often the run calls it.
        output: What the first call returns, in words.
        shapes: Shapes of the tensors in it.
        dtypes: Their dtypes, without the ``torch.`` prefix.
        num_bytes: Bytes that recording every call would keep.
    """

    path: str
    class_name: str
    num_calls: int
    output: str
    shapes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[str, ...]
    num_bytes: int


@final
class Survey(Sequence[Point]):
    """The points of a model, in the order of their first return; prints as a table.

    Attributes:
        sites: Every call, in call order.
    """

    __slots__ = ("_points", "sites")

    def __init__(self, table: SiteTable) -> None:
        self.sites = table
        calls: dict[str, list[Site]] = {}
        for site in table:
            calls.setdefault(site.path, []).append(site)
        self._points = tuple(
            Point(
                path=path,
                class_name=found[0].class_name,
                num_calls=len(found),
                output=found[0].result.describe(),
                shapes=found[0].shapes,
                dtypes=found[0].dtypes,
                num_bytes=sum(map(_num_bytes, found)),
            )
            for path, found in calls.items()
        )

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        return self._points[index]

    def __len__(self) -> int:
        return len(self._points)

    def __str__(self) -> str:
        rows = [("path", "class", "calls", "output", "shape", "dtype", "bytes")]
        rows += [
            (
                point.path or "(model)",
                point.class_name,
                str(point.num_calls),
                point.output,
                " ".join("(" + ", ".join(map(str, s)) + ")" for s in point.shapes),
                " ".join(point.dtypes),
                format_bytes(point.num_bytes),
            )
            for point in self._points
        ]
        return format_table(rows)

    def __repr__(self) -> str:
        return f"Survey({len(self)} points)\n{self}"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def _num_bytes(site: Site) -> int:
    return sum(
        math.prod(size for size in shape if isinstance(size, int))
        * getattr(torch, dtype).itemsize
        for shape, dtype in zip(site.shapes, site.dtypes, strict=True)
    )


@overload
def sites(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    inside: None = None,
) -> Survey: ...
@overload
def sites(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    inside: Any,
) -> FunctionSurvey: ...
def sites(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    inside: Any = None,
) -> Survey | FunctionSurvey:
    """List what a model lets one capture, without running it.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        print(sites(model, (torch.zeros(1, 2048, dtype=torch.long),)))

    Args:
        model: The model; neither changed nor run.  Nothing is allocated for its
            parameters, and it may be on the meta device.
        args: Example arguments, or the only one if it is a tensor; their shapes and
            dtypes count, not their values.
        kwargs: Example keyword arguments.
        device: Where to pretend that everything is; by default where it is.
        inside: A target, as in a :class:`Tap`: list the function calls that these
            modules make themselves, each in its first call, with the target that means
            it.

    Returns:
        One point for each module that the run calls, or for each function call.

    Raises:
        TargetNotFoundError: ``inside`` matches no module.
        SpecTypeError: ``model`` is no module, or ``args`` no arguments.
        TraceError: the model reads the value of a tensor.
    """
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise SpecTypeError(
            f"model is of type {type(model).__name__}",
            remedy="pass a torch.nn.Module",
        )
    positional, named = example_arguments(args, kwargs)
    model = _torch.unwrap_optimized(model)
    fakes = Fakes(device)
    shadow = fakes.model(model)
    call = functools.partial(_run, shadow, fakes, positional, named)
    if inside is not None:
        return FunctionSurvey(_inside(shadow, inside, call))
    everything = CaptureSpec({"all": Tap("**", optional=True)})
    bound = match(everything, shadow)
    marks: list[Mark] = []

    def note(*fields: Any) -> None:
        marks.append(Mark(*fields))

    saved = Saved([], [])
    try:
        way = way_to(shadow, bound.targets, by_dynamo=False)
        enter(shadow, way, note, {}, into=saved)
        call()
    finally:
        leave(saved)
    found = [
        site_of(
            call,
            path=call.result.path,
            classes=bound.classes,
            type_of=_type_of,
            size_of=_constant,
        )
        for call in group_marks(marks)
    ]
    return Survey(SiteTable(pair_hooked(found)[0]))


def _run(
    shadow: nn.Module, fakes: Fakes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call the fake model."""
    try:
        # The fused kernel for inference calls no submodule.
        with torch.no_grad(), fakes.mode, fused_attention(False):
            shadow(*fakes.value(args), **fakes.value(kwargs))
    except _torch.no_data_errors() as error:
        raise TraceError(
            f"{type(shadow).__name__} reads the value of a tensor, so that what it "
            "calls depends on the data",
            why=f"{type(error).__name__}: {error}".strip().replace("\n", "\n    "),
            remedy="survey the part of the model that does not; CapturedModule.sites "
            "lists what a real call found",
        ) from error


def _inside(
    shadow: nn.Module, target: Any, call: Callable[[], None]
) -> list[FunctionPoint]:
    """The function calls of the modules that a target means."""
    table = ModuleTable(shadow)
    paths = Selector.of(target).match(table)
    notes = Notes()
    with hearing(shadow, {id(table.first[p][1]): p for p in paths}, notes):
        call()
    return notes.points


def _type_of(tensor: torch.Tensor) -> tuple[list[int | str], str]:
    shape: list[int | str] = [
        size if isinstance(size, int) else str(size) for size in tensor.shape
    ]
    return shape, str(tensor.dtype).removeprefix("torch.")


def _constant(size: Any) -> int | None:
    return size if isinstance(size, int) else None
