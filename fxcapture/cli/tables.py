"""What the commands work out, as plain data and as rows of tables."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import fxcapture
from fxcapture.cli.inputs import Loaded
from fxcapture.cli.report import console, working
from fxcapture.exporting.program import CapturedProgram
from fxcapture.inspect.drawing.draw import picture_of
from fxcapture.inspect.estimate import Estimate, estimate, format_bytes
from fxcapture.inspect.survey import sites
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.testing import Verification

__all__ = [
    "bench_data",
    "bench_table",
    "estimate_data",
    "estimate_tables",
    "explain_data",
    "export_data",
    "export_table",
    "function_data",
    "function_table",
    "site_data",
    "site_table",
    "verify_data",
    "verify_table",
]


#: Title, columns and rows of a table.
_Table = tuple[str, list[str], list[list[str]]]


def _sizes(shape: Sequence[Any]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def site_data(loaded: Loaded, depth: int) -> list[dict[str, Any]]:
    """What modules down to a depth return, as JSON values.

    Each row says how many called modules below it are left out.
    """
    found = sites(loaded.model, loaded.args, loaded.kwargs)
    shown = {p.path for p in found if p.path.count(".") < depth}
    left_out = collections.Counter(
        _nearest_above(point.path, shown) for point in found if point.path not in shown
    )
    return [
        {
            "path": point.path,
            "class": point.class_name,
            "calls": point.num_calls,
            "output": point.output,
            "shapes": [list(s) for s in point.shapes],
            "dtypes": list(point.dtypes),
            "bytes": point.num_bytes,
            "left_out": left_out[point.path],
        }
        for point in found
        if point.path in shown
    ]


def _nearest_above(path: str, shown: Collection[str]) -> str:
    """The nearest shown module that a path stands in; at the latest the model."""
    while path and path not in shown:
        path = path.rpartition(".")[0]
    return path


def site_table(data: list[dict[str, Any]], depth: int) -> _Table:
    """The same as a table; shapes and dtypes are those of the output's tensors."""
    rows = [
        [
            row["path"] or "(model)",
            row["class"],
            str(row["calls"]),
            row["output"],
            " ".join(map(_sizes, row["shapes"])),
            " ".join(dict.fromkeys(row["dtypes"])),
            format_bytes(row["bytes"]),
        ]
        for row in data
    ]
    left_out = sum(row["left_out"] for row in data)
    title = f"{len(rows)} module{'s' * (len(rows) != 1)}"
    if left_out:
        title = (
            f"{len(rows)} of {len(rows) + left_out} modules, "
            f"--depth {depth + 1} shows more"
        )
    columns = ["path", "class", "calls", "output", "shape", "dtype", "size"]
    return title, columns, rows


def function_data(loaded: Loaded, inside: str) -> list[dict[str, Any]]:
    """The function calls inside of modules, as JSON values."""
    found = sites(loaded.model, loaded.args, loaded.kwargs, inside=inside)
    return [
        {
            "target": point.path,
            "arguments": point.arguments,
            "output": point.output,
            "shapes": [list(s) for s in point.shapes],
            "dtypes": list(point.dtypes),
            "bytes": point.num_bytes,
            "line": point.line,
        }
        for point in found
    ]


def function_table(data: list[dict[str, Any]]) -> _Table:
    """The same as a table."""
    rows = [
        [
            row["target"],
            row["arguments"],
            row["output"],
            " ".join(map(_sizes, row["shapes"])),
            " ".join(dict.fromkeys(row["dtypes"])),
            format_bytes(row["bytes"]),
            row["line"],
        ]
        for row in data
    ]
    columns = ["target", "arguments", "output", "shape", "dtype", "size", "line"]
    return f"{len(rows)} function call{'s' * (len(rows) != 1)}", columns, rows


def estimate_data(made: Estimate) -> dict[str, Any]:
    """An estimate as JSON values; every size in bytes."""
    share = made.early_stop_flops / made.flops if made.flops else 1.0
    return {
        "records": [
            {
                "name": r.name,
                "kept_bytes": r.kept_bytes,
                "full_bytes": r.full_bytes,
                "positions": [
                    {"path": p.path, "bytes": p.num_bytes, "selected": p.selected}
                    for p in r.positions
                ],
            }
            for r in made.records
        ],
        "kept_bytes": made.kept_bytes,
        "full_bytes": made.full_bytes,
        "peak_bytes": {
            "plain": made.plain.peak_bytes,
            "captured": made.captured.peak_bytes,
            "full": made.full.peak_bytes,
            "records_only": made.early_stop.peak_bytes,
        },
        "weight_bytes": made.weight_bytes,
        "records_only_weight_bytes": made.early_stop_weight_bytes,
        "flops": made.flops,
        "records_only_flops": made.early_stop_flops,
        "records_only_flops_share": share,
    }


def estimate_tables(made: Estimate) -> Iterator[_Table]:
    """An estimate as tables."""
    yield (
        "bytes that records hold",
        ["record", "positions", "kept", "if all were kept"],
        [
            [
                r.name,
                f"{sum(p.selected for p in r.positions)} of {len(r.positions)}",
                format_bytes(r.kept_bytes),
                format_bytes(r.full_bytes),
            ]
            for r in made.records
        ],
    )
    share = made.early_stop_flops / made.flops if made.flops else 1.0
    rows = []
    for what, line, weights, flops in (
        ("no capture", made.plain, made.weight_bytes, 1.0),
        ("this spec", made.captured, made.weight_bytes, 1.0),
        ("every position", made.full, made.weight_bytes, 1.0),
        (
            "this spec, records only",
            made.early_stop,
            made.early_stop_weight_bytes,
            share,
        ),
    ):
        rows.append(
            [
                what,
                format_bytes(line.peak_bytes),
                line.peak_path or "-",
                format_bytes(weights),
                f"{flops:.0%}",
            ]
        )
    yield (
        "one run (inference, operator by operator)",
        ["variant", "peak of live bytes", "peak at", "weights read", "operations"],
        rows,
    )


