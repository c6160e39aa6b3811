"""The renderers in words: a table, and Graphviz's DOT language."""

from __future__ import annotations

import itertools

from fxcapture.inspect.drawing.picture import Picture
from fxcapture.inspect.estimate import format_bytes
from fxcapture.plan.sites import format_table

__all__ = ["picture_dot", "picture_text"]


def picture_text(picture: Picture) -> str:
    """A picture as a table."""
    table = [("module", "class", "taken", "where", "shape", "bytes", "held so far")]
    for row, held in zip(picture.rows, picture.held(), strict=True):
        indent = "  " * row.depth
        label = {"return": f"({row.label or picture.title} returns)"}.get(
            row.kind, row.label or picture.title
        )
        first = (indent + label, row.class_name + (f" x{row.count}" * (row.count > 1)))
        total = format_bytes(sum(held.values())) if sum(held.values()) else ""
        if not row.taps:
            table.append((*first, "", "", "", "", total))
        for i, tap in enumerate(row.taps):
            size = "" if tap.num_bytes is None else format_bytes(tap.num_bytes)
            last = total if i == len(row.taps) - 1 else ""
            lead = first if i == 0 else ("", "")
            table.append((*lead, tap.label, tap.where, tap.shape, size, last))
    lines = [format_table(table), ""]
    lines += [
        f"{name}: {kept} of {length} positions kept"
        for name, (kept, length) in picture.records.items()
    ]
    if picture.note:
        lines.append(f"not one graph, because: {picture.note}")
    return "\n".join(lines)


def picture_dot(picture: Picture) -> str:
    """A picture for Graphviz."""
    lines = [
        "digraph capture {",
        "  rankdir=TB; newrank=true; compound=true;",
        '  node [shape=box, style="rounded,filled", fillcolor="#f4f6f8", '
        'color="#8a94a0", fontname="Helvetica", fontsize=11];',
        '  edge [color="#8a94a0", arrowsize=0.7];',
    ]
    edges: list[str] = []
    names: list[str] = []
    depth = 0
    for i, row in enumerate(picture.rows):
        while depth > row.depth:
            lines.append("  " * depth + "}")
            depth -= 1
        pad = "  " * (depth + 1)
        label = _quoted(row.label or picture.title)
        if row.kind == "open":
            lines.append(f"{pad}subgraph cluster_{i} {{")
            lines.append(
                f'{pad}  label={label}; fontname="Helvetica"; color="#c4ccd4";'
            )
            depth += 1
            if not row.taps:
                continue
        many = f" x{row.count}" if row.count > 1 else ""
        text = f"{row.label or picture.title}\n{row.class_name}{many}"
        lines.append(f"{pad}n{i} [label={_quoted(text)}];")
        names.append(f"n{i}")
        for k, tap in enumerate(row.taps):
            size = "" if tap.num_bytes is None else "\n" + format_bytes(tap.num_bytes)
            edges.append(
                f"  t{i}_{k} [label={_quoted(tap.label + size)}, shape=note, "
                f'fillcolor="#fff3d6", color="#c99a2e"];'
            )
            edges.append(
                f'  n{i} -> t{i}_{k} [color="#c99a2e", label={_quoted(tap.where)}, '
                'fontsize=9, fontname="Helvetica"];'
            )
    while depth:
        lines.append("  " * depth + "}")
        depth -= 1
    lines += [f"  {a} -> {b};" for a, b in itertools.pairwise(names)]
    return "\n".join([*lines, *edges, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
