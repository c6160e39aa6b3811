"""A decorated call in a trace of Dynamo's that is not ours.

There no pass of ours sees the graph: values are collected in the trace, by the same
overrides as everywhere, and returned by it.

Invariants
    Traced code is plain Python.  What has to look at the model is done while tracing,
    by functions whose result is a constant; they find the model among the caller's
    local variables, under the name ``model``, since handing it over would guard the
    trace on its identity.
    What decides a trace is guarded on: the declarations are read in the trace, and
    whatever the trace calls is guarded on by Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import nn

from fxcapture import _torch
from fxcapture._torch.dynamo_for_decorators import (
    begin_collection,
    begin_nested,
    end_collection,
    end_nested,
    local_of_trace,
)
from fxcapture.modeling.positions import count_selection, positions_of
from fxcapture.plan.match import match
from fxcapture.plan.resolve import canonical_selection
from fxcapture.runtime.functional import (
    Layout,
    Shape,
    layout_of,
    observe,
    read,
    shapes_of,
)
from fxcapture.spec.declaration import declaration, declaring
from fxcapture.spec.declared_spec import record_spec
from fxcapture.spec.flags import Request
from fxcapture.trace.eager_scope import make_way_for_trace
from fxcapture.trace.mark import ENDS, HOOKED
from fxcapture.trace.scope import Way, way_to

__all__ = ["begin", "collect", "end", "goes_by"]

Names = tuple[str, ...]
Asked = tuple[Request, ...]

#: The collecting calls of the trace under way, innermost last; ``None`` for one that
#: wants nothing, and keeps what it calls from those around it.  Written to in traces
#: only, where it is as before at the end.
_collecting: list[Any] = []


def collect(  # traced, never executed
    model: nn.Module, wanted: dict[str, Request], run: Callable[[], Any]
) -> tuple[Any, dict[str, list[Any]], dict[str, int]]:
    """Make a decorated call and collect what it asks for.

    Args:
        model: The model.
        wanted: Record name to what its flag asks for.
        run: Makes the call.

    Returns:
        What the call returned; record name to entries; of each record whose negative
        positions were counted by the run, how many entries the config promises.
    """
    names = tuple(wanted)
    asked = tuple([wanted[name] for name in names])
    _pin(*_declared(model, names))
    plan = _plan(names, asked)
    collecting = _Collecting(plan)
    _collecting.append(collecting)
    try:
        takes, asks = collecting.takes, collecting.asks
        outputs, seen = observe(run, model, plan[0], {}, takes, asks)
    finally:
        _collecting.pop()
        _end_collection()
    values, _ = read(seen, _layout(names, asked, shapes_of(seen)))
    records = {name: list(values.get(name, ())) for name in names}
    return outputs, records, dict(plan[-1])


@_torch.constant
def begin() -> bool:
    """Enter a decorated call; whether it stands in another one."""
    make_way_for_trace(local_of_trace("model"))
    return begin_nested()


@_torch.constant
def end() -> None:
    """Leave it."""
    end_nested()


@final
class goes_by:
    """A time in which the collecting calls around do not see what is called.

    Args:
        captures: ``False``: they do.
    """

    def __init__(self, captures: bool) -> None:
        self._hides = captures and bool(_collecting)

    def __enter__(self) -> None:
        if self._hides:
            _collecting.append(None)

    def __exit__(self, *error: Any) -> None:
        if self._hides:
            _collecting.pop()


class _Plan(NamedTuple):
    """What a trace collects, as constants.

    Attributes:
        steps: The way to the modules, for ``scope.enter``.
        records: Path to the records that a call of the module gives entries of, each as
            often.
        chosen: Record name to the positions to keep; ``None`` for all.
        begins: Paths of modules whose input can be an initial state, and its record.
        weights: Records of attention weights.
        hooked: Paths of modules with forward hooks.
        promised: See ``positions_of``.
    """

    steps: Way
    records: dict[str, Names]
    chosen: tuple[tuple[str, tuple[int, ...] | None], ...]
    begins: dict[str, Names]
    weights: Names
    hooked: Names
    promised: tuple[tuple[str, int], ...]


@final
class _Collecting:
    """One collecting call of a trace: which entry of each record comes next."""

    def __init__(self, plan: tuple[Any, ...]) -> None:
        _, self.records, chosen, self.begins, self.weights, self.hooked, _ = plan
        # Made in the trace: Dynamo does not look into a set that is a constant.
        self.chosen = {
            name: None if found is None else frozenset(found) for name, found in chosen
        }
        self.next: dict[str, int] = {}

    def asks(self, path: str) -> tuple[bool, bool]:
        """Whether to copy what a call received, and to compute attention weights."""
        if _collecting[-1] is not self:
            return False, False
        copies = weighs = False
        for record in self.begins[path]:
            if record not in self.next:
                copies = copies or self._keeps(record, 0)
        for record in self.records[path]:
            if record in self.weights:
                # Of an entry that comes later too: another call may end before this.
                weighs = weighs or self._keeps(record, self._position(record, path))
        return copies, weighs

    def takes(self, path: str, kind: str) -> bool | None:
        """Whether to keep the tensors of a mark; ``None``: it counts for nothing."""
        if _collecting[-1] is not self:
            return None
        if kind not in ENDS or "::" in path:
            return True  # which of a module's function calls count shows at the end
        last = kind == HOOKED or path not in self.hooked
        kept = False
        for record in self.records[path]:
            position = self._position(record, path)
            kept = kept or self._keeps(record, position)
            if last:
                self.next[record] = position + 1
        return kept

    def _position(self, record: str, path: str) -> int:
        if record in self.next:
            return self.next[record]
        return 1 if record in self.begins[path] else 0

    def _keeps(self, record: str, position: int) -> bool:
        chosen = self.chosen[record]
        return chosen is None or position in chosen


# ------------------------------------------------------------ done while tracing


@_torch.constant
def _plan(names: Names, asked: Asked) -> tuple[Any, ...]:
    """What a trace collects; whoever calls it calls ``_end_collection`` too."""
    model: nn.Module = local_of_trace("model")
    wanted = dict(zip(names, asked, strict=True))
    count_selection(model, (names, asked))
    spec = record_spec(model, names)
    bound = match(spec, model)
    positions, promised = positions_of(model, spec, wanted)
    paths = list(dict.fromkeys(target.path for target in bound.listening))
    taps = {name: tap.recorded for name, tap in spec.items() if tap.recorded}
    begin_collection()
    return tuple(
        _Plan(
            steps=way_to(model, bound.listening, by_dynamo=True, unfused=True),
            records={path: bound.records_of(path) for path in paths},
            chosen=tuple((name, _kept(of)) for name, of in positions.items()),
            begins={
                path: tuple(name for name, of in taps.items() if path in of.initial)
                for path in paths
            },
            weights=tuple(n for n, t in spec.items() if t.attention is not None),
            hooked=tuple(path for path in paths if bound.is_hooked(path)),
            promised=tuple(promised.items()),
        )
    )


def _kept(chosen: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The positions to keep; all, where some can be told at the end only."""
    if chosen is None or any(p < 0 for p in chosen):
        return None
    return chosen


