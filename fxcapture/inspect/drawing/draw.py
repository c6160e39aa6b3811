"""Pictures of a capture: which module calls are tapped, and what stays alive.

Invariants
    A picture shows the latest call of the captured model, and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxcapture import passes
from fxcapture.errors import SpecTypeError
from fxcapture.inspect.drawing.picture import Picture, Row, Tapped
from fxcapture.inspect.drawing.svg import picture_svg, timeline_svg
from fxcapture.inspect.drawing.text import picture_dot, picture_text
from fxcapture.inspect.estimate import Estimate
from fxcapture.inspect.module_stack import module_paths
from fxcapture.inspect.nothing import returned_none
from fxcapture.inspect.reasons import one_line
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Plan, Slot
from fxcapture.plan.printing import Printed, PrintedSVG
from fxcapture.plan.sites import Site
from fxcapture.trace.mark import RESULT

__all__ = ["draw", "draw_timeline", "picture_of"]

_FORMATS = ("text", "svg", "dot")


def draw(captured: Any, form: str = "text") -> Printed:
    """A picture of the latest call of a captured model.

    Args:
        captured: What :func:`fxcapture.compile` returned, after a call.
        form: ``"text"``, ``"svg"`` or ``"dot"``.

    Raises:
        SpecTypeError: ``form`` is none of these.
    """
    if form not in _FORMATS:
        raise SpecTypeError(
            f"format={form!r} is not a format",
            nearest=[repr(f) for f in _FORMATS],
            remedy="pass 'text', 'svg' or 'dot'",
        )
    picture = picture_of(captured)
    if picture is None:
        return Printed("no call has been made yet")
    if form == "svg":
        return PrintedSVG(picture_svg(picture))
    return Printed((picture_text if form == "text" else picture_dot)(picture))


def draw_timeline(made: Estimate, *, width: int = 760, height: int = 300) -> PrintedSVG:
    """The memory timeline of an estimate, as SVG.

    Args:
        made: What :func:`fxcapture.estimate` returned.
        width: In pixels.
        height: In pixels.
    """
    return PrintedSVG(timeline_svg(made, width, height))


# --------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------


def picture_of(captured: Any) -> Picture | None:
    """The picture of the latest call; ``None`` before the first."""
    model, _, program = captured._fxc_parts()
    sites = program.last_sites
    if not sites:
        return None
    plan: Plan = program.plan_of(sites, captured._fxc_selection)
    graphs = list(program.graphs())
    sizes = _tap_values(graphs[-1]) if len(graphs) and not program.break_reason else {}
    taps: dict[str, list[Tapped]] = {}
    for record in plan.records:
        for position, slot in enumerate(record.slots):
            if slot is not None:
                site = sites[slot.site]
                found = _tapped(record.name, position, slot, site, sizes)
                taps.setdefault(site.path, []).append(found)
    order = _order(graphs)
    return Picture(
        title=type(model).__name__,
        rows=tuple(_rows(model, "", "", 0, taps, order)),
        records={
            r.name: (sum(s is not None for s in r.slots), len(r.slots))
            for r in plan.records
        },
        note=one_line(program.break_reason),
    )


def _tap_values(graph: Any) -> dict[TapKey, torch.Tensor]:
    keys: Sequence[TapKey] = graph.meta.get(passes.OUTPUTS, ())
    outputs: Any = graph.graph.output_node().args[0]
    found = zip(keys, outputs[len(outputs) - len(keys) :], strict=True)
    return {key: node.meta.get("example_value") for key, node in found}


def _tapped(
    record: str,
    position: int,
    slot: Slot,
    site: Site,
    values: Mapping[TapKey, torch.Tensor],
) -> Tapped:
    shapes, total = [], 0
    known = True
    for _, leaf in slot.leaves:
        value = values.get(TapKey(slot.site, leaf=leaf))
        if isinstance(value, torch.Tensor):
            shape: Sequence[Any] = tuple(value.shape)
            dtype = value.dtype
        elif leaf.kind == RESULT and leaf.index < len(site.shapes):
            shape = site.shapes[leaf.index]
            dtype = leaf.dtype or getattr(torch, site.dtypes[leaf.index])
        else:
            known = False
            continue
        shapes.append("x".join(map(str, shape)) or "scalar")
        if all(isinstance(s, int) for s in shape):
            total += torch.empty(shape, dtype=dtype, device="meta").nbytes
        else:
            known = False
    return Tapped(
        record=record,
        position=position,
        entry=slot.entry,
        call=site.call,
        shape=", ".join(shapes) or ("None" if returned_none(slot) else "no tensor"),
        num_bytes=total if known else None,
        where="eager" if site.graph is None else f"graph {site.graph}",
    )


def _order(graphs: Sequence[Any]) -> dict[str, int]:
    """Module path to where it first ran; empty where graphs do not tell."""
    order: dict[str, int] = {}
    if not graphs:
        return order
    for i, (_, node, _) in enumerate(passes.walk(graphs[-1])):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for path in module_paths(node):
            order.setdefault(path, i)
    return order


def _rows(
    module: nn.Module,
    path: str,
    label: str,
    depth: int,
    taps: Mapping[str, list[Tapped]],
    order: Mapping[str, int],
) -> Iterator[Row]:
    own = taps.get(path, [])
    name = type(module).__name__
    if not any(_below(p, path) for p in taps):
        row = Row(
            kind="module", label=label, path=path, class_name=name, depth=depth,
            taps=tuple(own),
        )  # fmt: skip
        yield row
        return
    entries = tuple(t for t in own if t.entry)
    yield Row(
        kind="open", label=label, path=path, class_name=name, depth=depth, taps=entries
    )
    waiting: list[Row] = []
    for child_path, child_label, child in _children(module, path, order):
        made = list(_rows(child, child_path, child_label, depth + 1, taps, order))
        if len(made) == 1 and not made[0].taps and made[0].kind == "module":
            same = waiting and waiting[-1].class_name == made[0].class_name
            if waiting and not same:
                yield _collapsed(waiting)
                waiting = []
            waiting.append(made[0])
            continue
        if waiting:
            yield _collapsed(waiting)
            waiting = []
        yield from made
    if waiting:
        yield _collapsed(waiting)
    results = tuple(t for t in own if not t.entry)
    if results:
        yield Row(
            kind="return", label=label, path=path, class_name=name, depth=depth,
            taps=results,
        )  # fmt: skip


def _below(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(parent + "."))


def _children(
    module: nn.Module, path: str, order: Mapping[str, int]
) -> list[tuple[str, str, nn.Module]]:
    """Children in running order; those of a container without a forward are ours."""
    found: list[tuple[str, str, nn.Module]] = []
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += [
                (p, f"{name}.{label}", c)
                for p, label, c in _children(child, child_path, {})
            ]
        else:
            found.append((child_path, name, child))
    if any(p in order for p, _, _ in found):
        found = [entry for entry in found if entry[0] in order]
        found.sort(key=lambda entry: order[entry[0]])
    return found


def _collapsed(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    return dataclasses.replace(
        rows[0], label=f"{rows[0].label} ... {rows[-1].label}", count=len(rows)
    )
