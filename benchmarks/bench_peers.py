"""Other ways to the same hidden states, in the same rounds.

Each peer is optional: one that is not installed, or that fails on this torch, is
skipped, and the report says so with its reason.  All get the same weights and give the
same three hidden states, which is checked before anything is timed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from benchmarks.harness import Report, bars, interleaved, latency_rows, main, ratio
from benchmarks.models import hidden_states, llama, quiet, token_ids

# Layers 0, 1 and 2: position 0 is the embedding output; transformers puts the normed
# state in the last one's place.
POSITIONS = (1, 2, 3)
SIZES = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 344}
Call = Callable[[], list[torch.Tensor]]


def eager_plain(model: nn.Module, ids: torch.Tensor) -> Call:
    def call() -> list[torch.Tensor]:
        model(ids)
        return []

    return call


def compiled_plain(model: nn.Module, ids: torch.Tensor) -> Call:
    made = torch.compile(lambda x: model(x), fullgraph=True)

    def call() -> list[torch.Tensor]:
        made(ids)
        return []

    return call


def fxcapture_compiled(model: nn.Module, ids: torch.Tensor) -> Call:
    captured = fxc.compile(model, hidden_states(*POSITIONS), fullgraph=True)
    return lambda: [h for h in captured(ids).records["hidden_states"] if h is not None]


def fxcapture_records_only(model: nn.Module, ids: torch.Tensor) -> Call:
    captured = fxc.compile(
        model, hidden_states(*POSITIONS), fullgraph=True, keep_output=False
    )
    return lambda: [h for h in captured(ids).records["hidden_states"] if h is not None]


def hooks(model: nn.Module, ids: torch.Tensor, made: Any) -> Call:
    seen: list[torch.Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    for position in POSITIONS:
        model.model.layers[position - 1].register_forward_hook(hook)

    def call() -> list[torch.Tensor]:
        seen.clear()
        made(ids)
        return list(seen)

    return call


def eager_hooks(model: nn.Module, ids: torch.Tensor) -> Call:
    return hooks(model, ids, model)


def compiled_hooks(model: nn.Module, ids: torch.Tensor) -> Call:
    # Through a function of its own: Dynamo runs the code it made for another model of
    # this class, one without hooks, if the module itself is compiled.
    return hooks(model, ids, torch.compile(lambda x: model(x), fullgraph=True))


def transformers_eager(model: nn.Module, ids: torch.Tensor) -> Call:
    def call() -> list[torch.Tensor]:
        states = model(ids, output_hidden_states=list(POSITIONS)).hidden_states
        return [states[p] for p in POSITIONS]

    return call


def transformers_compiled(model: nn.Module, ids: torch.Tensor) -> Call:
    model(ids, output_hidden_states=True)  # its lazy set-up cannot be traced
    made = torch.compile(lambda x, wanted: model(x, output_hidden_states=wanted))

    def call() -> list[torch.Tensor]:
        states = made(ids, list(POSITIONS)).hidden_states
        return [states[p] for p in POSITIONS]

    return call


def nnsight_eager(model: nn.Module, ids: torch.Tensor) -> Call:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def call() -> list[torch.Tensor]:
        with wrapped.trace(ids):
            first = wrapped.model.layers[POSITIONS[0] - 1].output.save()
            second = wrapped.model.layers[POSITIONS[1] - 1].output.save()
            third = wrapped.model.layers[POSITIONS[2] - 1].output.save()
        found = (first, second, third)
        return [h[0] if isinstance(h, tuple) else h for h in found]

    return call


def torchlens_eager(model: nn.Module, ids: torch.Tensor) -> Call:
    import torchlens

    names = [f"model.layers.{p - 1}" for p in POSITIONS]

    def call() -> list[torch.Tensor]:
        found = torchlens.extract(model, ids, names)
        return [found[name] for name in names]

    return call


def transformer_lens_eager(model: nn.Module, ids: torch.Tensor) -> Call:
    from transformer_lens.model_bridge import TransformerBridge

    raise NotImplementedError(
        f"{TransformerBridge.__name__} loads a model by name, with its tokenizer; it "
        "takes no module that exists already"
    )


VARIANTS: dict[str, Callable[[nn.Module, torch.Tensor], Call]] = {
    "eager, no capture": eager_plain,
    "compiled, no capture": compiled_plain,
    "fxcapture, compiled": fxcapture_compiled,
    "fxcapture, compiled, records only": fxcapture_records_only,
    "forward hooks, eager": eager_hooks,
    "forward hooks, compiled": compiled_hooks,
    "transformers, eager": transformers_eager,
    "transformers, compiled": transformers_compiled,
    "nnsight, eager": nnsight_eager,
    "TransformerLens": transformer_lens_eager,
}
#: torchlens replaces functions of torch while it records.  What the process has
#: compiled is guarded on those, and would compile anew in every round.
APART: dict[str, Callable[[nn.Module, torch.Tensor], Call]] = {
    "eager, no capture": eager_plain,
    "torchlens, eager": torchlens_eager,
}


def prepare(
    report: Report,
    ids: torch.Tensor,
    variants: dict[str, Callable[[nn.Module, torch.Tensor], Call]],
) -> dict[str, Call]:
    """The variants that work, each on a model of its own with the same weights."""
    with torch.no_grad():
        states = llama(**SIZES)(ids, output_hidden_states=True).hidden_states
        expected = [states[p] for p in POSITIONS]
        ready: dict[str, Call] = {}
        for name, make in variants.items():
            try:
                call = make(llama(**SIZES), ids)
                found = call()
                if "no capture" not in name:
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                call()
            except ImportError as error:
                report.note(f"{name}: skipped, {error.name or error} is not installed")
            except Exception as error:
                reason = str(error).strip().splitlines() or [""]
                report.note(f"{name}: skipped, {type(error).__name__}: {reason[0]}")
            else:
                ready[name] = call
    return ready


def run(quick: bool) -> Report:
    quiet()
    report = Report(
        "peers",
        "Other ways to the same three hidden states",
        "Llama, 4 layers, hidden 128, batch 4 x 64, float32, no grad. Interleaved "
        "rounds; every variant has a model of its own with the same weights and gives "
        "the same values to 1e-4.",
    )
    ids = token_ids(4, 64)
    ready = prepare(report, ids, VARIANTS)
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
        times = interleaved(ready, rounds=15 if quick else 40, budget_s=120)
    report.table("Time per call", latency_rows(times, "compiled, no capture"))
    for name in ready:
        if name != "compiled, no capture":
            report.figure(f"{name} / plain", ratio(times, name, "compiled, no capture"))
    apart = prepare(report, ids, APART)
    if len(apart) == len(APART):
        with torch.no_grad():
            alone = interleaved(apart, rounds=15 if quick else 40, budget_s=60)
        report.table(
            "Time per call, after the others", latency_rows(alone, "eager, no capture")
        )
        report.figure(
            "torchlens, eager / eager, no capture",
            ratio(alone, "torchlens, eager", "eager, no capture"),
        )
    report.plot(
        "peers_latency",
        "Three hidden states of a Llama 4 x 128, batch 4 x 64",
        bars(
            list(times),
            [statistics.median(t) * 1e3 for t in times.values()],
            "ms per call",
        ),
    )
    return report


if __name__ == "__main__":
    main(run)
