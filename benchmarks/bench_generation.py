"""A generation that is recorded, against one of the same compiled model that is not.

Whole generations are timed, prefill and ``transformers``' own Python between the steps
included, as a user sees them.  Run it::

    python -m benchmarks.bench_generation [--quick]
"""

from __future__ import annotations

import copy
import gc
import tracemalloc
from typing import Any

import torch

import fxcapture as fxc
from benchmarks.harness import (
    Report,
    child,
    interleaved,
    latency_rows,
    main,
    ratio,
)
from benchmarks.models import llama, quiet, token_ids

PLAIN, RECORDED = "compiled", "compiled and recorded"
SPEC = {"state": fxc.Tap("model.layers.*", output=0, select=[-2])}


def _generate(
    model: Any, ids: torch.Tensor, steps: int, **settings: Any
) -> torch.Tensor:
    made: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        use_cache=True,
        cache_implementation="static",
        **settings,
    )
    return made


def _compiled(model: Any) -> Any:
    made = copy.deepcopy(model)
    made.forward = torch.compile(made.forward, fullgraph=True)
    return made


def _recorded(
    captured: Any, ids: torch.Tensor, steps: int, **settings: Any
) -> torch.Tensor:
    with captured.recording(keep="last") as run:
        made = _generate(captured, ids, steps, **settings)
    assert run.calls[0].records["state"][-2] is not None
    return made


def kept_bytes(steps: int, recorded: bool) -> list[int]:
    """Bytes alive after each fifth of a generation; runs in a child."""
    quiet()
    model, ids = llama(num_hidden_layers=4), token_ids(1, 32)
    alive: list[int] = []

    def measure(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if (tokens.shape[1] - ids.shape[1]) % (steps // 5) == 0:
            gc.collect()
            tensors = sum(
                t.untyped_storage().nbytes()
                for t in gc.get_objects()
                if type(t) in (torch.Tensor, torch.nn.Parameter)
            )
            alive.append(tensors + tracemalloc.get_traced_memory()[0])
        return torch.zeros(len(tokens), dtype=torch.bool)

    if recorded:
        call, used = _recorded, fxc.compile(model, SPEC, fullgraph=True)
    else:
        call, used = _generate, _compiled(model)
    with torch.no_grad():
        call(used, ids, steps)
        tracemalloc.start()
        call(used, ids, steps, stopping_criteria=[measure])
    return alive


def run(quick: bool) -> Report:
    quiet()
    steps = 50 if quick else 200
    report = Report(
        "generation",
        "Recording a generation",
        f"`generate` of a Llama, 8 layers, hidden 256, greedy, {steps} new tokens after"
        ' a prompt of 32, static cache, Inductor; one state selected, `keep="last"`.',
    )
    model, ids = llama(), token_ids(1, 32)
    plain, captured = _compiled(model), fxc.compile(model, SPEC, fullgraph=True)
    with torch.no_grad():
        calls = {
            PLAIN: lambda: _generate(plain, ids, steps),
            RECORDED: lambda: _recorded(captured, ids, steps),
        }
        torch.testing.assert_close(*[call() for call in calls.values()])
        times = interleaved(
            calls, rounds=8 if quick else 25, budget_s=30 if quick else 120
        )
    report.table("Time per generation", latency_rows(times, PLAIN))
    report.figure(
        "recorded_over_compiled", ratio(times, RECORDED, PLAIN), "at most 1.03"
    )
    alive = {
        name: child(
            "benchmarks.bench_generation", "kept_bytes", steps=steps, recorded=r
        )
        for name, r in ((PLAIN, False), (RECORDED, True))
    }
    report.table(
        "Bytes alive along a generation, of 4 layers",
        [
            {"tokens": (i + 1) * (steps // 5), **{n: a[i] for n, a in alive.items()}}
            for i in range(5)
        ],
    )
    growth = {n: (a[-1] - a[0]) / (steps * 4 / 5) for n, a in alive.items()}
    report.figure("bytes_per_token", growth[RECORDED], "as compiled")
    report.figure("bytes_per_token, compiled", growth[PLAIN], "")
    return report


if __name__ == "__main__":
    main(run)
