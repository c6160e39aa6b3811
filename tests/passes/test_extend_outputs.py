"""Taps become outputs behind the model's own."""

from __future__ import annotations

import torch

from fxcapture import Tap, passes
from fxcapture.passes.base import TAP
from fxcapture.testing import check_pass
from tests.passes.marked import Chain, pinned, readable, trace

X = torch.ones(2, 3)


def test_taps_are_appended_in_graph_order_and_named() -> None:
    graph, marked, wanted, sizes = trace(Chain(), {"t": Tap("twice")}, X)
    passes.insert_taps(graph, marked, wanted, sizes)
    graph.recompile()

    made = check_pass(passes.extend_outputs, graph, [X], adds_outputs=True)

    assert readable(made).splitlines()[-1] == "return ((mul_1, clone, clone_1))"
    assert [key.site for key in made.meta[passes.OUTPUTS]] == [0, 1]
    assert not any(TAP in n.meta for n in made.graph.nodes)
    own, first, second = made(X)
    assert torch.equal(first, X * 2)
    assert torch.equal(second, own)


def test_without_taps_the_graph_stays_and_says_that_there_are_none() -> None:
    graph, *_ = trace(Chain(), {"t": Tap("twice", select=[])}, X)
    before = readable(graph)

    assert not passes.extend_outputs(graph).modified
    assert readable(graph) == before
    assert graph.meta[passes.OUTPUTS] == ()


def test_an_only_output_that_is_no_tuple_becomes_one() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_method("clone", (x,))
    made.meta[TAP] = "key"
    graph.output(x)
    module = torch.fx.GraphModule({}, graph)

    passes.extend_outputs(module)

    assert readable(module) == pinned(
        """
        x = input
        clone = clone(x)
        return ((x, clone))
        """
    )
