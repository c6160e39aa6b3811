"""Bind a spec to the sites of one run.

Invariants
    Positions are what the user wrote; a negative one is resolved here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fxcapture.errors import (
    ElementError,
    FxCaptureError,
    NeverCalledError,
    SelectionError,
    TargetNotFoundError,
    UnsupportedOutputError,
    nearest,
)
from fxcapture.plan.match import Match, entry_name, takes_entry
from fxcapture.plan.plan import Leaf, Plan, RecordPlan, Slot
from fxcapture.plan.sites import Site
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.positions import normalise_select
from fxcapture.spec.tap import Tap
from fxcapture.trace.mark import ENTRY, RESULT, received, reduced, weights
from fxcapture.trace.signature import NoArgument
from fxcapture.trace.structure import Structure
from fxcapture.trace.structure_text import parse

__all__ = ["canonical_selection", "leaves_of", "named_leaves_of", "resolve"]

#: Record name to positions, where they differ from the spec's.
SelectionMap = Mapping[str, Any]


class RecordedElementError(ElementError, IndexError):
    """A recorder's index that the module's output does not have."""


Element = int | str | None


def _elements(tap: Tap, path: str) -> tuple[Element, ...]:
    """The elements that one call of a module gives a record entries of."""
    return (tap.output,) if tap.recorded is None else tap.recorded.of(path)


def _slot(
    index: int,
    site: Site,
    name: str,
    tap: Tap,
    bound: Match,
    *,
    entry: bool,
    output: Element,
) -> Slot:
    """The value that ``tap`` takes from ``site``: its result, or what it received."""
    kind = RESULT
    if tap.recorded is not None and not entry:
        kind, structure = _recorded(site, name, tap, output)
        what = f"the output of {site.describe()}, {site.result.describe()}"
    elif tap.attention is not None:
        kind = weights(name)
        structure = _weights(site, name)
        what = f"the attention weights of {site.describe()}"
    elif entry:
        kind = received(name) if tap.reduce is not None else ENTRY
        which = bound.entries[site.path].index(entry_name(tap))  # type: ignore[arg-type]
        structure = site.arguments.children[which]
        what = f"the input of {site.describe()}"
    else:
        kind = reduced(name) if tap.reduce is not None else RESULT
        what = f"the output of {site.describe()}, {site.result.describe()}"
        structure = site.result.element(output, what)
    _check_storable(structure, site, name, tap, what)
    if tap.reduce is not None and tap.attention is None:
        structure = _reduction(structure, site, name, tap, kind)
    leaves = tuple(
        (
            i,
            Leaf(
                kind=kind,
                index=i,
                detach=tap.detach,
                dtype=tap.dtype,
                device=tap.device,
            ),
        )
        for i in structure.leaves("tensor")
    )
    sizes = tuple(structure.leaves("int"))
    return Slot(site=index, kind=kind, structure=structure, leaves=leaves, sizes=sizes)


def _recorded(
    site: Site, name: str, tap: Tap, output: Element
) -> tuple[str, Structure]:
    """What a declaration takes of a result, as a kind of mark and a structure.

    Raises:
        RecordedElementError: the result is a tuple without such an element.
    """
    found = site.result
    if found.kind == "sequence" and issubclass(found.cls or tuple, tuple):
        length = len(found.children)
        if not isinstance(output, int) or not -length <= output < length:
            raise RecordedElementError(
                f"index={output} of the recorder of {name!r} does not exist",
                why=f"the module returned a tuple of {length} elements",
                remedy="declare OutputRecorder(..., index=) with an element that it "
                "returns",
            )
        found = found.children[output]
    if tap.attention is not None and _is_none(found):
        computed = site.value(weights(name))
        children = () if computed is None else parse(computed.structure).children
        if len(children) == 1:
            return weights(name), children[0]
    return RESULT, found


def _is_none(structure: Structure) -> bool:
    return structure.kind == "const" and structure.value is None


def _check_storable(
    structure: Structure, site: Site, name: str, tap: Tap, what: str
) -> None:
    found = structure.opaque()
    if found is None:
        return
    where, cls = found
    if cls is NoArgument:
        raise ElementError(
            f"record {name!r}: {site.describe()} was called without the argument "
            f"{entry_name(tap)!r}, as far as can be told",
            why="its forward names no parameters, or has none at this position",
            remedy="name the parameter by the keyword that the caller uses",
        )
    raise UnsupportedOutputError(
        f"record {name!r}: {what} holds a {cls.__name__}"
        + (f" at {where}" if where else ""),
        why="a graph returns tensors, integers and constants only",
        remedy="name a tensor element of the output with output=",
    )


def _reduction(
    element: Structure, site: Site, name: str, tap: Tap, kind: str
) -> Structure:
    """The structure of what a reduction made of an element.

    Raises:
        UnsupportedOutputError: it made nothing that a record can hold.
    """
    value = site.value(kind)
    made = None if value is None else parse(value.structure)
    if not _holds_tensor(element):
        return element if made is None else made  # there was nothing to reduce
    if made is None or made.opaque() or not _holds_tensor(made):
        shown = "nothing" if made is None else made.describe()
        raise UnsupportedOutputError(
            f"record {name!r}: reduce={tap.reduce!r} made {shown} of the value of "
            f"{site.describe()}, which is {element.describe()}",
            why="a reduction has to return a tensor, or a container of tensors",
            remedy="return a tensor from it, or drop reduce=",
        )
    return made


def _holds_tensor(structure: Structure) -> bool:
    return next(structure.leaves("tensor"), None) is not None


def _weights(site: Site, name: str) -> Structure:
    """The attention weights of the one fused call that a site made.

    Raises:
        UnsupportedOutputError: it made none, or several.
    """
    value = site.value(weights(name))
    number = site.fused_calls
    if value is not None:
        children = parse(value.structure).children
        if len(children) == 1:
            return children[0]
        number = len(children)
    if number == 1:
        return parse("T")
    if number is None:
        why = "the graph was made without watching it"
        remedy = "capture with fxcapture.compile or fxcapture.export"
    elif not number:
        why = (
            "it called neither torch.nn.functional.scaled_dot_product_attention nor "
            "flex_attention: its attention is eager or a kernel of its own, or runs in "
            "a fused function such as multi_head_attention_forward, or in another "
            "module"
        )
        remedy = (
            'load the model with attn_implementation="sdpa" and target the attention '
            "module itself; where it returns weights, use Tap(target, output=1)"
        )
    else:
        why = f"it made {number} fused calls"
        remedy = "target the attention modules below it, one call each"
    raise UnsupportedOutputError(
        f"record {name!r}: {site.describe()} has no attention weights of its own",
        why=why,
        remedy=remedy,
    )


def leaves_of(spec: CaptureSpec, bound: Match, site: Site) -> tuple[Leaf, ...]:
    """Every leaf that any record may want of one mark's site, selection left aside."""
    return tuple(dict.fromkeys(leaf for _, leaf in named_leaves_of(spec, bound, site)))


