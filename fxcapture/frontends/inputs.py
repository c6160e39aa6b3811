"""The inputs of reductions: looked up in a call, before it runs.

A name means an entry of ``capture_inputs``, or else an argument of the model, however
it was passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxcapture.errors import ElementError, TargetNotFoundError, nearest
from fxcapture.mark import describe_forward
from fxcapture.reductions import Reducers, Reduction
from fxcapture.spec import CaptureSpec

__all__ = ["defer_reductions", "find_inputs", "sources_of"]


def sources_of(spec: CaptureSpec) -> dict[str, tuple[str, Reduction]]:
    """Input name to a record that needs it, and that record's reduction."""
    return {
        tap.reduce.source: (name, tap.reduce)
        for name, tap in spec.items()
        if isinstance(tap.reduce, Reduction) and tap.reduce.source is not None
    }


def find_inputs(
    spec: CaptureSpec,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture_inputs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Name to value of every input that a reduction of the spec needs.

    Raises:
        TargetNotFoundError: ``capture_inputs`` has an entry that no reduction names.
        ElementError: a reduction names an input that the call does not have.
        SpecTypeError: an input is no tensor that its reduction can use.
    """
    given = capture_inputs or {}
    wanted = sources_of(spec)
    for name in given:
        if name not in wanted:
            raise TargetNotFoundError(
                f"capture_inputs has {name!r}, which no reduction of the spec names",
                nearest=nearest(name, wanted),
                remedy="name it in a reduction, such as reductions.gather"
                f"({name!r}), or leave it out",
            )
    if not wanted:
        return {}
    parameters = describe_forward(model)
    passed = dict(zip(parameters.names, args, strict=False)) | dict(kwargs)
    found: dict[str, Any] = {}
    for source, (record, reduction) in wanted.items():
        if source in given:
            found[source] = given[source]
        elif source in passed:
            found[source] = passed[source]
        elif source in parameters.names and reduction.kind != "gather":
            found[source] = None  # left at its default: nothing is masked
        else:
            known = dict.fromkeys((*passed, *parameters.names))
            raise ElementError(
                f"record {record!r}: reduce={reduction!r} needs the input {source!r}, "
                "which this call does not have",
                why="the model takes " + (", ".join(known) or "no named arguments"),
                nearest=nearest(source, known),
                remedy=f"pass capture_inputs={{{source!r}: tensor}}",
            )
        reduction.check_input(found[source])
    return found


def defer_reductions(
    reducers: Reducers, inputs: Callable[[], Mapping[str, Any]]
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Reducers that leave a reduction with an input for after the graph.

    Where a run is several graphs, a graph does not see the call's inputs.  It returns
    the unreduced value, which is reduced as soon as the graph is done.

    Args:
        reducers: Record name to reducer.
        inputs: The inputs of the running call; asked outside of graphs only.
    """
    return {
        name: _deferred(reduce, inputs)
        if isinstance(reduce, Reduction) and reduce.source is not None
        else reduce
        for name, reduce in reducers.items()
    }


def _deferred(
    reduction: Reduction, inputs: Callable[[], Mapping[str, Any]]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def reduce(value: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return value
        return reduction.apply(value, inputs()[str(reduction.source)])

    return reduce
