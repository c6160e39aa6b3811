"""The calls that a run (or a graph) made of the target modules.

Terms
    site: one call of one submodule in one graph, or outside any graph.  A module called
        three times is three sites.
    site table: the sites of one run, in call order.

Invariants
    Call order is the order in which calls *return*, which is the order in which forward
    hooks would fire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final, overload

from fxcapture.plan.printing import preformatted
from fxcapture.spec.function import at_module, split_numbered
from fxcapture.trace.mark import (
    BEGIN,
    CALLS,
    ENDS,
    ENTRY,
    HOOKED,
    INPUT,
    NAMED,
    RESULT,
    RETURNED,
    Mark,
)
from fxcapture.trace.structure import Structure
from fxcapture.trace.structure_text import parse

__all__ = [
    "CallMarks",
    "Site",
    "SiteTable",
    "Value",
    "format_table",
    "group_marks",
    "of_module",
    "pair_hooked",
    "site_of",
]


class Value(NamedTuple):
    """A value of a call, apart from its tensors.

    Attributes:
        structure: Text of its structure.
        sizes: Its integer leaves; ``None`` where symbolic in a graph.
    """

    structure: str
    sizes: tuple[int | None, ...] = ()


_NOTHING = Value("t()")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call of one module.

    Attributes:
        path: The module's path, as the user sees it.
        call: Which call of this module it is, from 0.
        structure: Text of the structure of its result.
        sizes: Integer leaves of the result; ``None`` where symbolic in the graph.
        entry: The copied arguments, a tuple.
        derived: Other values that its marks hold, by the marks' kind.
        graph: Number of the graph it stands in; ``None`` if it ran outside every graph.
        shapes: Shapes of the result's tensor leaves, symbolic sizes as text.
        dtypes: Dtypes of the result's tensor leaves, without the ``torch.`` prefix.
        class_name: The module's class.
        region: The higher-order operators it is nested in, outermost first.
        hooked: Forward hooks ran between the call and its caller, so that it has two
            groups of marks: arguments stand in the first, the result in the second.
        fused_calls: Number of fused attention calls in its span; ``None`` if the span
            is not known.
        index: Of a function's call: which one it is of the module call around it, from
            0; ``None`` for a module's.
        functions: Names of the functions that the module itself called, in order, where
            any is tapped; else ``None``.
    """

    path: str
    call: int = 0
    structure: str
    sizes: tuple[int | None, ...] = ()
    entry: Value = _NOTHING
    derived: tuple[tuple[str, Value], ...] = ()
    graph: int | None = None
    shapes: tuple[tuple[int | str, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    class_name: str = ""
    region: tuple[str, ...] = ()
    hooked: bool = False
    fused_calls: int | None = None
    index: int | None = None
    functions: tuple[str, ...] | None = None

    @property
    def arguments(self) -> Structure:
        """Structure of the copied arguments, a sequence."""
        return parse(self.entry.structure)

    @property
    def result(self) -> Structure:
        """Structure of what the call returned."""
        return parse(self.structure)

    def value(self, kind: str) -> Value | None:
        """The value that marks of one kind hold; ``None`` if there are none."""
        if kind in ENDS:
            return Value(self.structure, self.sizes)
        if kind == ENTRY:
            return self.entry
        return dict(self.derived).get(kind)

    def describe(self) -> str:
        """The call in words, for error messages."""
        cls = f" ({self.class_name})" if self.class_name else ""
        return f"{self.path or 'the model'!r}{cls}, call {self.call}"


@final
class SiteTable(Sequence[Site]):
    """Sites in call order; prints as a table."""

    __slots__ = ("_sites",)

    def __init__(self, sites: Sequence[Site] = ()) -> None:
        counts: dict[str, int] = {}
        numbered: list[Site] = []
        for site in sites:
            call = counts.get(site.path, 0)
            counts[site.path] = call + 1
            numbered.append(
                site if site.call == call else dataclasses.replace(site, call=call)
            )
        self._sites = tuple(numbered)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Site]: ...
    def __getitem__(self, index: int | slice) -> Site | Sequence[Site]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, SiteTable) and self._sites == other._sites

    def __hash__(self) -> int:
        return hash(self._sites)

    def __repr__(self) -> str:
        return f"SiteTable({len(self)} site{'s' * (len(self) != 1)})\n{self}"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        if not self._sites:
            return "no sites: nothing was called yet, or nothing that a target names"
        rows = [("site", "class", "call", "where", "output", "shape", "dtype")]
        for site in self._sites:
            where = "eager" if site.graph is None else f"graph {site.graph}"
            if site.region:
                where += " in " + " in ".join(reversed(site.region))
            rows.append(
                (
                    site.path or "(model)",
                    site.class_name,
                    str(site.call),
                    where,
                    site.result.describe(),
                    " ".join(_shape(s) for s in site.shapes),
                    " ".join(site.dtypes),
                )
            )
        return format_table(rows)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks of one call, or of the second part of one that has forward hooks.

    Attributes:
        marks: Kind to mark; what ends the call stands under ``result``.
        hooked: They stand behind the forward hooks.
    """

    marks: Mapping[str, Mark]
    hooked: bool

    @property
    def result(self) -> Mark:
        """The mark that ends the call."""
        return self.marks[RESULT]


def group_marks(marks: Iterable[Mark]) -> list[CallMarks]:
    """The calls that marks in their order are of; the one place that knows the order.

    A ``begin`` is of the next end of a call of the same module, inner calls first.
    """
    calls: list[CallMarks] = []
    begun: dict[tuple[Any, str], list[Mark]] = {}
    group: dict[str, Mark] = {}
    for mark in marks:
        if mark.kind == BEGIN:
            begun.setdefault((mark.token, mark.path), []).append(mark)
        elif mark.kind == NAMED or mark.kind.startswith(INPUT):
            continue
        elif not mark.ends:
            group[mark.kind] = mark
        else:
            hooked = mark.kind == HOOKED
            group[RESULT] = mark
            opened = begun.get((mark.token, mark.path))
            if opened and not hooked:
                group[BEGIN] = opened.pop()
            calls.append(CallMarks(group, hooked))
            group = {}
    return calls


def site_of(
    call: CallMarks,
    *,
    path: str,
    classes: Mapping[str, str],
    type_of: Callable[[Any], tuple[Sequence[int | str], str]],
    size_of: Callable[[Any], int | None],
    graph: int | None = None,
    region: tuple[str, ...] = (),
    fused_calls: int | None = None,
) -> Site:
    """The site of one call; the one place that makes sites.

    Args:
        call: Its marks.
        path: The call's path, as marks bear it; a mark's own may be that of a group.
        classes: Path to the module's class.
        type_of: Shape and dtype of a tensor leaf, or of the node that stands for it.
        size_of: An integer leaf; ``None`` where it is symbolic.
        graph: Number of the graph that holds the marks.
        region: The higher-order operators around them.
        fused_calls: Number of fused attention calls in the span.
    """
    values = {
        kind: Value(mark.structure, tuple([size_of(s) for s in mark.sizes]))
        for kind, mark in call.marks.items()
        if kind not in (BEGIN, RETURNED, CALLS)
    }
    result = values.pop(RESULT)
    names = call.marks.get(CALLS)
    path, index = split_numbered(path)
    types = [type_of(leaf) for leaf in call.result.tensors]
    return Site(
        path=path,
        structure=result.structure,
        sizes=result.sizes,
        entry=values.pop(ENTRY, _NOTHING),
        derived=tuple(values.items()),
        graph=graph,
        shapes=tuple([tuple(shape) for shape, _ in types]),
        dtypes=tuple([dtype for _, dtype in types]),
        class_name=classes.get(path, ""),
        region=region,
        hooked=call.hooked,
        fused_calls=fused_calls,
        index=index,
        functions=None
        if names is None
        else tuple(parse(names.structure).value.split()),
    )


def pair_hooked(
    sites: Sequence[Site],
) -> tuple[list[Site], tuple[tuple[int, int], ...]]:
    """Join the two observations of each call that had forward hooks.

    Calls nest, so the inner observation of a hooked one is the latest of its path that
    is still alone.

    Returns:
        The joined sites and, for each, the indices of its inner and outer observation.
    """
    merged: list[Site] = []
    marks: list[tuple[int, int]] = []
    for i, site in enumerate(sites):
        if site.hooked:
            inner = next(
                k
                for k in reversed(range(len(merged)))
                if merged[k].path == site.path and not merged[k].hooked
            )
            before = merged[inner]
            merged.append(
                dataclasses.replace(
                    site,
                    entry=before.entry,
                    # Of a kind that both have, what stands behind the hooks.
                    derived=tuple((dict(before.derived) | dict(site.derived)).items()),
                    fused_calls=before.fused_calls,
                    functions=before.functions,
                )
            )
            marks.append((marks[inner][0], i))
            del merged[inner], marks[inner]
        else:
            merged.append(site)
            marks.append((i, i))
    return merged, tuple(marks)


def of_module(site: Site, path: str, classes: Mapping[str, str]) -> Site:
    """The same call, of the module at another path."""
    path = at_module(site.path, path)
    if site.path == path:
        return site
    return dataclasses.replace(site, path=path, class_name=classes.get(path, ""))


def _shape(shape: Sequence[int | str]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as left-aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
