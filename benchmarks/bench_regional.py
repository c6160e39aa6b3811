"""Capture when each block is compiled on its own, which large models do.

One compilation serves all blocks of a kind; capture must not cost one per block.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from benchmarks.harness import (
    Report,
    Times,
    child,
    interleaved,
    latency_rows,
    main,
    ratio,
)
from benchmarks.models import hidden_states, llama, quiet, token_ids

LAYERS = 24
SELECTED = (8, 16)


def model_of(layers: int) -> nn.Module:
    return llama(num_hidden_layers=layers, hidden_size=128, intermediate_size=344)


def plain_regional(model: nn.Module, backend: str) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model


def captured_regional(model: nn.Module, backend: str, **fields: Any) -> Any:
    spec = hidden_states(*SELECTED, **fields)
    return fxc.compile(
        model, spec, backend=backend, fullgraph=True, regions="model.layers.*"
    )


def first_call(captured: bool, layers: int, backend: str) -> dict[str, Any]:
    """Seconds of the first call and number of graphs, in a fresh process."""
    quiet()
    torch.compile(nn.Linear(8, 8), backend=backend)(torch.ones(8, 8))
    before = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    make = captured_regional if captured else plain_regional
    model, ids = make(model_of(layers), backend), token_ids(4, 64)
    with torch.no_grad():
        start = time.perf_counter()
        model(ids)
        seconds = time.perf_counter() - start
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - before
    return {"seconds": seconds, "graphs": graphs}


def latency(layers: int, backend: str, rounds: int) -> Times:
    ids = token_ids(4, 64)
    plain = plain_regional(model_of(layers), backend)
    captured = captured_regional(model_of(layers), backend)
    with torch.no_grad():
        return interleaved(
            {"plain": lambda: plain(ids), "captured": lambda: captured(ids)},
            rounds=rounds,
        )


def training(layers: int, backend: str, rounds: int) -> Times:
    """A step with two detached captures against one without."""
    ids = token_ids(4, 64)
    plain = plain_regional(model_of(layers).train(), backend)
    captured = captured_regional(model_of(layers).train(), backend, detach=True)

    def step(model: Any, output: Any) -> None:
        output.loss.backward()
        model.zero_grad(set_to_none=True)

    return interleaved(
        {
            "plain step": lambda: step(plain, plain(ids, labels=ids)),
            "captured step": lambda: step(captured, captured(ids, labels=ids).output),
        },
        rounds=rounds,
    )


def run(quick: bool) -> Report:
    quiet()
    layers = LAYERS
    report = Report(
        "regional",
        "Capture with regional compilation",
        f"Llama, {layers} layers, hidden 128, batch 4 x 64, each layer compiled on its "
        "own with Inductor and `fullgraph=True`; two hidden states selected.",
    )
    runs = 1 if quick else 3
    found = {
        name: [
            child(
                "benchmarks.bench_regional", "first_call",
                captured=captured, layers=layers, backend="inductor",
            )
            for _ in range(runs)
        ]
        for name, captured in (("plain", False), ("captured", True))
    }  # fmt: skip
    report.table(
        "First call (a process each)",
        [
            {
                "variant": name,
                "seconds": statistics.median(f["seconds"] for f in made),
                "graphs": made[0]["graphs"],
                "runs": runs,
            }
            for name, made in found.items()
        ],
    )
    report.figure(
        "first_call_captured_over_plain",
        statistics.median(f["seconds"] for f in found["captured"])
        / statistics.median(f["seconds"] for f in found["plain"]),
        "<= 1.15",
    )
    report.figure("graphs_captured", found["captured"][0]["graphs"])
    report.figure("graphs_plain", found["plain"][0]["graphs"])
    times = latency(layers, "inductor", 15 if quick else 60)
    report.table("Time per call", latency_rows(times, "plain"))
    report.figure(
        "latency_captured_over_plain", ratio(times, "captured", "plain"), "<= 1.03"
    )
    steps = training(layers, "inductor", 8 if quick else 30)
    report.table("Training step", latency_rows(steps, "plain step"))
    report.figure(
        "training_step_captured_over_plain",
        ratio(steps, "captured step", "plain step"),
        "<= 1.03",
    )
    return report


if __name__ == "__main__":
    main(run)
