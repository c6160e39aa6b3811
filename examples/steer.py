"""Steering: a direction is read from records, then added to a layer's output.

The direction is the difference of two sets of sentences at one layer of the encoder.
Adding it is the work of a forward hook of yours, which a capture respects: records show
what the caller received, after the hook.
"""

from __future__ import annotations

from typing import Any

import minilm
import torch

import fxcapture as fxc
from fxcapture import reductions

SUMMER = ["The beach was hot.", "We swam in the warm sea.", "July brought sunshine."]
WINTER = ["The lake was frozen.", "We walked in deep snow.", "January brought ice."]
NEUTRAL = ["We spent the day outside.", "The weather changed.", "They took a trip."]
LAYER = "encoder.layer.3"


def main(backend: str = "inductor") -> tuple[float, float]:
    """Similarity of neutral sentences to summer less to winter, before and after."""
    model, tokenizer = minilm.load()
    mean = reductions.mean(mask="attention_mask")
    spec = {
        "at": fxc.Tap(LAYER, output=0, reduce=mean),
        "sentence": fxc.Tap("encoder.layer.5", output=0, reduce=mean),
    }

    def encode(sentences: list[str]) -> Any:
        batch = tokenizer(sentences, padding="max_length", max_length=12,
                          return_tensors="pt")  # fmt: skip
        # A hook is part of what is compiled: compile anew when there is another.
        captured = fxc.compile(model, spec, keep_output=False, backend=backend)
        with torch.no_grad():
            return captured(**batch).records

    everything = encode(SUMMER + WINTER + NEUTRAL)
    at, plain = everything["at"][0], everything["sentence"][0]
    direction = at[:3].mean(0) - at[3:6].mean(0)
    towards = plain[:3].mean(0) - plain[3:6].mean(0)

    def leaning(sentences: torch.Tensor) -> float:
        return torch.cosine_similarity(sentences, towards[None]).mean().item()

    def add(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + 2 * direction, *output[1:])
        return output + 2 * direction

    before = leaning(plain[6:])
    handle = model.get_submodule(LAYER).register_forward_hook(add)
    try:
        after = leaning(encode(NEUTRAL)["sentence"][0])
    finally:
        handle.remove()
    print(f"leaning towards summer: {before:+.2f} before, {after:+.2f} after")
    return before, after


if __name__ == "__main__":
    main()
