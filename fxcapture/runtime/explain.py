"""The latest call in words: what fed each position, where it ran, what was copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxcapture.inspect.nothing import find_nothing, returned_none
from fxcapture.inspect.reasons import one_line, with_user_names
from fxcapture.passes.base import TapKey
from fxcapture.passes.insert_taps import COPIES
from fxcapture.plan.plan import Slot
from fxcapture.plan.printing import Printed
from fxcapture.plan.records import RETURNED_NONE
from fxcapture.plan.sites import Site, format_table
from fxcapture.runtime.compiled_graph import NUMBER
from fxcapture.runtime.dynamo import DynamoProgram

__all__ = ["explain"]


def explain(
    program: DynamoProgram,
    selection: tuple[tuple[str, Any], ...],
    *,
    full: bool = False,
) -> Printed:
    """See :meth:`CapturedModule.explain`."""
    sites = program.last_sites
    if not sites:
        return Printed("no call has been made yet")
    plan = program.plan_of(sites, selection)
    rows = [("record", "position", "site", "call", "where", "memory")]
    for record in plan.records:
        for i, slot in enumerate(record.slots):
            if slot is None:
                path = record.paths[i]
                rows.append((record.name, str(i), path, "", "not selected", ""))
                continue
            site = sites[slot.site]
            where = "eager" if site.graph is None else f"graph {site.graph}"
            if site.region:
                where += " in " + " in ".join(reversed(site.region))
            if slot.entry:
                where += " (input)"
            path, call = site.path or "(model)", str(site.call)
            memory = _copies_of(program, slot, site)
            rows.append((record.name, str(i), path, call, where, memory))
    text = format_table(rows)
    for nothing in find_nothing(plan.records, list(program.graphs())).values():
        text += f"\n\n{nothing}"
    if program.break_reason:
        reason = program.break_reason.strip()
        text += "\n\nnot one graph, because: "
        text += f"\n{reason}" if full else one_line(reason)
        text += "" if full else "\n(all of it: explain(full=True))"
    return Printed(text)


def _copies_of(program: DynamoProgram, slot: Slot, site: Site) -> str:
    """Whether the values of a slot are copies, and why; empty where it is not known."""
    if returned_none(slot):
        return RETURNED_NONE
    if site.graph is None:
        return "copied: what runs outside a graph may be written to"
    for graph in program.graphs():
        copies: Mapping[TapKey, str] = graph.meta[COPIES]
        if graph.meta.get(NUMBER) == site.graph:
            keys = [TapKey(slot.site, leaf=leaf) for _, leaf in slot.leaves]
            found = dict.fromkeys(copies[key] for key in keys if key in copies)
            if found:
                return "; ".join(map(with_user_names, found))
    return ""
