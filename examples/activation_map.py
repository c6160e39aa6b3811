"""Where does a network look?  Class activation maps of a small image classifier.

It learns to tell crosses from rings, drawn somewhere on a noisy picture, in a few
seconds.  The map is the last convolution's channels, weighted as the classifier weights
them.
"""

from __future__ import annotations

import torch
from torch import nn

import fxcapture as fxc

SIZE = 24


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.third = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()
        return self.head(x.mean(dim=(2, 3)))


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures, labels, and the centres of what is drawn."""
    x = 0.3 * torch.randn(count, 1, SIZE, SIZE)
    labels = torch.randint(0, 2, (count,))
    centres = torch.randint(4, SIZE - 4, (count, 2))
    cross, ring = torch.zeros(2, 7, 7)
    cross[3], cross[:, 3] = 2.0, 2.0
    ring[[1, 5], 1:6], ring[1:6, 1], ring[1:6, 5] = 2.0, 2.0, 2.0
    for i, (label, (row, column)) in enumerate(zip(labels, centres, strict=True)):
        x[i, 0, row - 3 : row + 4, column - 3 : column + 4] += ring if label else cross
    return x, labels, centres


def train(model: nn.Module, steps: int = 150) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, labels, _ = pictures(64)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(backend: str = "inductor") -> tuple[float, float]:
    """Share of pictures told right, and share of maps that peak on what is drawn."""
    torch.manual_seed(0)
    model = Classifier()
    train(model)
    captured = fxc.compile(model.eval(), {"maps": "third"}, backend=backend)
    x, labels, centres = pictures(64)
    with torch.no_grad():
        logits, records = captured(x)
        channels = records["maps"][0].relu()  # as the model's own relu behind it
        weights = model.head.weight[logits.argmax(1)]
        maps = torch.einsum("nchw,nc->nhw", channels, weights)
    peaks = maps.flatten(1).argmax(1)
    rows, columns = 2 * (peaks // maps.shape[2]), 2 * (peaks % maps.shape[2])
    near = (torch.stack([rows, columns], 1) - centres).abs().amax(1) <= 5
    right = (logits.argmax(1) == labels).float().mean().item()
    found = near.float().mean().item()
    shade = maps[0] / maps[0].max()
    for line in shade:
        print("".join(" .:-=+*#%@"[int(v.clamp(0, 0.99) * 10)] for v in line))
    print(f"a {'ring' if labels[0] else 'cross'} at {(centres[0] // 2).tolist()}")
    print(f"{right:.0%} told right, {found:.0%} of the maps peak on what is drawn")
    return right, found


if __name__ == "__main__":
    main()
