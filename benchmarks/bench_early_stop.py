"""Records of layer k only, against a model that really ends at layer k.

The cut model is the limit: it computes nothing that is not needed.  Run it::

    python -m benchmarks.bench_early_stop [--quick]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from benchmarks.harness import Report, interleaved, latency_rows, main, ratio
from benchmarks.models import llama, quiet, token_ids


def _cut(model: Any, layers: int) -> Callable[[torch.Tensor], Any]:
    """A model of the first layers, without the last norm, compiled."""
    short = copy.copy(model)
    short._modules = dict(model._modules)
    short.layers = model.layers[:layers]
    short.norm = nn.Identity()
    short.config = copy.deepcopy(model.config)
    short.config.num_hidden_layers = layers
    compiled = torch.compile(short, fullgraph=True)
    return lambda ids: compiled(ids, use_cache=False).last_hidden_state


def _stopped(model: Any, layers: int) -> Callable[[torch.Tensor], Any]:
    spec = {"h": fxc.Tap("layers.*", select=[layers - 1])}
    captured = fxc.compile(model, spec, keep_output=False, fullgraph=True)
    return lambda ids: captured(ids, use_cache=False).records["h"][layers - 1]


def run(quick: bool) -> Report:
    """Quarter and half of the depth."""
    quiet()
    depth = 8 if quick else 16
    model = llama(num_hidden_layers=depth).model
    ids = token_ids(2, 256)
    report = Report(
        "early_stop",
        "Ending at the last layer that a record needs",
        f"Llama of {depth} layers, hidden 256, batch 2 x 256 tokens, Inductor.",
    )
    with torch.no_grad():
        for k in (depth // 4, depth // 2):
            calls = {"cut at k": _cut(model, k), "stopped at k": _stopped(model, k)}
            results = [call(ids) for call in calls.values()]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
            times = interleaved(
                {n: (lambda c=c: c(ids)) for n, c in calls.items()},
                rounds=30 if quick else 100,
                budget_s=20 if quick else 60,
            )
            report.table(f"k = {k} of {depth}", latency_rows(times, base="cut at k"))
            report.figure(
                f"stopped_over_cut, k={k}",
                ratio(times, "stopped at k", "cut at k"),
                expected="at most 1.05",
            )
    return report


if __name__ == "__main__":
    main(run)
