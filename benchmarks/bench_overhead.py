"""What capture adds to a compiled model: time per call, and time to trace.

Both programs are compiled with Inductor from the same weights in one process and
timed in interleaved rounds.  Traces are first ones, each in a process of its own,
alternating.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import fxcapture as fxc
from benchmarks.harness import (
    Report,
    bars,
    child,
    interleaved,
    latency_rows,
    main,
    ratio,
)
from benchmarks.models import hidden_states, llama, quiet, token_ids

SELECTED = (2, 5)
#: Layers of the model whose modules are all tapped.
DEEP = 48


def latency(backend: str, rounds: int, *, quick: bool) -> dict[str, list[float]]:
    model, ids = llama(), token_ids(4, 64)
    spec = hidden_states(*SELECTED)
    captured = fxc.compile(model, spec, backend=backend, fullgraph=True)
    every = captured.select(hidden_states=None)
    plain = torch.compile(model, backend=backend, fullgraph=True)
    variants = {
        "plain compiled": lambda: plain(ids),
        f"captured, {len(SELECTED)} of 9": lambda: captured(ids),
    }
    if not quick:
        variants["captured, 9 of 9"] = lambda: every(ids)
    with torch.no_grad():
        return interleaved(variants, rounds=rounds)


def trace_seconds(captured: bool) -> float:
    """Seconds of the first call under the eager backend: Dynamo's trace, mostly."""
    quiet()
    model, ids = llama(), token_ids(4, 64)
    # Starts Dynamo, which neither side should pay for.
    torch.compile(torch.nn.Linear(8, 8), backend="eager")(torch.ones(8, 8))
    made: Any
    if captured:
        spec = hidden_states(*SELECTED)
        made = fxc.compile(model, spec, backend="eager", fullgraph=True)
    else:
        made = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        start = time.perf_counter()
        made(ids)
        return time.perf_counter() - start


def first_call_seconds(what: str) -> float:
    """Seconds of the first call of a deep model under ``aot_eager``."""
    quiet()
    model = llama(
        hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=DEEP,
    ).model  # fmt: skip
    ids = token_ids(1, 16)
    torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")(torch.ones(8, 8))
    made: Any
    if what == "plain":
        made = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        target = "**" if what == "every module" else "layers.*"
        made = fxc.compile(model, {"h": target}, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        start = time.perf_counter()
        made(ids)
        return time.perf_counter() - start


def run(quick: bool) -> Report:
    quiet()
    report = Report(
        "overhead",
        "Captured over plain compiled",
        "Llama, 8 layers, hidden 256, batch 4 x 64, float32, inference, Inductor, "
        "`fullgraph=True`; two hidden states of nine selected.",
    )
    times = latency("inductor", 40 if quick else 100, quick=quick)
    base = "plain compiled"
    report.table("Time per call", latency_rows(times, base))
    for name, figure in zip(
        list(times)[1:],
        ("latency_selected_over_plain", "latency_all_over_plain"),
        strict=False,
    ):
        report.figure(figure, ratio(times, name, base), "<= 1.03")

    pairs = [
        (
            child("benchmarks.bench_overhead", "trace_seconds", captured=True),
            child("benchmarks.bench_overhead", "trace_seconds", captured=False),
        )
        for _ in range(2 if quick else 7)
    ]
    with_s, without_s = (statistics.median(t) for t in zip(*pairs, strict=True))
    report.table(
        "First trace (a process each, medians)",
        [
            {"variant": "plain", "seconds": without_s, "runs": len(pairs)},
            {"variant": "captured", "seconds": with_s, "runs": len(pairs)},
        ],
    )
    report.figure(
        "trace_captured_over_plain",
        statistics.median(a / b for a, b in pairs),
        "<= 1.15",
    )
    kinds = ("plain", "all layers", "every module")
    rounds = [
        {k: child("benchmarks.bench_overhead", "first_call_seconds", what=k)
         for k in kinds}
        for _ in range(1 if quick else 3)
    ]  # fmt: skip
    report.table(
        f"First call, {DEEP} layers, aot_eager (a process each, medians)",
        [
            {
                "tapped": k,
                "seconds": statistics.median(r[k] for r in rounds),
                "runs": len(rounds),
            }
            for k in kinds
        ],
    )
    for kind, name, expected in (
        ("all layers", "first_call_all_layers_over_plain", "<= 1.08"),
        ("every module", "first_call_every_module_over_plain", "<= 1.3"),
    ):
        value = statistics.median(r[kind] / r["plain"] for r in rounds)
        report.figure(name, value, expected)
    report.plot(
        "overhead_latency",
        "Time per call, Llama 8 x 256, batch 4 x 64",
        bars(list(times), [statistics.median(t) * 1e3 for t in times.values()], "ms"),
    )
    return report


if __name__ == "__main__":
    main(run)
