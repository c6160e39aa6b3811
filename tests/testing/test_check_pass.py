"""The check of a pass can fail: passes that do each thing wrong are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxcapture.passes.base import PassResult
from fxcapture.testing import check_pass


def graph() -> fx.GraphModule:
    """Returns ``(x + 1, x * 2)``."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2

    return fx.symbolic_trace(run)


def returning(change: Callable[[fx.Graph, tuple], tuple]) -> Callable[..., PassResult]:
    """A pass that changes what a graph returns."""

    def run(gm: fx.GraphModule) -> PassResult:
        output = gm.graph.output_node()
        output.args = (change(gm.graph, output.args[0]),)
        return PassResult(gm, modified=True)

    return run


def added(g: fx.Graph, values: tuple) -> tuple:
    with g.inserting_before(g.output_node()):
        return (*values, g.call_function(torch.neg, (values[0],)))


def negated(g: fx.Graph, values: tuple) -> tuple:
    return added(g, values)[::-1][:2]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda g, values: values[:1], "the pass left 1 of 2 outputs"),
        (lambda g, values: (), "the pass left 0 of 2 outputs"),
        (added, "the pass made 2 outputs 3"),
        (negated, "the pass changed an output"),
    ],
    ids=["loses one", "loses all", "adds one", "changes one"],
)
def test_a_pass_that_changes_the_outputs_is_refused(change, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_pass(returning(change), graph(), [torch.ones(2)])


def test_a_pass_may_add_outputs_where_that_is_what_it_is_for() -> None:
    run = returning(added)

    made = check_pass(
        run, graph(), [torch.ones(2)], idempotent=False, adds_outputs=True
    )

    assert len(made(torch.ones(2))) == 3
    with pytest.raises(AssertionError, match="the pass left 1 of 2 outputs"):
        check_pass(
            returning(lambda g, values: values[:1]),
            graph(),
            [torch.ones(2)],
            adds_outputs=True,
        )


def test_a_pass_that_says_it_changed_nothing_is_refused() -> None:
    def run(gm: fx.GraphModule) -> PassResult:
        returning(added)(gm)
        return PassResult(gm, modified=False)

    with pytest.raises(AssertionError, match="modified is not truthful"):
        check_pass(run, graph(), [torch.ones(2)], adds_outputs=True)


def test_a_pass_that_goes_on_changing_is_refused() -> None:
    with pytest.raises(AssertionError, match="a second run changes something"):
        check_pass(returning(added), graph(), [torch.ones(2)], adds_outputs=True)
