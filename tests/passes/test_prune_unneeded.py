"""Records only: the graph ends at the last operation that an output needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxcapture import passes
from fxcapture.testing import check_pass
from tests.passes.marked import pinned, readable


def graph_of(build) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((build(graph, graph.placeholder("x")),))
    return fx.GraphModule({}, graph)


def test_what_stands_behind_the_last_needed_node_goes_even_if_it_writes() -> None:
    def build(graph, x):
        kept = graph.call_function(torch.sin, (x,))
        later = graph.call_function(torch.cos, (kept,))
        graph.call_method("add_", (later, 1))
        return kept

    made = check_pass(passes.prune_unneeded, graph_of(build), [torch.ones(2)])

    assert readable(made) == pinned(
        """
        x = input
        sin = sin(x)
        return ((sin))
        """
    )


def test_before_it_writes_and_random_numbers_stay_and_the_rest_goes() -> None:
    def build(graph, x):
        copied = graph.call_method("clone", (x,))
        graph.call_function(torch.cos, (x,))
        graph.call_method("mul_", (copied, 3))
        graph.call_function(F.dropout, (x,), {"p": 0.5, "training": True})
        graph.call_function(torch.tanh, (x,))
        return graph.call_function(torch.sin, (copied,))

    made = check_pass(passes.prune_unneeded, graph_of(build), [torch.ones(2)])

    assert readable(made) == pinned(
        """
        x = input
        clone = clone(x)
        mul_ = mul_(clone, 3)
        dropout = dropout(x)
        sin = sin(clone)
        return ((sin))
        """
    )


def test_an_in_place_flag_by_keyword_or_position_is_a_write() -> None:
    def build(graph, x):
        copied = graph.call_method("clone", (x,))
        graph.call_function(F.relu, (copied,), {"inplace": True})
        graph.call_function(F.relu, (copied, True))
        graph.call_function(F.relu, (copied, False))
        return graph.call_function(torch.sin, (copied,))

    made = check_pass(passes.prune_unneeded, graph_of(build), [torch.ones(2)])

    assert readable(made).count("relu(") == 2


def test_a_graph_that_needs_everything_is_left_alone() -> None:
    gm = graph_of(lambda graph, x: graph.call_function(torch.sin, (x,)))

    assert not passes.prune_unneeded(gm).modified


def test_inputs_stay_since_the_caller_passes_them() -> None:
    gm = graph_of(lambda graph, x: graph.call_function(torch.ones, (2,)))

    passes.prune_unneeded(gm)

    assert readable(gm).splitlines()[0] == "x = input"


def test_what_a_sub_graph_or_a_module_does_counts() -> None:
    def body(write: bool) -> fx.GraphModule:
        def build(graph, x):
            copied = graph.call_method("clone", (x,))
            if write:
                graph.call_method("mul_", (x, 3))
            return copied

        return graph_of(build)

    graph = fx.Graph()
    x = graph.placeholder("x")
    for write in (True, False):
        inner = graph.get_attr(f"body_{write}")
        graph.call_function(torch.ops.higher_order.wrap, (inner, x))
    graph.call_module("inside", (x,))
    graph.output((graph.call_function(torch.sin, (x,)),))
    root = {"body_True": body(True), "body_False": body(False), "inside": nn.ReLU()}

    made = passes.prune_unneeded(fx.GraphModule(root, graph)).graph_module

    assert readable(made) == pinned(
        """
        x = input
        body_True = body_True()
        wrap = wrap(body_True, x)
        inside = inside(x)
        sin = sin(x)
        return ((sin))
        """
    )
