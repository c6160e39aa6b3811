"""A tap stands at the mark, and is a copy where something writes later."""

from __future__ import annotations

from functools import partial

import torch

from fxcapture import Tap, passes
from fxcapture.passes.base import TAP
from fxcapture.testing import check_pass
from tests.passes.marked import Chain, pinned, readable, trace

X = torch.ones(2, 3)


def inserted(spec: object) -> torch.fx.GraphModule:
    graph, marked, wanted, sizes = trace(Chain(), spec, X)
    run = partial(passes.insert_taps, marked=marked, wanted=wanted, wanted_sizes=sizes)
    return check_pass(run, graph, [X], idempotent=False)


def test_a_value_that_is_written_to_later_is_copied_at_its_mark() -> None:
    graph = inserted({"t": Tap("twice", select=0)})

    assert readable(graph) == pinned(
        """
        x = input
        mul = mul(x, 2)
        clone = clone(mul)
        emit_mark = emit_mark(None, [mul], [], ..., 'twice', 'result')
        add_ = add_(mul, 1)
        mul_1 = mul(add_, 2)
        emit_mark_1 = emit_mark(None, [mul_1], [], ..., 'twice', 'result')
        return ((mul_1))
        """
    )


def test_detach_and_dtype_stand_before_the_copy_or_in_its_place() -> None:
    tap = Tap("twice", select=0, detach=True, dtype=torch.float64)

    assert readable(inserted({"t": tap})) == pinned(
        """
        x = input
        mul = mul(x, 2)
        detach = detach(mul)
        to = to(detach)
        emit_mark = emit_mark(None, [mul], [], ..., 'twice', 'result')
        add_ = add_(mul, 1)
        mul_1 = mul(add_, 2)
        emit_mark_1 = emit_mark(None, [mul_1], [], ..., 'twice', 'result')
        return ((mul_1))
        """
    )


def test_a_tap_carries_where_it_comes_from() -> None:
    graph = inserted({"t": Tap("twice", select=0)})

    (tap,) = [n for n in graph.graph.nodes if TAP in n.meta]

    assert tap.meta[TAP].site == 0
    assert tap.meta["example_value"].shape == (2, 3)
    assert "nn_module_stack" in tap.meta


def test_nothing_wanted_changes_nothing() -> None:
    graph, marked, *_ = trace(Chain(), {"t": Tap("twice", select=[])}, X)
    before = str(graph.graph)

    assert not passes.insert_taps(graph, marked, {}, {}).modified
    assert str(graph.graph) == before


def test_the_graph_it_was_copied_from_is_untouched() -> None:
    graph, marked, wanted, sizes = trace(Chain(), {"t": "twice"}, X)
    before = str(graph.graph)

    made = passes.rewrite(graph, marked, wanted, sizes)

    assert str(graph.graph) == before
    assert made is not graph
    assert len(made.graph.output_node().args[0]) == 3
