"""What a decorated forward costs when nothing is requested, eagerly.

Compares, in one process and interleaved, the same model's forward
- undecorated,
- under ``fxcapture.capture_outputs``,
- under transformers' ``capture_outputs``, before and after it has put hooks on the
model.

A round calls each of them a fixed number of times in a random order; what counts is the
median over the rounds of the difference to the undecorated forward of the same round,
in microseconds of the thread's CPU time per call, which other jobs on the machine
disturb less than wall time.  The model does next to nothing, so that the difference
shows.

    python -m benchmarks.bench_decorator [--quick]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import output_capturing

from benchmarks.harness import Report, main
from fxcapture.modeling.decorators import capture_outputs

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


def run(quick: bool) -> Report:
    """Every variant; CPU time of one thread."""
    torch.set_num_threads(1)
    report = Report(
        "decorator",
        "A decorated forward with nothing requested, eager",
        f"A model of {LAYERS} layers that compute nothing. CPU time per call over the "
        "undecorated forward of the same round: median and quartiles of the paired "
        f"differences; {CALLS} calls a round.",
    )
    found = measure(30 if quick else 100)
    report.table(
        "Microseconds per call",
        [
            {
                "forward": name.replace("_", " "),
                "call_us": row["call_us"],
                "extra_us": row["extra_us"],
                "quartiles_us": "{} to {}".format(*row["extra_us_quartiles"]),
            }
            for name, row in found.items()
        ],
    )
    for name in ("fxcapture", "fxcapture_after_capture"):
        report.figure(f"extra_us, {name}", found[name]["extra_us"], "under 20")
    for name in ("transformers", "transformers_after_capture"):
        report.figure(f"extra_us, {name}", found[name]["extra_us"])
    return report


if __name__ == "__main__":
    main(run)
