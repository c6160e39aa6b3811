"""A spec bound to the sites of one run: which value of which site feeds which slot.

Terms
    leaf: one tensor to bring out of a graph: a site's result, entry or reduction, and
        the treatment (detach, dtype, device) of the tap that asked for it.
    slot: one position of a record.

Invariants
    A plan is frozen and mentions nodes and modules by name only.  Positions are what
    the user wrote; a negative one is resolved here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch

from fxcapture.errors import (
    ElementError,
    FxCaptureError,
    NeverCalledError,
    SelectionError,
    TargetNotFoundError,
    UnsupportedOutputError,
    nearest,
)
from fxcapture.plan.match import Match, entry_name, match, reducers_of, takes_entry
from fxcapture.plan.sites import Site
from fxcapture.spec.tap import CaptureSpec, Tap, normalise_select
from fxcapture.trace.mark import NoArgument, Request, element_leaves
from fxcapture.trace.structure import Structure

__all__ = [
    "Leaf",
    "Match",
    "Plan",
    "RecordPlan",
    "Slot",
    "canonical_selection",
    "entry_name",
    "leaves_of",
    "match",
    "named_leaves_of",
    "reducers_of",
    "resolve",
]

Kind = Literal["result", "derived"]
#: Record name to positions, where they differ from the spec's.
SelectionMap = Mapping[str, Any]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of one site, as one tap wants it.

    Attributes:
        kind: Which list of the mark it stands in: a ``"result"`` tensor is the model's
            own; a ``"derived"`` one was made for the capture.
        index: Its place in that list.
        entry: It was taken when the module was entered: of the two marks of a call with
            forward hooks, it stands in the first.
        detach: Cut it from autograd.
        dtype: Cast to it if it is of a floating-point dtype.
        device: Move it there.
    """

    kind: Kind
    index: int
    entry: bool = False
    detach: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is what the caller received, as it is."""
        treated = self.detach or self.dtype is not None or self.device is not None
        return self.kind == "result" and not treated

    def snapshot(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` after detach, dtype and device, as a tensor of its own."""
        if self.detach:
            value = value.detach()
        dtype = self.dtype if value.is_floating_point() else None
        converted = value
        if dtype is not None or self.device is not None:
            converted = value.to(device=self.device, dtype=dtype)
        return converted.clone() if converted is value else converted


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One recorded position.

    Attributes:
        site: Index into the site table.
        structure: Shape of the value.
        leaves: For each tensor leaf of ``structure``, its index there and the leaf.
        sizes: Integer leaves of ``structure``, as indices into the site's ``sizes``, or
            into its ``entry_sizes`` if ``entry``.
        entry: The value is what the module received.
    """

    site: int
    structure: Structure
    leaves: tuple[tuple[int, Leaf], ...]
    sizes: tuple[int, ...]
    entry: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """One record: a slot for each position, ``None`` where not selected."""

    name: str
    paths: tuple[str, ...]
    slots: tuple[Slot | None, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every slot of every record comes from."""

    records: tuple[RecordPlan, ...]

    def wanted(self) -> dict[int, dict[Leaf, None]]:
        """Site index to the leaves to bring out, in order, each once."""
        wanted: dict[int, dict[Leaf, None]] = {}
        for slot in self.slots():
            leaves = wanted.setdefault(slot.site, {})
            for _, leaf in slot.leaves:
                leaves.setdefault(leaf)
        return wanted

    def wanted_sizes(self) -> dict[int, dict[tuple[bool, int], None]]:
        """Site index to the integer leaves (is entry, index) that the records need."""
        wanted: dict[int, dict[tuple[bool, int], None]] = {}
        for slot in self.slots():
            sizes = wanted.setdefault(slot.site, {})
            sizes.update(dict.fromkeys((slot.entry, i) for i in slot.sizes))
        return wanted

    def slots(self) -> Iterator[Slot]:
        """Every recorded position."""
        for record in self.records:
            yield from (slot for slot in record.slots if slot is not None)


