"""Two layers learn the states of six: distillation with a compiled teacher and student.

Records carry gradients, so a loss on the student's hidden states trains it; the
teacher's are detached in its graph.
"""

from __future__ import annotations

import copy

import minilm
import torch
from torch.nn import functional as F

import fxcapture as fxc

TEXT = [
    "The kettle boils, and nobody is in the kitchen.",
    "Rain fell on the station all afternoon.",
    "She reads the last page first.",
    "Two engines share one cooling pump.",
    "The museum keeps its oldest coins in a drawer.",
    "He never answers letters in winter.",
    "A small river runs behind the factory.",
    "They painted the fence and then the gate.",
]


def main(backend: str = "inductor", steps: int = 30) -> tuple[float, float]:
    """The loss before and after."""
    torch.manual_seed(0)
    teacher, tokenizer = minilm.load()
    student = copy.deepcopy(teacher)
    student.encoder.layer = student.encoder.layer[:2]  # every third state of six
    batch = dict(tokenizer(TEXT, padding=True, return_tensors="pt"))
    kept = batch["attention_mask"][..., None]

    states = fxc.Tap("encoder.layer.*", output=0, select=[2, 5], detach=True)
    teach = fxc.compile(teacher, {"h": states}, keep_output=False, backend=backend)
    learn = fxc.compile(
        student, {"h": fxc.Tap("encoder.layer.*", output=0)}, keep_output=False,
        backend=backend,
    )  # fmt: skip
    with torch.no_grad():
        goals = [h for h in teach(**batch).records["h"] if h is not None]

    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)
    losses = []
    for step in range(steps):
        learned = learn(**batch).records["h"]
        loss = sum(
            F.mse_loss(h * kept, goal * kept)
            for h, goal in zip(learned, goals, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2}: loss {losses[-1]:.4f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
