"""What a decorated forward costs when nothing is requested, eagerly.

Compares, in one process and interleaved, the same model's forward
- undecorated,
- under ``fxcapture.modeling.capture_outputs``,
- under transformers' ``capture_outputs``, before and after it has put hooks on the
model.

A round calls each of them a fixed number of times in a random order; what counts is the
median over the rounds of the difference to the undecorated forward of the same round,
in microseconds of the thread's CPU time per call, which other jobs on the machine
disturb less than wall time.  The model does next to nothing, so that the difference
shows.

    python -m benchmarks.bench_decorator [--rounds N] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import output_capturing

from fxcapture.modeling import capture_outputs

CALLS = 100
LAYERS = 8


class Attention(nn.Module):
    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return h, h


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.attention(h)[0]


def model_class(label: str, decorate: Callable[[Any], Any]) -> type[PreTrainedModel]:
    class Model(PreTrainedModel):
        config_class = PreTrainedConfig
        _can_record_outputs = {  # noqa: RUF012
            "hidden_states": Block,
            "attentions": Attention,
        }

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.post_init()

        @decorate
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            for layer in self.layers:
                x = layer(x, **kwargs)
            return BaseModelOutput(last_hidden_state=x)

    # transformers' registry goes by this name.
    Model.__qualname__ = f"Model_{label}"
    return Model


def measure(rounds: int) -> dict[str, Any]:
    x = torch.zeros(1, 1, 1)
    config = PreTrainedConfig(num_hidden_layers=LAYERS)
    theirs = output_capturing.capture_outputs
    models = {
        "undecorated": model_class("undecorated", lambda f: f)(config),
        "fxcapture": model_class("fxcapture", capture_outputs)(config),
        "fxcapture_after_capture": model_class("fxcapture2", capture_outputs)(config),
        "transformers": model_class("transformers", theirs)(config),
        "transformers_after_capture": model_class("transformers2", theirs)(config),
    }
    for name, model in models.items():
        model.eval()
        if name.endswith("after_capture"):
            model(x, output_hidden_states=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    rng = random.Random(0)
    with torch.no_grad():
        for round_ in range(rounds + 3):
            rng.shuffle(order)
            for name in order:
                model = models[name]
                start = time.thread_time()
                for _ in range(CALLS):
                    model(x)
                elapsed = (time.thread_time() - start) / CALLS
                if round_ >= 3:  # the first rounds warm up
                    seconds[name].append(elapsed)
    base = seconds["undecorated"]
    result: dict[str, Any] = {}
    for name, values in seconds.items():
        extra = [(v - b) * 1e6 for v, b in zip(values, base, strict=True)]
        quarters = statistics.quantiles(extra, n=4)
        result[name] = {
            "call_us": round(statistics.median(values) * 1e6, 2),
            "extra_us": round(statistics.median(extra), 2),
            "extra_us_quartiles": [round(quarters[0], 2), round(quarters[2], 2)],
        }
    return result


def environment() -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "layers": LAYERS,
        "calls_per_round": CALLS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options.rounds)
    report = {
        "command": f"python -m benchmarks.bench_decorator --rounds {options.rounds}",
        "environment": environment() | {"rounds": options.rounds},
        "result": result,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decorator.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = [
        "# A decorated forward with nothing requested, eager",
        "",
        "Microseconds of CPU time per call over the undecorated forward of the same "
        "round: "
        "median and quartiles of the paired differences.",
        "",
        "| forward | median call | extra | quartiles |",
        "|---|---|---|---|",
    ]
    for name, row in result.items():
        low, high = row["extra_us_quartiles"]
        lines.append(
            f"| {name.replace('_', ' ')} | {row['call_us']} us | {row['extra_us']} us "
            f"| {low} to {high} us |"
        )
    lines += ["", f"Command: `{report['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in report["environment"].items()]
    text = "\n".join(lines) + "\n"
    (options.out / "decorator.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
