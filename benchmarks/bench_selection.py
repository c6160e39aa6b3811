"""What another selection costs on a compiled model: this package, and transformers.

transformers' own capture is part of the trace, so each new selection traces and
compiles the whole model again; here it compiles a variant of the trace that is kept.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import fxcapture as fxc
from benchmarks.harness import Report, bars, main
from benchmarks.models import hidden_states, llama, quiet, token_ids

SELECTIONS = ([0], [2, 5], [-2], [1, 3, 5, 7], [8])


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def switch(call: Any, selections: Any) -> tuple[list[float], list[float], int]:
    """Seconds of the first and the second call of each selection; traces made."""
    before = _graphs()
    first, again = [], []
    for selection in selections:
        start = time.perf_counter()
        call(selection)
        middle = time.perf_counter()
        call(selection)
        first.append(middle - start)
        again.append(time.perf_counter() - middle)
    return first, again, _graphs() - before


def run(quick: bool) -> Report:
    quiet()
    torch._dynamo.config.recompile_limit = 64
    report = Report(
        "selection",
        "Switching the selection of a compiled model",
        "Llama, 8 layers, hidden 256, batch 4 x 64, no grad. Five selections one after "
        "the other on one compiled model; the first call of each is a switch.",
    )
    ids = token_ids(4, 64)
    rows = []
    for backend in ("aot_eager", "inductor"):
        chosen = SELECTIONS[: 3 if quick and backend == "inductor" else None]
        torch._dynamo.reset()
        captured = fxc.compile(
            llama(), hidden_states(0), backend=backend, fullgraph=True
        )
        ours: Any = lambda s, c=captured: c(ids, select={"hidden_states": s})  # noqa: E731
        model = llama()
        peer = torch.compile(model, backend=backend)
        theirs: Any = lambda s, p=peer: p(ids, output_hidden_states=s)  # noqa: E731
        with torch.no_grad():
            captured(ids)
            model(ids, output_hidden_states=True)  # its lazy set-up cannot be traced
            for name, call in (("fxcapture", ours), ("transformers", theirs)):
                first, again, traces = switch(call, chosen)
                rows.append(
                    {
                        "backend": backend,
                        "capture": name,
                        "first_call_s": statistics.median(first),
                        "second_call_ms": statistics.median(again) * 1e3,
                        "traces": traces,
                        "selections": len(first),
                    }
                )
    report.table("Five selections in a row, medians", rows)
    for ours_row, theirs_row in zip(rows[::2], rows[1::2], strict=True):
        report.figure(
            f"switch_speedup_{ours_row['backend']}",
            theirs_row["first_call_s"] / ours_row["first_call_s"],
        )
    report.plot(
        "selection_switch",
        "First call with a new selection",
        bars(
            [f"{r['capture']}, {r['backend']}" for r in rows],
            [r["first_call_s"] for r in rows],
            "seconds",
        ),
    )
    return report


if __name__ == "__main__":
    main(run)