@_torch.constant
def _layout(names: Names, asked: Asked, shapes: Sequence[Shape]) -> Layout:
    model: nn.Module = local_of_trace("model")
    wanted = dict(zip(names, asked, strict=True))
    spec = record_spec(model, names)
    positions, _ = positions_of(model, spec, wanted)
    selection = canonical_selection(spec, positions)
    return layout_of(spec, match(spec, model), shapes, selection)


_end_collection = _torch.constant(end_collection)


@_torch.constant
def _pin(*parts: Any) -> None:
    """Guard the trace on what it is handed."""


@_torch.constant
def _ways() -> tuple[Names, ...]:
    """The ways to the modules that declare records, as Dynamo goes them."""
    model: nn.Module = local_of_trace("model")
    return tuple(
        tuple(name for name in way if name != "_orig_mod") for way in declaring(model)
    )


def _declared(model: nn.Module, names: Names) -> list[Any]:  # traced, never executed
    """Everything that the declarations of some records are made of."""
    parts: list[Any] = []
    for way in _ways():
        module = model
        for name in way:
            module = module._modules[name]  # type: ignore[assignment]
        found: Mapping[str, Any] = declaration(module)
        for record in names:
            if record in found:
                _flatten(found[record], parts)
    return parts


def _flatten(value: Any, parts: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _flatten(part, parts)
    elif value is not None:
        parts.append(value)
