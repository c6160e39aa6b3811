"""Bind a spec to the sites of one run.

Invariants
    Positions are what the user wrote; a negative one is resolved here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxcapture.errors import (
    NeverCalledError,
    SelectionError,
    TargetNotFoundError,
    nearest,
)
from fxcapture.plan.function_hits import check_called_inside, function_hits
from fxcapture.plan.match import Match
from fxcapture.plan.plan import Plan, RecordPlan, Slot
from fxcapture.plan.sites import Site
from fxcapture.plan.slots import (
    elements_of,
    is_attention,
    is_none,
    recorded_entry,
    slot_of,
)
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.positions import normalise_select
from fxcapture.spec.tap import Tap

__all__ = ["canonical_selection", "resolve"]

#: Record name to positions, where they differ from the spec's.
SelectionMap = Mapping[str, Any]


def canonical_selection(
    spec: CaptureSpec, select: SelectionMap | None
) -> tuple[tuple[str, Any], ...]:
    """A per-call selection in hashable form; empty where the spec's own holds.

    Raises:
        TargetNotFoundError: it names a record that the spec does not have.
        SpecTypeError: a value is no selection.
    """
    if not select:
        return ()
    for name in select:
        if name not in spec:
            raise TargetNotFoundError(
                f"select names the record {name!r}, which the spec does not have",
                nearest=nearest(name, spec),
                remedy="use one of the spec's record names: " + ", ".join(spec),
            )
    return tuple(
        (name, normalise_select(select[name], f"select[{name!r}]"))
        for name in spec
        if name in select
    )


def resolve(
    spec: CaptureSpec,
    bound: Match,
    sites: Sequence[Site],
    selection: Sequence[tuple[str, Any]] = (),
) -> Plan:
    """Bind a spec to the sites of one whole run.

    Args:
        spec: The spec.
        bound: The same spec bound to the model's modules.
        sites: Every site of the run, in call order.
        selection: Positions that replace the spec's, from :func:`canonical_selection`.

    Raises:
        NeverCalledError: a matched module has no site.
        SelectionError: a selected position does not exist.
        ElementError: an output lacks the requested element.
        UnsupportedOutputError: a recorded value holds a non-tensor object.
    """
    overrides = dict(selection)
    return Plan(
        records=tuple(
            _resolve_record(name, tap, bound, sites, overrides.get(name, tap.select))
            for name, tap in spec.items()
        )
    )


def _resolve_record(
    name: str,
    tap: Tap,
    bound: Match,
    sites: Sequence[Site],
    select: Any,
) -> RecordPlan:
    paths = frozenset(bound.paths[name])
    if tap.function is None:
        found = [i for i, site in enumerate(sites) if site.path in paths]
    else:
        found = function_hits(tap.function, paths, sites)
    hits = [(i, o) for i in found for o in elements_of(tap, sites[i].path)]
    if not tap.optional:
        called = {sites[i].path for i, _ in hits}
        missing = [p for p in bound.paths[name] if p not in called]
        if missing and tap.function is not None:
            check_called_inside(name, tap, bound, missing, sites)
        elif missing:
            raise _never_called(name, tap, bound, missing, sites)
    initial = tap.initial and bool(hits)
    if tap.recorded is not None and hits:
        initial = initial and sites[hits[0][0]].path in tap.recorded.initial
        if not tap.recorded.keeps and all(
            is_none(recorded_entry(sites[i], name, tap, output)) for i, output in hits
        ):
            return RecordPlan(name=name, paths=(), slots=())
    length = len(hits) + initial
    chosen = _positions(name, tap, select, length)
    slots: list[Slot | None] = []
    for position in range(length):
        if position not in chosen:
            slots.append(None)
            continue
        entry = tap.point == "input" or (initial and position == 0)
        entry = entry or is_attention(tap)
        index, output = hits[max(position - initial, 0)]
        slots.append(
            slot_of(index, sites[index], name, tap, bound, entry=entry, output=output)
        )
    order = ([hits[0]] if initial else []) + hits
    return RecordPlan(
        name=name, paths=tuple(sites[i].path for i, _ in order), slots=tuple(slots)
    )


def _positions(name: str, tap: Tap, select: Any, length: int) -> frozenset[int]:
    if select is None:
        return frozenset(range(length))
    if not isinstance(select, tuple):
        return frozenset(select.indices(length))
    outside = [i for i in select if not -length <= i < length]
    if outside and not tap.optional:
        what = ", ".join(map(str, outside))
        raise SelectionError(
            f"record {name!r}: position {what} does not exist",
            why=f"{tap.written} was called {length - (tap.initial and length > 0)} "
            + "times"
            + (" and the initial input is position 0" if tap.initial else "")
            + f", so positions run from {-length} to {length - 1}"
            if length
            else f"{tap.written} has no hit in this run",
            remedy="select a position in that range, or pass optional=True",
        )
    return frozenset(i % length for i in select if -length <= i < length)


def _never_called(
    name: str,
    tap: Tap,
    bound: Match,
    missing: Sequence[str],
    sites: Sequence[Site],
) -> NeverCalledError:
    shown = ", ".join(
        f"{p or 'the model'!r} ({bound.classes[p]})" for p in missing[:5]
    ) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    called = dict.fromkeys(site.path for site in sites)
    return NeverCalledError(
        f"record {name!r}: {tap.target} matched {shown}, which this run never called",
        why="the model's forward took a path that does not call it",
        nearest=nearest(missing[0], called),
        remedy="narrow the target to modules that run, or pass optional=True",
    )
