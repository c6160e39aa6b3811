"""The SVG renderers; what they draw is worked out in ``picture``.

One column of modules from top to bottom, in running order; what is taken stands to the
right of its module; further right each record's lane grows with what it holds.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence

from fxcapture.inspect.drawing.picture import Picture, Row
from fxcapture.inspect.estimate import Estimate, format_bytes

__all__ = ["picture_svg", "timeline_svg"]

_COLORS = ("#c99a2e", "#3b7dbf", "#3d9a6c", "#b4553f", "#7a5cb0", "#5f6b76")
_INK, _SOFT, _LINE, _FILL = "#22282f", "#66707b", "#8a94a0", "#f4f6f8"
_ROW, _TOP, _LEFT, _INDENT = 38, 64, 16, 18
_BOX, _TAP, _LANE = 300, 330, 70


class _Canvas:
    """Collects SVG elements."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, color: str = _INK,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = _FILL,
        stroke: str = _LINE, radius: float = 5, dash: str = "",
    ) -> None:  # fmt: skip
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="{radius}" fill="{fill}" '
            f'stroke="{stroke}"{dashed}/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], *, color: str = _LINE,
        width: float = 1.2, fill: str = "none", opacity: float = 1, dash: str = "",
    ) -> None:  # fmt: skip
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{joined}" fill="{fill}" fill-opacity="{opacity}" '
            f'stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def svg(self, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" '
            f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="Helvetica, Arial, sans-serif">'
        )
        back = '<rect width="100%" height="100%" fill="white"/>'
        name = f"<title>{html.escape(title)}</title>"
        return "\n".join([head, name, back, *self._parts, "</svg>"]) + "\n"


def picture_svg(picture: Picture) -> str:
    """A picture as SVG."""
    heights = [max(1, len(row.taps)) * _ROW for row in picture.rows]
    tops = [_TOP, *(_TOP + h for h in itertools.accumulate(heights))]
    indent = _INDENT * max((r.depth for r in picture.rows), default=0)
    taps_x = _LEFT + indent + _BOX + 34
    lanes_x = taps_x + _TAP + 24
    width = lanes_x + _LANE * len(picture.records) + 16
    bottom = tops[-1]
    # At least as wide as the last heading, and as a note.
    width = max(width, lanes_x + 156, 560)
    canvas = _Canvas(width, bottom + (66 if picture.note else 48))
    canvas.text(_LEFT, 26, picture.title, size=16, bold=True)
    canvas.text(_LEFT, 48, "modules, in running order", color=_SOFT)
    canvas.text(taps_x, 48, "captured, and where it ran", color=_SOFT)
    canvas.text(lanes_x, 48, "held until the call returns", color=_SOFT)
    _clusters(canvas, picture.rows, tops, taps_x)
    colors = dict(zip(picture.records, itertools.cycle(_COLORS), strict=False))
    centers = []
    for row, top in zip(picture.rows, tops, strict=False):
        left = _LEFT + row.depth * _INDENT
        right = taps_x - 34
        middle = top + _ROW / 2
        if row.kind == "open":
            canvas.text(left + 10, top + 22, row.label or picture.title, bold=True)
            canvas.text(right - 10, top + 22, row.class_name, color=_SOFT, anchor="end")
        else:
            _module(canvas, row, left, top, right, picture.title)
            centers.append((left + 24, top))
        for i, tap in enumerate(row.taps):
            y = top + i * _ROW
            color = colors[tap.record]
            canvas.line(
                [(right, middle), (right + 16, middle), (right + 16, y + _ROW / 2),
                 (taps_x, y + _ROW / 2)],
                color=color, width=1.6,
            )  # fmt: skip
            canvas.box(taps_x, y + 5, _TAP, _ROW - 10, fill="#ffffff", stroke=color)
            canvas.text(taps_x + 9, y + 23, tap.label, bold=True)
            size = "" if tap.num_bytes is None else f", {format_bytes(tap.num_bytes)}"
            detail = f"{tap.where}: {tap.shape}{size}"
            canvas.text(
                taps_x + _TAP - 8, y + 23, detail, size=11, color=_SOFT, anchor="end"
            )
    _lanes(canvas, picture, tops, lanes_x, colors)
    if picture.note:
        note = f"Not one graph, because: {picture.note}"
        canvas.text(_LEFT, bottom + 54, note[:140], size=11, color="#b4553f")
    return canvas.svg(f"Captured values of {picture.title}")


def _module(
    canvas: _Canvas, row: Row, left: float, top: float, right: float, title: str
) -> None:
    tapped = row.taps[0] if row.taps else None
    eager = tapped is not None and tapped.where == "eager"
    fill = "#eaf2fb" if tapped else _FILL
    if row.count > 1:
        canvas.box(left + 4, top + 2, right - left - 4, _ROW - 10, fill="#ffffff")
    canvas.box(
        left, top + 5, right - left - (4 if row.count > 1 else 0), _ROW - 10,
        fill=fill, dash="4 3" if eager else "",
    )  # fmt: skip
    label = f"{row.label or title} returns" if row.kind == "return" else row.label
    canvas.text(left + 10, top + 23, label or title)
    kind = row.class_name + (f" x{row.count}" if row.count > 1 else "")
    room = (right - left - 24) / 6.4 - len(label)
    if len(kind) > room > 8:
        kind = kind[: int(room) - 3] + "..."
    if room > 8:
        canvas.text(right - 12, top + 23, kind, size=11, color=_SOFT, anchor="end")