def _reduced_offset(
    site: Site,
    requests: Sequence[Request],
    record: str,
    entry: bool,
    num_entries: int,
) -> int:
    """Where the reductions of one record start in the mark's derived list.

    Mirrors the order in which ``trace.mark.observe`` appends them: arguments,
    attention weights, results.  Behind forward hooks a second mark holds the reductions
    of the result alone.
    """
    arguments = site.arguments
    at = 0
    if entry or not site.hooked:
        at = sum(1 for _ in arguments.leaves("tensor"))
        # A stable sort: arguments stand before attention weights.
        for request in sorted(requests, key=lambda r: r.entry >= num_entries):
            if request.entry >= 0:
                if entry and request.record == record:
                    return at
                at += sum(1 for _ in arguments.children[request.entry].leaves("tensor"))
    for request in requests:
        if request.record == record:
            break
        if request.result:
            at += len(element_leaves(site.structure, request.output))
    return at


def _slot(
    index: int, site: Site, name: str, tap: Tap, bound: Match, *, entry: bool
) -> Slot:
    """The value that ``tap`` takes from ``site``: its result, or what it received."""
    if tap.attention is not None:
        structure = _weights(site, name, tap, bound)
        what = f"the attention weights of {site.describe()}"
    elif entry:
        which = bound.entries[site.path].index(entry_name(tap))  # type: ignore[arg-type]
        structure = site.arguments.children[which]
        what = f"the input of {site.describe()}"
    else:
        what = f"the output of {site.describe()}, {site.result.describe()}"
        structure = site.result.element(tap.output, what)
    found = structure.opaque()
    if found is not None:
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
    indices = tuple(structure.leaves("tensor"))
    kind: Kind = "result"
    start = 0
    if tap.reduce is not None:
        kind = "derived"
        requests, entries = bound.requests[site.path], bound.entries[site.path]
        start = _reduced_offset(site, requests, name, entry, len(entries))
        start -= indices[0] if indices else 0
    elif entry:
        kind = "derived"
    leaves = tuple(
        (
            i,
            Leaf(
                kind=kind,
                index=start + i,
                entry=entry,
                detach=tap.detach,
                dtype=tap.dtype,
                device=tap.device,
            ),
        )
        for i in indices
    )
    return Slot(
        site=index,
        structure=structure,
        leaves=leaves,
        sizes=tuple(structure.leaves("int")),
        entry=entry,
    )


def _weights(site: Site, name: str, tap: Tap, bound: Match) -> Structure:
    """The attention weights of the one fused call that a site made.

    Raises:
        UnsupportedOutputError: it made none, or several.
    """
    asked = bound.attention.get(site.path, ())
    children = site.arguments.children[len(bound.entries[site.path]) :]
    found: Structure | None = None
    if tap.attention in asked and len(children) == len(asked):
        found = children[asked.index(tap.attention)]
        if len(found.children) == 1:
            return found.children[0]
    if found is None:
        why = "the graph was made without watching it"
        remedy = "capture with fxcapture.compile or fxcapture.export"
    elif not found.children:
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
        why = f"it made {len(found.children)} fused calls"
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
    for name in bound.records_of(site.path):
        tap = spec[name]
        for entry in (False, True):
            if entry and (not takes_entry(tap) or site.hooked):
                continue  # behind hooks stands the result alone
            if not entry and (tap.point == "input" or tap.attention is not None):
                continue
            try:
                slot = _slot(0, site, name, tap, bound, entry=entry)
            except FxCaptureError:
                # Raised with its text when the run ends and only if it is selected.
                continue
            for _, leaf in slot.leaves:
                yield name, leaf


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
    hits = [i for i, site in enumerate(sites) if site.path in paths]
    if not tap.optional:
        called = {sites[i].path for i in hits}
        missing = [p for p in bound.paths[name] if p not in called]
        if missing:
            raise _never_called(name, tap, bound, missing, sites)
    initial = tap.initial and bool(hits)
    length = len(hits) + initial
    chosen = _positions(name, tap, select, length)
    slots: list[Slot | None] = []
    for position in range(length):
        if position not in chosen:
            slots.append(None)
            continue
        entry = tap.point == "input" or (initial and position == 0)
        entry = entry or tap.attention is not None
        index = hits[max(position - initial, 0)]
        slots.append(_slot(index, sites[index], name, tap, bound, entry=entry))
    order = ([hits[0]] if initial else []) + hits
    return RecordPlan(
        name=name, paths=tuple(sites[i].path for i in order), slots=tuple(slots)
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
