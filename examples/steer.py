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

    batch = tokenizer(SUMMER + WINTER + NEUTRAL, padding=True, return_tensors="pt")
    shift = torch.zeros(model.config.hidden_size)  # an input of the compiled graph

    def add(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + shift, *output[1:])
        return output + shift

    handle = model.get_submodule(LAYER).register_forward_hook(add)
    captured = fxc.compile(model, spec, keep_output=False, backend=backend)
    with torch.no_grad():
        plain = captured(**batch).records
        at = plain["at"][0]
        shift.copy_(2 * (at[:3].mean(0) - at[3:6].mean(0)))
        steered = captured(**batch).records  # other values, no second compilation
    handle.remove()

    sentences = plain["sentence"][0]
    towards = sentences[:3].mean(0) - sentences[3:6].mean(0)
    before, after = (
        torch.cosine_similarity(r["sentence"][0][6:], towards[None]).mean().item()
        for r in (plain, steered)
    )
    print(f"leaning towards summer: {before:+.2f} before, {after:+.2f} after")
    return before, after


if __name__ == "__main__":
    main()
