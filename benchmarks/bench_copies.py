"""What it would cost to copy every captured value, instead of only where it must be.

``passes/analyses/aliases.py`` decides whether a later write can show in a value.  Here
the same model is compiled with it and without it (every value copied at its mark), with
Inductor, which drops a copy that nothing needs.  Run it::

    python -m benchmarks.bench_copies [--quick]
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import fxcapture as fxc
from benchmarks.bench_memory import BASE, _live_bytes
from benchmarks.harness import (
    Report,
    child,
    interleaved,
    latency_rows,
    main,
    ratio,
)
from benchmarks.models import hidden_states, llama, quiet, token_ids

ANALYSED, COPIED = "copied where it must be", "always copied"
_REASON = "fxcapture.passes.insert_taps._reason"


def compiled(every_copied: bool, model: Any, ids: torch.Tensor) -> Any:
    """The captured model after its first call, all hidden states recorded."""
    captured = fxc.compile(model, hidden_states(), fullgraph=True)
    with torch.no_grad():
        if every_copied:
            with mock.patch(_REASON, return_value="always"):
                captured(ids)
        else:
            captured(ids)
    return captured


def peak_bytes(every_copied: bool) -> int:
    """Peak of live bytes of one call; runs in a child."""
    quiet()
    sizes = dict(BASE)
    batch, length = sizes.pop("batch"), sizes.pop("length")
    model, ids = llama(**sizes), token_ids(batch, length)
    captured = compiled(every_copied, model, ids)
    with torch.no_grad():
        captured(ids)
        return _live_bytes(lambda: captured(ids))[0]


def run(quick: bool) -> Report:
    quiet()
    report = Report(
        "copies",
        "Copying every captured value over copying where it must be",
        "Llama, 8 layers, hidden 256, float32, inference, Inductor, `fullgraph=True`; "
        "all nine hidden states.  Time at batch 4 x 64, peak at 4 x 1024.",
    )
    model, ids = llama(), token_ids(4, 64)
    analysed = compiled(False, model, ids)
    copied = compiled(True, model, ids)
    with torch.no_grad():
        times = interleaved(
            {ANALYSED: lambda: analysed(ids), COPIED: lambda: copied(ids)},
            rounds=40 if quick else 100,
        )
    report.table("Time per call", latency_rows(times, ANALYSED))
    report.figure("latency_copied_over_analysed", ratio(times, COPIED, ANALYSED), "")
    peaks = {
        name: child("benchmarks.bench_copies", "peak_bytes", every_copied=every)
        for name, every in ((ANALYSED, False), (COPIED, True))
    }
    report.table(
        "Peak of live bytes",
        [{"variant": name, "peak_bytes": peak} for name, peak in peaks.items()],
    )
    report.figure("peak_copied_over_analysed", peaks[COPIED] / peaks[ANALYSED], "")
    return report


if __name__ == "__main__":
    main(run)
