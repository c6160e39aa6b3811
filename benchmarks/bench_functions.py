"""What values inside modules cost, over taps of as many modules.

In both a record of each layer is selected: what the layer's MLP returns, or the
residual in front of it, which no module returns.  First calls are in a process each,
alternating; calls are timed in interleaved rounds in one process.
"""

from __future__ import annotations

import statistics
import time

import torch

import fxcapture as fxc
from benchmarks.harness import Report, child, interleaved, latency_rows, main, ratio
from benchmarks.models import llama, quiet, token_ids

PLAIN, MODULES, FUNCTIONS = "plain compiled", "modules", "function calls"
TAPS = {MODULES: "model.layers.*.mlp", FUNCTIONS: "model.layers.*::add[0]"}


def first_call_seconds(what: str, backend: str) -> float:
    """Seconds of the first call with a tap of each layer."""
    quiet()
    model, ids = llama(), token_ids(4, 64)
    # Starts the compiler, which neither side should pay for.
    torch.compile(torch.nn.Linear(8, 8), backend=backend)(torch.ones(8, 8))
    spec = {"h": fxc.Tap(TAPS[what])}
    made = fxc.compile(model, spec, backend=backend, fullgraph=True)
    with torch.no_grad():
        start = time.perf_counter()
        made(ids)
        return time.perf_counter() - start


def latency(rounds: int) -> dict[str, list[float]]:
    model, ids = llama(), token_ids(4, 64)
    plain = torch.compile(model, fullgraph=True)
    by = {
        what: fxc.compile(model, {"h": fxc.Tap(target)}, fullgraph=True)
        for what, target in TAPS.items()
    }
    with torch.no_grad():
        return interleaved(
            {
                PLAIN: lambda: plain(ids),
                MODULES: lambda: by[MODULES](ids),
                FUNCTIONS: lambda: by[FUNCTIONS](ids),
            },
            rounds=rounds,
        )


def run(quick: bool) -> Report:
    quiet()
    report = Report(
        "functions",
        "Values inside modules over module taps",
        "Llama, 8 layers, hidden 256, batch 4 x 64, float32, inference, Inductor, "
        "`fullgraph=True`; a value of each layer selected: its MLP's output, or the "
        "residual in front of the MLP.",
    )
    times = latency(40 if quick else 100)
    report.table("Time per call", latency_rows(times, PLAIN))
    report.figure(
        "latency_functions_over_modules", ratio(times, FUNCTIONS, MODULES), "<= 1.02"
    )
    report.figure("latency_functions_over_plain", ratio(times, FUNCTIONS, PLAIN))
    for backend, name in (("eager", "trace"), ("inductor", "first_call")):
        pairs = [
            tuple(
                child(
                    "benchmarks.bench_functions",
                    "first_call_seconds",
                    what=what,
                    backend=backend,
                )
                for what in (FUNCTIONS, MODULES)
            )
            for _ in range(2 if quick else 5)
        ]
        report.table(
            f"First call, {backend} (a process each, medians)",
            [
                {
                    "tapped": what,
                    "seconds": statistics.median(pair[i] for pair in pairs),
                    "runs": len(pairs),
                }
                for i, what in enumerate((FUNCTIONS, MODULES))
            ],
        )
        report.figure(
            f"{name}_functions_over_modules",
            statistics.median(inner / outer for inner, outer in pairs),
            "<= 1.05",
        )
    return report


if __name__ == "__main__":
    main(run)