def _clusters(
    canvas: _Canvas, rows: Sequence[Row], tops: Sequence[float], taps_x: float
) -> None:
    """A frame around each opened module and its children."""
    deepest = max(row.depth for row in rows)
    for i, row in enumerate(rows):
        if row.kind != "open":
            continue
        end = i + 1
        while end < len(rows) and rows[end].depth > row.depth:
            end += 1
        left = _LEFT + row.depth * _INDENT
        canvas.box(
            left, tops[i] + 2, taps_x - 34 + 5 * (deepest - row.depth) - left,
            tops[end] - tops[i] - 3, fill="none", stroke="#c4ccd4", radius=8,
        )  # fmt: skip


def _lanes(
    canvas: _Canvas,
    picture: Picture,
    tops: Sequence[float],
    x: float,
    colors: dict[str, str],
) -> None:
    held = picture.held()
    most = max((max(h.values(), default=0) for h in held), default=0) or 1
    for k, name in enumerate(picture.records):
        left = x + k * _LANE
        points = [(left, tops[0])]
        for i, now in enumerate(held):
            size = now[name] / most * (_LANE - 18)
            points += [(left + size, tops[i] + _ROW / 2), (left + size, tops[i + 1])]
            if i + 1 < len(held):
                points.append((left + size, tops[i + 1] + _ROW / 2))
        total = held[-1][name] if held else 0
        canvas.line(
            [*points, (left, tops[-1]), (left, tops[0])],
            color=colors[name], fill=colors[name], opacity=0.35,
        )  # fmt: skip
        kept, length = picture.records[name]
        canvas.text(left, tops[-1] + 16, name[:10], size=11, bold=True)
        canvas.text(left, tops[-1] + 30, f"{kept} of {length}", size=10, color=_SOFT)
        if total:
            canvas.text(left, tops[-1] + 43, format_bytes(total), size=10, color=_SOFT)


# --------------------------------------------------------------------------------------
# The memory timeline
# --------------------------------------------------------------------------------------


def timeline_svg(made: Estimate, width: int, height: int) -> str:
    """Live bytes over the graph: without capture, with the spec, with everything."""
    canvas = _Canvas(width, height)
    left, right, top, bottom = 78, width - 20, 52, height - 44
    lines = (
        ("every position", made.full, "#b4553f", "5 3"),
        ("this spec", made.captured, "#3b7dbf", ""),
        ("no capture", made.plain, "#66707b", ""),
    )
    most = max(line.peak_bytes for _, line, _, _ in lines) or 1
    canvas.text(14, 22, "Live bytes while the model runs", size=14, bold=True)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - share * (bottom - top)
        canvas.line([(left, y), (right, y)], color="#e3e7eb", width=1)
        label = format_bytes(int(most * share))
        canvas.text(left - 8, y + 4, label, size=10, color=_SOFT, anchor="end")
    x: float = right
    for name, line, color, dash in lines:
        points = list(_scaled(line.live_bytes, left, right, top, bottom, most))
        if name == "no capture":
            closed = [*points, (right, bottom), (left, bottom)]
            canvas.line(closed, color="none", width=0, fill=color, opacity=0.12)
        canvas.line(points, color=color, width=1.6, dash=dash)
        label = f"{name}: peak {format_bytes(line.peak_bytes)}"
        canvas.text(x, 40, label, size=11, color=color, anchor="end")
        x -= 6.4 * len(label) + 16
    for share, path in _ticks(made):
        x = left + share * (right - left)
        canvas.line([(x, bottom), (x, bottom + 4)], color=_LINE)
        canvas.text(x, bottom + 17, path, size=10, color=_SOFT, anchor="middle")
    canvas.text((left + right) / 2, height - 8, "operations of the graph, in order",
                size=11, color=_SOFT, anchor="middle")  # fmt: skip
    return canvas.svg("Live bytes over the graph")


def _scaled(
    values: Sequence[int],
    left: float,
    right: float,
    top: float,
    bottom: float,
    most: int,
) -> Iterator[tuple[float, float]]:
    """Points of a curve; of many nodes in one pixel the highest is drawn."""
    columns = min(len(values), int(right - left))
    for i in range(columns):
        start = i * len(values) // columns
        end = max((i + 1) * len(values) // columns, start + 1)
        value = max(values[start:end])
        x = left + (right - left) * i / max(columns - 1, 1)
        yield x, bottom - value / most * (bottom - top)


def _ticks(made: Estimate) -> Iterator[tuple[float, str]]:
    """Where the modules named in the records begin, a few of them."""
    paths = made.captured.paths
    starts: dict[str, int] = {}
    for i, path in enumerate(paths):
        for record in made.records:
            for position in record.positions:
                if path == position.path or path.startswith(position.path + "."):
                    starts.setdefault(position.path, i)
    found = sorted(starts.items(), key=lambda item: item[1])
    step = max(1, -(-len(found) // 6))
    for path, i in found[::step]:
        yield i / max(len(paths) - 1, 1), path if len(path) < 18 else "..." + path[-15:]
