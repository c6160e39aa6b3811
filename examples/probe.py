"""Which layer of a sentence encoder knows who did it?  A linear probe on each.

"The dog chased the fox" and "The fox chased the dog" have the same words, so that the
embeddings cannot tell them apart; some layer can.  The compiled program ends at the
last layer and returns one pooled vector per sentence and layer: the states themselves
are freed as the model runs.
"""

from __future__ import annotations

import itertools

import minilm
import torch

import fxcapture as fxc
from fxcapture import reductions

VERBS = ["chased", "saw", "followed", "bit", "found", "heard", "watched", "met"]
ANIMALS = ["fox", "cat", "horse", "goose", "rabbit", "child", "postman", "neighbour"]
SEEN = 6  # of each; the others are what the probe is tested on


def main(backend: str = "inductor") -> list[float]:
    """Accuracy on unseen sentences, layer by layer."""
    model, tokenizer = minilm.load()
    seen = list(itertools.product(VERBS[:SEEN], ANIMALS[:SEEN]))
    unseen = list(itertools.product(VERBS[SEEN:], ANIMALS[SEEN:]))
    sentences = [
        text
        for verb, other in seen + unseen
        for text in (f"The dog {verb} the {other}.", f"The {other} {verb} the dog.")
    ]
    labels = torch.tensor([1.0, -1.0]).repeat(len(seen + unseen))
    batch = tokenizer(sentences, padding=True, return_tensors="pt")

    pooled = fxc.Tap(
        "encoder.layer.*",
        output=0,
        initial=True,  # the embeddings, in front of the six layers
        reduce=reductions.mean(mask="attention_mask"),
    )
    captured = fxc.compile(model, {"h": pooled}, keep_output=False, backend=backend)
    with torch.no_grad():
        layers = captured(**batch).records["h"]

    train, scores = 2 * len(seen), []
    for i, states in enumerate(layers):
        x = torch.nn.functional.normalize(states - states[:train].mean(0))
        gram = x[:train] @ x[:train].T + 0.1 * torch.eye(train)  # ridge regression
        weights = x[:train].T @ torch.linalg.solve(gram, labels[:train])
        right = (x[train:] @ weights).sign() == labels[train:]
        scores.append(right.float().mean().item())
        print(f"layer {i}: {scores[-1]:.0%} of {len(right)} unseen sentences")
    return scores


if __name__ == "__main__":
    main()
