"""The estimate: how long it takes for a large model, and how close it is.

The large model is a Llama of 70 billion parameters at 8,192 tokens on the meta device;
the comparison is with the bytes that a run under ``aot_eager`` really allocates.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fxcapture as fxc
from benchmarks.harness import Report, child, main
from benchmarks.models import hidden_states, llama, quiet, token_ids
from fxcapture.inspect.estimate import estimate


def large(layers: int) -> dict[str, Any]:
    """Seconds and resident memory of an estimate of a 70-billion-parameter Llama."""
    quiet()
    with torch.device("meta"):
        model = llama(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        ).to(torch.bfloat16)  # fmt: skip
    ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    start = time.perf_counter()
    made = estimate(model, hidden_states(0, -2), (ids,))
    return {
        "seconds": time.perf_counter() - start,
        "resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "weights_gib": made.weight_bytes / 2**30,
        "kept_mib": made.kept_bytes / 2**20,
        "kept_if_all_mib": made.full_bytes / 2**20,
        "peak_gib": made.peak_bytes / 2**30,
        "peak_if_all_gib": made.full.peak_bytes / 2**30,
    }


def measured_peak(call: Callable[[], Any]) -> tuple[int, Any]:
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, result


def run(quick: bool) -> Report:
    quiet()
    report = Report(
        "estimate",
        "The estimate against measured runs",
        "Peaks of live bytes of Llamas under `aot_eager`, no grad, against "
        "`fxcapture.estimate`; and the estimate of a 70-billion-parameter Llama (80 "
        "layers, hidden 8192, bfloat16) at 8,192 tokens on the meta device.",
    )
    rows = []
    for layers, length in ((4, 64), (8, 256)):
        model, ids = llama(num_hidden_layers=layers), token_ids(2, length)
        spec = hidden_states(0, -2)
        made = estimate(model, spec, (ids,))
        for keep_output, line in ((True, made.captured), (False, made.early_stop)):
            captured = fxc.compile(
                model,
                spec,
                backend="aot_eager",
                fullgraph=True,
                keep_output=keep_output,
            )
            with torch.no_grad():
                peak, result = measured_peak(lambda c=captured, i=ids: c(i))
            states = result.records["hidden_states"]
            rows.append(
                {
                    "layers": layers,
                    "tokens": length,
                    "records_only": not keep_output,
                    "estimated_peak": line.peak_bytes,
                    "measured_peak": peak,
                    "estimated_kept": made.kept_bytes,
                    "measured_kept": sum(h.nbytes for h in states if h is not None),
                }
            )
    report.table("Bytes, estimated and measured", rows)
    off = max(abs(r["estimated_peak"] / r["measured_peak"] - 1) for r in rows)
    report.figure("largest_error_of_peak", off, "<= 0.10")
    same = all(r["estimated_kept"] == r["measured_kept"] for r in rows)
    report.figure("kept_bytes_equal", same, "yes")
    found = child("benchmarks.bench_estimate", "large", layers=80)
    report.table("Llama of 70 billion parameters", [found])
    report.figure("seconds_70b", found["seconds"], "< 60")
    report.figure("resident_gib_70b", found["resident_gib"])
    return report


if __name__ == "__main__":
    main(run)
