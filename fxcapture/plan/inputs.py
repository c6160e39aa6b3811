"""The inputs of reductions: looked up in a call, before it runs.

A name means an entry of ``capture_inputs``, or else an argument of the model, however
it was passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import ElementError, SpecError, TargetNotFoundError, nearest
from fxcapture.reductions import Reducers, Reduction
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import emit_mark, input_named
from fxcapture.trace.signature import describe_forward

__all__ = [
    "Place",
    "defer_reductions",
    "find_inputs",
    "find_places",
    "input_finder",
    "read_inputs",
    "sources_in_graphs",
    "sources_of",
]

#: Where a call passes an input: position, keyword; ``None`` if it does not.
Place = int | str | None


def sources_of(spec: CaptureSpec) -> dict[str, tuple[str, Reduction]]:
    """Input name to a record that needs it, and that record's reduction."""
    return {
        tap.reduce.source: (name, tap.reduce)
        for name, tap in spec.items()
        if isinstance(tap.reduce, Reduction) and tap.reduce.source is not None
    }


def sources_in_graphs(spec: CaptureSpec) -> tuple[str, ...]:
    """The inputs of reductions that passes write into a graph: these are marked."""
    return tuple(
        dict.fromkeys(
            tap.reduce.source
            for tap in spec.values()
            if isinstance(tap.reduce, Reduction)
            and tap.reduce.source is not None
            and (tap.attention is not None or tap.function is not None)
        )
    )


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
    looked_up = _look_up(spec, model, len(args), tuple(kwargs), tuple(given))
    found = {name: _read(at, args, kwargs, given) for name, at in looked_up}
    for source, (_, reduction) in sources_of(spec).items():
        reduction.check_input(found[source])
    return found


def input_finder(
    spec: CaptureSpec, model: nn.Module
) -> Callable[..., dict[str, torch.Tensor]]:
    """A function that finds the inputs of a call that is traced.

    It takes ``(args, kwargs, capture_inputs)`` and raises what :func:`find_inputs`
    does, but does not look at the values.  It has to be made outside of the trace.
    """

    @_torch.constant
    def look_up(number: int, keywords: Names, given: Names) -> Any:
        return _look_up(spec, model, number, keywords, given)

    def find(
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        capture_inputs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        given = {} if capture_inputs is None else capture_inputs
        looked_up = look_up(len(args), tuple(kwargs), tuple(given))
        return {name: _read(at, args, kwargs, given) for name, at in looked_up}

    return find


Names = tuple[str, ...]
#: Where a call has an input: in ``capture_inputs``, among the keywords, by position, or
#: nowhere.
_At = tuple[str, str | int]


def _read(
    at: _At,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    where, name = at
    if isinstance(name, int):
        return args[name] if where == "position" else None
    return given[name] if where == "given" else kwargs[name]


def _look_up(
    spec: CaptureSpec, model: nn.Module, num_args: int, keywords: Names, given: Names
) -> tuple[tuple[str, _At], ...]:
    """Where a call has each input that a reduction of the spec needs."""
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
        return ()
    parameters = describe_forward(model)
    positional = parameters.names[: parameters.positional][:num_args]
    places: dict[str, _At] = {n: ("position", i) for i, n in enumerate(positional)}
    places |= {name: ("keyword", name) for name in keywords}
    found: list[tuple[str, _At]] = []
    for source, (record, reduction) in wanted.items():
        if source in given:
            found.append((source, ("given", source)))
        elif source in places:
            found.append((source, places[source]))
        elif source in parameters.names and reduction.kind != "gather":
            found.append((source, ("default", -1)))  # nothing is masked
        else:
            known = dict.fromkeys((*places, *parameters.names))
            raise ElementError(
                f"record {record!r}: reduce={reduction!r} needs the input {source!r}, "
                "which this call does not have",
                why="the model takes " + (", ".join(known) or "no named arguments"),
                nearest=nearest(source, known),
                remedy=f"pass capture_inputs={{{source!r}: tensor}}",
            )
    return tuple(found)


def find_places(
    spec: CaptureSpec,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture_inputs: Mapping[str, Any],
) -> dict[str, Place]:
    """Where a trace finds the inputs, all of ``capture_inputs`` being keywords.

    Raises:
        TargetNotFoundError: see :func:`find_inputs`.
        ElementError: see :func:`find_inputs`.
        SpecTypeError: see :func:`find_inputs`.
        SpecError: ``capture_inputs`` has a name that the model's forward has too.
    """
    names, _, _, _, positional = describe_forward(model)
    for name in capture_inputs:
        if name in names or name in kwargs:
            raise SpecError(
                f"capture_inputs has {name!r}, which is an argument of the model",
                why="both would be the exported program's input of that name",
                remedy="name it differently in the reduction and in capture_inputs",
            )
    places: dict[str, Place] = {}
    for name in find_inputs(spec, model, args, kwargs, capture_inputs):
        if name in capture_inputs or name in kwargs:
            places[name] = name
        else:
            position = names.index(name)
            given = position < min(len(args), positional)
            places[name] = position if given else None
    return places


def read_inputs(
    forward: Callable[..., Any],
    reducers: Reducers,
    places: Mapping[str, Place],
    added: Mapping[str, Any],
    marked: Collection[str] = (),
) -> tuple[Callable[..., Any], dict[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """A forward that looks its inputs up, and reducers that use them; for a trace.

    Args:
        forward: The model's.
        reducers: Record name to reducer.
        places: Where ``forward`` is passed each input.
        added: Keywords that are for the reducers alone.
        marked: Inputs to mark, for reductions that a pass writes into the graph.
    """
    found: dict[str, Any] = {}

    def reading(*args: Any, **kwargs: Any) -> Any:
        for name, place in places.items():
            if place is None:
                found[name] = None
            else:
                found[name] = args[place] if isinstance(place, int) else kwargs[place]
        for name in marked:
            given = [] if found[name] is None else [found[name]]
            emit_mark(None, given, [], "N", "", input_named(name))
        own = {name: value for name, value in kwargs.items() if name not in added}
        try:
            return forward(*args, **own)
        finally:
            # What Dynamo traces must leave nothing behind.
            for name in places:
                del found[name]

    def with_input(reduction: Reduction, source: str) -> Any:
        return lambda value: reduction.apply(value, found[source])

    made = {
        name: with_input(reduce, reduce.source)
        if isinstance(reduce, Reduction) and reduce.source is not None
        else reduce
        for name, reduce in reducers.items()
    }
    return reading, made


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
        if _torch.is_traced():
            return value
        return reduction.apply(value, inputs()[str(reduction.source)])

    return reduce
