"""Marks go, with what was computed for them alone, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from fxcapture import Tap, passes
from fxcapture.testing import check_pass
from tests.passes.marked import Chain, InCheckpoint, pinned, readable, trace

X = torch.ones(2, 3)
PLAIN = """
    x = input
    mul = mul(x, 2)
    add_ = add_(mul, 1)
    mul_1 = mul(add_, 2)
    return ((mul_1))
    """


def test_what_is_left_is_the_plain_graph() -> None:
    spec = {
        "t": Tap("twice"),
        "o": Tap("over", point="input"),
        "m": Tap("twice", reduce="mean", initial=True),
    }
    graph, *_ = trace(Chain(), spec, X)

    made = check_pass(passes.erase_marks, graph, [X])

    assert readable(made) == pinned(PLAIN)


def test_marks_of_bodies_go_too() -> None:
    graph, *_ = trace(InCheckpoint(), {"t": Tap("inside.twice", initial=True)}, X)

    assert passes.erase_marks(graph).modified

    assert readable(graph.wrap_body_0) == pinned(
        """
        x = input
        mul = mul(x, 2)
        add_ = add_(mul, 1)
        mul_1 = mul(add_, 2)
        return ((mul_1))
        """
    )
    assert not passes.erase_marks(graph).modified


def test_a_node_of_the_model_that_nothing_uses_stays() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Chain()

        def forward(self, h):
            self.part(h)
            return h - 1

    graph, *_ = trace(Dead(), {"t": "part.twice", "p": "part"}, X)

    passes.erase_marks(graph)

    assert readable(graph) == pinned(
        """
        x = input
        mul = mul(x, 2)
        add_ = add_(mul, 1)
        mul_1 = mul(add_, 2)
        sub = sub(x, 1)
        return ((sub))
        """
    )


def test_the_models_own_reduction_of_a_tapped_value_stays() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Chain()

        def forward(self, h):
            return self.part(h).mean(dim=1)

    graph, *_ = trace(Means(), {"p": Tap("part", reduce="mean", select=[])}, X)

    passes.erase_marks(graph)

    assert readable(graph).count("mean(") == 1