def verify_data(found: Verification, tolerance: float) -> dict[str, Any]:
    """A verification as JSON values, with a verdict on each record."""

    def within(difference: float, scale: float) -> bool:
        return difference <= tolerance * max(scale, 1e-30)

    records = [
        {
            "record": name,
            "difference": difference,
            "scale": found.scales[name],
            "within_tolerance": within(difference, found.scales[name]),
            "nothing": name in found.nothing,
        }
        for name, difference in found.differences.items()
    ]
    output = within(found.output_difference or 0.0, found.output_scale)
    return {
        "records": records,
        "output_difference": found.output_difference,
        "output_scale": found.output_scale,
        "output_within_tolerance": output,
        "tolerance": tolerance,
        "good": output and all(record["within_tolerance"] for record in records),
    }


def verify_table(data: dict[str, Any]) -> _Table:
    """The same as a table."""
    output = {
        "record": "(output)",
        "difference": data["output_difference"] or 0.0,
        "scale": data["output_scale"],
        "within_tolerance": data["output_within_tolerance"],
        "nothing": data["output_difference"] is None,
    }
    rows = [
        [
            row["record"],
            f"{row['difference']:.3g}",
            f"{row['scale']:.3g}",
            "nothing to compare"
            if row["nothing"]
            else "good"
            if row["within_tolerance"]
            else "DIFFERS",
        ]
        for row in [*data["records"], output]
    ]
    columns = ["record", "largest difference", "largest value", "verdict"]
    return "differences from the eager reference", columns, rows


def explain_data(captured: Any) -> dict[str, Any]:
    """Where each record of the latest call is from, as JSON values."""
    picture = picture_of(captured)
    if picture is None:
        return {"model": None, "records": [], "taps": [], "note": ""}
    return {
        "model": picture.title,
        "records": [
            {"name": name, "kept_positions": kept, "positions": length}
            for name, (kept, length) in picture.records.items()
        ],
        "taps": [
            {
                "record": tap.record,
                "position": tap.position,
                "path": row.path,
                "class": row.class_name,
                "point": "input" if tap.entry else "output",
                "call": tap.call,
                "shape": tap.shape,
                "bytes": tap.num_bytes,
                "where": tap.where,
            }
            for row in picture.rows
            for tap in row.taps
        ],
        "note": picture.note,
    }


def export_data(program: CapturedProgram, file: Path) -> dict[str, Any]:
    """The added outputs of an exported program as JSON values."""
    return {
        "file": str(file),
        "outputs": [
            {"name": o.name, "dtype": o.dtype, "shape": list(o.shape)}
            for o in program.manifest.outputs
        ],
    }


def export_table(program: CapturedProgram, file: Path) -> _Table:
    """The same as a table."""
    rows = [[o.name, o.dtype, _sizes(o.shape)] for o in program.manifest.outputs]
    return f"added outputs of {file}", ["name", "dtype", "shape"], rows


def bench_data(
    loaded: Loaded, spec: CaptureSpec, backend: str, rounds: int
) -> dict[str, Any]:
    """Time the model with capture, with records only, and without."""
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    captured = fxcapture.compile(model, spec, backend=backend)
    stopped = fxcapture.compile(model, spec, backend=backend, keep_output=False)
    plain = torch.compile(model, backend=backend)
    calls: dict[str, Callable[..., Any]] = {
        "plain": plain,
        "captured": captured,
        "records only": stopped,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    finish = _finisher(model)
    with torch.no_grad():
        for name, call in calls.items():
            with working(f"compiling: {name}"):
                # The times of these are no result: a later variant finds kernels that
                # an earlier one has compiled.
                call(*args, **kwargs)
                call(*args, **kwargs)
        for _ in track(range(rounds), "timing", console=console, transient=True):
            for name, call in calls.items():
                finish()
                begin = time.perf_counter()
                call(*args, **kwargs)
                finish()
                times[name].append(time.perf_counter() - begin)
    cost = estimate(model, spec, args, kwargs)
    return {
        "model": type(model).__name__,
        "backend": backend,
        "rounds": rounds,
        "variants": [
            {
                "variant": name,
                "median_ms": statistics.median(values) * 1e3,
                "over_plain": statistics.median(
                    v / p for v, p in zip(values, times["plain"], strict=True)
                ),
            }
            for name, values in times.items()
        ],
        "kept_bytes": cost.kept_bytes,
        "full_bytes": cost.full_bytes,
    }


def _finisher(model: torch.nn.Module) -> Callable[[], None]:
    """What waits for the device of a model: an accelerator runs on after the call."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        return lambda: None
    return torch.accelerator.synchronize


def bench_table(data: dict[str, Any]) -> _Table:
    """The same as a table."""
    rows = [
        [
            v["variant"],
            f"{v['median_ms']:.3f}",
            f"{v['over_plain']:.3f}",
        ]
        for v in data["variants"]
    ]
    title = f"{data['model']}, {data['backend']}, {data['rounds']} interleaved rounds"
    return title, ["variant", "median ms", "over plain in the same round, median"], rows
