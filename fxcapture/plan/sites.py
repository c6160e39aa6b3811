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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final, overload

from fxcapture.trace.structure import Structure, parse

__all__ = ["Site", "SiteTable", "format_table", "of_module"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call of one module.

    Attributes:
        path: The module's path, as the user sees it.
        call: Which call of this module it is, from 0.
        structure: Text of the structure of its result.
        entries: Text of the structure of the copied arguments.
        sizes: Integer leaves of the result; ``None`` where symbolic in the graph.
        entry_sizes: The same of the entries.
        graph: Number of the graph it stands in; ``None`` if it ran outside every graph.
        shapes: Shapes of the result's tensor leaves, symbolic sizes as text.
        dtypes: Dtypes of the result's tensor leaves, without the ``torch.`` prefix.
        class_name: The module's class.
        region: The higher-order operators it is nested in, outermost first.
        hooked: Forward hooks ran between the call and its caller, so that the site has
            two marks: entries stand in the first, the result in the second.
    """

    path: str
    call: int = 0
    structure: str
    entries: str = "t()"
    sizes: tuple[int | None, ...] = ()
    entry_sizes: tuple[int | None, ...] = ()
    graph: int | None = None
    shapes: tuple[tuple[int | str, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    class_name: str = ""
    region: tuple[str, ...] = ()
    hooked: bool = False

    @property
    def arguments(self) -> Structure:
        """Structure of the copied arguments, a sequence."""
        return parse(self.entries)

    @property
    def result(self) -> Structure:
        """Structure of what the call returned."""
        return parse(self.structure)

    def after_hooks(self, outer: Site) -> Site:
        """This call with the result that its forward hooks made of it."""
        return dataclasses.replace(
            outer, entries=self.entries, entry_sizes=self.entry_sizes
        )

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
        return f"SiteTable({len(self)} sites)\n{self}"

    def __str__(self) -> str:
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


def of_module(site: Site, path: str, classes: Mapping[str, str]) -> Site:
    """The same call, of the module at another path."""
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
