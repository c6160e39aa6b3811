"""Attention weights of one layer beside fused attention, against the alternatives.

The alternatives are the same model without weights, and with eager attention, which
returns the weights of every layer; all compiled.  Run it::

    python -m benchmarks.bench_attention [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fxcapture as fxc
from benchmarks.bench_memory import MiB, _live_bytes
from benchmarks.harness import Report, interleaved, latency_rows, main, ratio
from benchmarks.models import llama, quiet, token_ids
from fxcapture.spec.attention_tap import AttentionWeights

TARGET = "layers.*.self_attn"


def _calls(depth: int, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    model: Any = llama(num_hidden_layers=depth, attn_implementation="sdpa").model
    eager: Any = llama(num_hidden_layers=depth, attn_implementation="eager").model
    eager.load_state_dict(model.state_dict())
    place = depth // 2
    plain = torch.compile(model, fullgraph=True)
    one = fxc.compile(
        model, {"a": AttentionWeights(TARGET, select=[place])}, fullgraph=True
    )
    last = fxc.compile(
        model,
        {"a": AttentionWeights(TARGET, select=[place], queries=-1)},
        fullgraph=True,
    )
    eager(ids[:1, :2], use_cache=False, output_attentions=True)  # installs its hooks
    every = torch.compile(eager)
    return {
        "fused, no weights": lambda: plain(ids, use_cache=False),
        "fused, one layer": lambda: one(ids, use_cache=False),
        "fused, one layer, last query": lambda: last(ids, use_cache=False),
        "eager, all layers": lambda: every(
            ids, use_cache=False, output_attentions=True
        ),
    }


def run(quick: bool) -> Report:
    """Time and peak of live bytes."""
    quiet()
    depth = 12
    ids = token_ids(1, 1024)
    report = Report(
        "attention",
        "Attention weights beside fused attention",
        f"Llama of {depth} layers, hidden 256, 8 heads, one sequence of 1,024 tokens, "
        "Inductor.",
    )
    with torch.no_grad():
        calls = _calls(depth, ids)
        times = interleaved(
            calls, rounds=15 if quick else 60, budget_s=30 if quick else 120
        )
        peaks = {name: _live_bytes(call)[0] for name, call in calls.items()}
    base = "fused, no weights"
    rows = latency_rows(times, base=base)
    for row in rows:
        row["peak_MiB"] = peaks[row["variant"]] / MiB
    report.table("Time and peak of live bytes", rows)
    report.figure(
        "one_layer_over_fused", ratio(times, "fused, one layer", base), "at most 1.15"
    )
    report.figure(
        "last_query_over_fused",
        ratio(times, "fused, one layer, last query", base),
        "at most 1.02",
    )
    report.figure(
        "one_layer_over_eager",
        ratio(times, "fused, one layer", "eager, all layers"),
        "at most 0.7",
    )
    added = {name: peak - peaks[base] for name, peak in peaks.items()}
    report.figure(
        "added_bytes_over_eager",
        added["fused, one layer"] / max(added["eager, all layers"], 1),
        "at most 0.3",
    )
    return report


if __name__ == "__main__":
    main(run)
