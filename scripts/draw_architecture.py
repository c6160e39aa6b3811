"""Draw which package imports which: ``python scripts/draw_architecture.py``.

The picture is made of the import statements alone.  A package stands above everything
that it imports; an arrow is left out where others say the same by way of a package
between.  ``tests/test_architecture.py`` holds that the picture is up to date.
"""

from __future__ import annotations

import ast
import functools
import html
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fxcapture"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

#: The picture's width; heights of a box and of the gap below it; between two boxes; and
#: what is left free beside a row that an arrow goes past.
WIDTH, ROW, GAP, BETWEEN, LANE = 760, 48, 30, 16, 28
#: What stands on the right of its row, so that no two arrows cross.
RIGHT = ("_torch", "exporting", "foreign", "cli")
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1b1f24 }
  .name { font-weight: 600; font-size: 15px }
  .what { font-size: 11.5px; fill: #57606a }
  .box { fill: #f6f8fa; stroke: #8c959f }
  .arrow { stroke: #57606a; stroke-width: 1.3; marker-end: url(#head) }
"""

Graph = dict[str, set[str]]


def packages() -> list[str]:
    """The packages and files directly below ``fxcapture`` that belong to no other."""
    found = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    found |= {p.stem for p in PACKAGE.glob("*.py") if not p.stem.startswith("__")}
    return sorted(found)


def imports() -> Graph:
    """Package to the packages that its files import."""
    known = set(packages())
    graph: Graph = {name: set() for name in known}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in known:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            roots = {tuple(name.split(".")[:2]) for name in names}
            graph[parts[0]] |= {r[1] for r in roots if r[0] == "fxcapture"} & known
        graph[parts[0]].discard(parts[0])
    return graph


def levels(graph: Graph) -> list[list[str]]:
    """The packages by their height above those that import nothing, lowest first."""

    @functools.cache
    def height(name: str) -> int:
        return 1 + max(map(height, graph[name]), default=-1)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(height, graph)))]
    for name in sorted(graph, key=lambda name: (name in RIGHT, name)):
        rows[height(name)].append(name)
    return rows


def arrows(graph: Graph) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""

    @functools.cache
    def below(name: str) -> frozenset[str]:
        return frozenset(graph[name]).union(*map(below, graph[name]))

    return sorted(
        (name, lower)
        for name, found in graph.items()
        for lower in found
        if not any(lower in below(other) for other in found)
    )


def purpose(name: str) -> str:
    """The first line of what a package says of itself."""
    path = PACKAGE / name / "__init__.py"
    source = path if path.exists() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return text.split("\n")[0].replace("``", "").rstrip(".")


def draw() -> str:
    """The picture as SVG."""
    graph = imports()
    rows = levels(graph)
    level = {name: i for i, row in enumerate(rows) for name in row}
    drawn = arrows(graph)
    crossed = {i for a, b in drawn for i in range(level[b] + 1, level[a])}
    height = len(rows) * (ROW + GAP)
    boxes: dict[str, tuple[float, float, float]] = {}
    for i, row in enumerate(rows):
        free = WIDTH - BETWEEN * (len(row) + 1) - (LANE if i in crossed else 0)
        y = height - (i + 1) * (ROW + GAP) + GAP / 2
        for k, name in enumerate(row):
            width = free / len(row)
            boxes[name] = (BETWEEN + k * (width + BETWEEN), y, width)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<title>Which package imports which</title><style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#57606a"/>'
        "</marker></defs>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for upper, lower in drawn:
        (x1, y1, w1), (x2, y2, w2) = boxes[upper], boxes[lower]
        left, right = max(x1, x2), min(x1 + w1, x2 + w2)
        if level[upper] - level[lower] > 1:
            start = end = WIDTH - BETWEEN - LANE / 2
        elif left < right:
            start = end = (left + right) / 2
        else:  # from the corner of one to that of the other
            start, end = (left + 20, right - 20) if x1 > x2 else (right - 20, left + 20)
        lines.append(
            f'<line class="arrow" x1="{start:.1f}" y1="{y1 + ROW:.1f}" '
            f'x2="{end:.1f}" y2="{y2:.1f}"/>'
        )
    for name, (x, y, width) in boxes.items():
        middle = x + width / 2
        lines += [
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{ROW}" rx="6"/>',
            f'<text class="name" x="{middle:.1f}" y="{y + 20:.1f}" '
            f'text-anchor="middle">{name}</text>',
        ]
        lines += _fitted(purpose(name), middle, y + 37, width)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _fitted(text: str, middle: float, y: float, width: float) -> list[str]:
    """A line of small text, shortened to fit its box."""
    most = int(width / 6.4)
    if len(text) > most:
        text = text[: text.rfind(" ", 0, most)] + " ..."
    return [
        f'<text class="what" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">'
        f"{html.escape(text)}</text>"
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw())
