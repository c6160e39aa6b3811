"""Taps leave the bodies of higher-order operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from fxcapture import Tap, passes
from fxcapture.errors import UnreachableValueError
from fxcapture.passes.base import TAP
from fxcapture.testing import check_pass
from tests.passes.marked import Chain, InCheckpoint, pinned, readable, trace

X = torch.ones(2, 3)


def tapped(model: nn.Module, spec: object) -> tuple[torch.fx.GraphModule, object]:
    graph, marked, wanted, sizes = trace(model, spec, X)
    passes.insert_taps(graph, marked, wanted, sizes)
    graph.recompile()
    for body in graph.children():
        body.recompile()
    return graph, marked.sites


def test_a_tap_becomes_a_result_of_the_operator() -> None:
    graph, sites = tapped(InCheckpoint(), {"t": Tap("inside.twice", select=0)})

    made = check_pass(partial(passes.lift_taps, sites=sites), graph, [X])

    assert readable(made) == pinned(
        """
        x = input
        wrap_body_0 = wrap_body_0()
        tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, x)
        getitem = getitem(tag_activation_checkpoint, 1)
        getitem_1 = getitem(tag_activation_checkpoint, 0)
        sub = sub(getitem_1, 1)
        return ((sub))
        """
    )
    assert readable(made.wrap_body_0) == pinned(
        """
        x = input
        mul = mul(x, 2)
        clone = clone(mul)
        emit_mark = emit_mark(None, [mul], [], ..., 'inside.twice', 'result')
        add_ = add_(mul, 1)
        mul_1 = mul(add_, 2)
        emit_mark_1 = emit_mark(None, [mul_1], [], ..., 'inside.twice', 'result')
        return ((mul_1, clone))
        """
    )
    (lifted,) = [n for n in made.graph.nodes if TAP in n.meta]
    assert lifted.name == "getitem_1"


def test_taps_leave_a_body_inside_a_body() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = InCheckpoint()

        def forward(self, h):
            return torch.utils.checkpoint.checkpoint(self.outer, h, use_reentrant=False)

    graph, sites = tapped(Twice(), {"t": Tap("outer.inside.twice")})

    made = check_pass(partial(passes.lift_taps, sites=sites), graph, [X])

    assert sum(TAP in n.meta for n in made.graph.nodes) == 2


def test_a_graph_without_bodies_is_left_alone() -> None:
    graph, sites = tapped(Chain(), {"t": "twice"})

    assert not passes.lift_taps(graph, sites).modified


def test_an_operator_that_cannot_return_more_is_refused_by_name() -> None:
    graph, sites = tapped(InCheckpoint(), {"t": Tap("inside.twice", select=0)})
    (node,) = [n for n in graph.graph.nodes if "checkpoint" in str(n.target)]
    operator = node.target

    class Renamed(type(operator)):
        def __init__(self) -> None:
            pass

        def name(self) -> str:
            return "some_scan"

    node.target = object.__new__(Renamed)
    node.target.__dict__.update(operator.__dict__)

    with pytest.raises(UnreachableValueError, match="'some_scan'") as caught:
        passes.lift_taps(graph, sites)

    assert "'inside.twice'" in str(caught.value)
    assert "tap a module outside" in caught.value.remedy