def named_leaves_of(
    spec: CaptureSpec, bound: Match, site: Site
) -> Iterator[tuple[str, Leaf]]:
    """The same with the record that wants each.

    Needed where one graph is not the whole run, so that positions are not known yet.
    The two marks of a hooked call are two sites here.
    """
    for name in dict.fromkeys(bound.records_of(site.path)):
        tap = spec[name]
        for entry in (False, True):
            if entry and (not takes_entry(tap) or site.hooked):
                continue  # behind hooks stands the result alone
            if entry and not (_is_attention(tap) or site.arguments.children):
                continue  # not copied: it cannot be selected any more
            if not entry and (tap.point == "input" or _is_attention(tap)):
                continue
            for output in (None,) if entry else _elements(tap, site.path):
                try:
                    slot = _slot(0, site, name, tap, bound, entry=entry, output=output)
                except FxCaptureError:
                    # Raised with its text when the run ends, and only if selected.
                    continue
                for _, leaf in slot.leaves:
                    yield name, leaf


def _is_attention(tap: Tap) -> bool:
    """Whether a tap takes attention weights and nothing else."""
    return tap.attention is not None and tap.recorded is None


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
    hits = [
        (i, output)
        for i, site in enumerate(sites)
        if site.path in paths
        for output in _elements(tap, site.path)
    ]
    if not tap.optional:
        called = {sites[i].path for i, _ in hits}
        missing = [p for p in bound.paths[name] if p not in called]
        if missing:
            raise _never_called(name, tap, bound, missing, sites)
    initial = tap.initial and bool(hits)
    if tap.recorded is not None and hits:
        initial = initial and sites[hits[0][0]].path in tap.recorded.initial
        if not tap.recorded.keeps and all(
            _is_none(_entry_of(sites[i], name, tap, output)) for i, output in hits
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
        entry = entry or _is_attention(tap)
        index, output = hits[max(position - initial, 0)]
        slots.append(
            _slot(index, sites[index], name, tap, bound, entry=entry, output=output)
        )
    order = ([hits[0]] if initial else []) + hits
    return RecordPlan(
        name=name, paths=tuple(sites[i].path for i, _ in order), slots=tuple(slots)
    )


def _entry_of(site: Site, name: str, tap: Tap, output: Element) -> Structure:
    """What a declaration takes; a tensor where that is an error if it is selected."""
    try:
        return _recorded(site, name, tap, output)[1]
    except RecordedElementError:
        return parse("T")


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
            why=f"{tap.target} was called {length - (tap.initial and length > 0)} times"
            + (" and the initial input is position 0" if tap.initial else "")
            + f", so positions run from {-length} to {length - 1}"
            if length
            else f"{tap.target} has no hit in this run",
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
