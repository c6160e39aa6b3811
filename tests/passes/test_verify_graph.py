"""The check behind the passes: it changes nothing and finds what they left."""

from __future__ import annotations

import pytest
import torch

from fxcapture import Tap, passes
from fxcapture.errors import GraphError
from tests.passes.marked import Chain, trace

X = torch.ones(2, 3)


def rewritten() -> torch.fx.GraphModule:
    return passes.rewrite(*trace(Chain(), {"t": Tap("twice")}, X))


def test_a_rewritten_graph_passes_and_is_not_changed() -> None:
    graph = rewritten()
    before = str(graph.graph)

    passes.verify_graph(graph)

    assert str(graph.graph) == before


def test_a_mark_that_is_left_is_found() -> None:
    graph, *_ = trace(Chain(), {"t": "twice"}, X)
    graph.meta[passes.OUTPUTS] = ()

    with pytest.raises(GraphError, match="'emit_mark' was left behind"):
        passes.verify_graph(graph)


def test_a_missing_output_is_found() -> None:
    graph = rewritten()
    graph.graph.output_node().args = (graph.graph.output_node().args[0][:1],)

    with pytest.raises(GraphError, match="missing from the outputs"):
        passes.verify_graph(graph)


def test_a_graph_that_is_not_well_formed_is_found() -> None:
    graph = rewritten()
    nodes = list(graph.graph.nodes)
    nodes[1].prepend(nodes[3])  # used before it is computed

    with pytest.raises(GraphError, match="not well-formed"):
        passes.verify_graph(graph)


def test_the_pipeline_is_the_passes_in_order_and_equal_to_the_plain_graph() -> None:
    traced = trace(Chain(), {"t": Tap("twice")}, X)

    made = passes.rewrite(*traced)
    plain = passes.without_marks(traced.graph_module)

    assert torch.equal(made(X.clone())[0], plain(X.clone())[0])
    assert len(made(X.clone())) == 3
    assert len(plain(X.clone())) == 1
