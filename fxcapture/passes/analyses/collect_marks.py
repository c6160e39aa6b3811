"""Read the sites of a marked graph.

An analysis, not a rewrite: it changes nothing.  A call of a module with forward hooks
left two marks, one behind ``forward`` and one behind the hooks; they become one site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from fxcapture.passes.base import is_mark, walk
from fxcapture.plan.sites import Site, SiteTable
from fxcapture.trace.mark import Observation
from fxcapture.trace.structure import parse

__all__ = ["MarkedSites", "collect_marks", "mark_sites", "observation", "pair_hooked"]


class MarkedSites(NamedTuple):
    """Sites, and where each one's marks stand.

    Attributes:
        sites: The sites, in call order.
        marks: For each site, the position in mark order of the mark that holds its
            entries and of the one that holds its result (mostly the same).
    """

    sites: SiteTable
    marks: tuple[tuple[int, int], ...]


def observation(node: fx.Node) -> Observation:
    """A mark's arguments by name; tensors and symbolic integers are nodes."""
    return Observation(*node.args)  # type: ignore[arg-type]


def collect_marks(
    gm: fx.GraphModule, *, graph: int | None = None, classes: Mapping[str, str]
) -> MarkedSites:
    """The sites of a marked graph and of its bodies.

    Args:
        gm: The marked graph.
        graph: The number that the sites report as theirs.
        classes: Path to class name.
    """
    merged, marks = pair_hooked(mark_sites(gm, graph=graph, classes=classes))
    return MarkedSites(SiteTable(merged), marks)


def mark_sites(
    gm: fx.GraphModule, *, graph: int | None = None, classes: Mapping[str, str]
) -> list[Site]:
    """A site for each mark, those of one hooked call not joined yet."""
    sites: list[Site] = []
    for _, node, region in walk(gm):
        if not is_mark(node):
            continue
        seen = observation(node)
        shapes, dtypes = _leaf_types(seen)
        sites.append(
            Site(
                path=seen.path,
                structure=seen.structure,
                entries=seen.entries,
                sizes=tuple(_constant(s) for s in seen.sizes),
                entry_sizes=tuple(_constant(s) for s in seen.entry_sizes),
                graph=graph,
                shapes=shapes,
                dtypes=dtypes,
                class_name=classes.get(seen.path, ""),
                region=region,
                hooked=seen.hooked,
            )
        )
    return sites


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
            merged.append(merged[inner].after_hooks(site))
            marks.append((marks[inner][0], i))
            del merged[inner], marks[inner]
        else:
            merged.append(site)
            marks.append((i, i))
    return merged, tuple(marks)


def _constant(size: object) -> int | None:
    return None if isinstance(size, fx.Node) else int(size)  # type: ignore[call-overload, no-any-return]


def _leaf_types(
    seen: Observation,
) -> tuple[tuple[tuple[int | str, ...], ...], tuple[str, ...]]:
    shapes: list[tuple[int | str, ...]] = []
    dtypes: list[str] = []
    for _ in parse(seen.structure).leaves("tensor"):
        node = seen.result[len(shapes)]
        value = node.meta.get("val", node.meta.get("example_value"))  # type: ignore[attr-defined]
        shape = getattr(value, "shape", ())
        shapes.append(tuple(s if isinstance(s, int) else str(s) for s in shape))
        dtypes.append(str(getattr(value, "dtype", "?")).removeprefix("torch."))
    return tuple(shapes), tuple(dtypes)
