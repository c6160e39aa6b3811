"""What the commands work out, as plain data and as rows of tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import fxcapture
from fxcapture.cli_inputs import Loaded
from fxcapture.memory import Estimate, estimate, format_bytes
from fxcapture.spec import CaptureSpec

__all__ = ["bench_data", "estimate_data", "estimate_tables", "site_rows"]


def site_rows(loaded: Loaded, depth: int) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of ``sites``: what modules down to a depth return."""
    from fxcapture.survey import sites

    columns = ["path", "class", "calls", "output", "shape", "dtype", "bytes"]
    rows: list[list[Any]] = []
    for point in sites(loaded.model, loaded.args, loaded.kwargs):
        if point.path.count(".") < depth:
            shapes = " ".join("x".join(map(str, s)) for s in point.shapes)
            dtypes = " ".join(dict.fromkeys(point.dtypes))
            rows.append(
                [
                    point.path or "(model)",
                    point.class_name,
                    point.num_calls,
                    point.output,
                    shapes,
                    dtypes,
                    point.num_bytes,
                ]
            )
    return columns, rows


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


def estimate_tables(
    made: Estimate,
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """An estimate as tables: title, columns, rows."""
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


def bench_data(
    loaded: Loaded, spec: CaptureSpec, backend: str, rounds: int, err: Console
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
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        with err.status(f"starting {backend}"):
            # The first compilation of a process starts the compiler itself.
            torch.compile(torch.nn.Linear(8, 8), backend=backend)(torch.ones(8, 8))
        for name, call in calls.items():
            with err.status(f"compiling: {name}"):
                begin = time.perf_counter()
                call(*args, **kwargs)
                first[name] = time.perf_counter() - begin
                call(*args, **kwargs)
        for _ in track(range(rounds), "timing", console=err, transient=True):
            for name, call in calls.items():
                begin = time.perf_counter()
                call(*args, **kwargs)
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
                "first_call_s": first[name],
            }
            for name, values in times.items()
        ],
        "kept_bytes": cost.kept_bytes,
        "full_bytes": cost.full_bytes,
    }
