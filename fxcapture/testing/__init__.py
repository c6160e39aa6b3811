"""What tests of captured models, and of passes, are built on.

The reference is in ``reference``, the comparison with it in ``verification``; the check
of a pass is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxcapture.passes.base import PassResult, walk
from fxcapture.testing.reference import copied, eager_reference, map_tensors
from fxcapture.testing.verification import TOLERANCES as TOLERANCES
from fxcapture.testing.verification import Verification, assert_parity, verify

__all__ = [
    "Verification",
    "assert_parity",
    "check_pass",
    "eager_reference",
    "verify",
]


def check_pass(
    run: Callable[[fx.GraphModule], PassResult],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    idempotent: bool = True,
    adds_outputs: bool = False,
) -> fx.GraphModule:
    """Check a pass: lint clean, truthful ``modified``, same outputs, idempotent.

    Args:
        run: The pass, with everything but the graph module bound.
        graph_module: What to run it on; changed.
        inputs: Inputs to compare the outputs on.
        idempotent: Whether a second run has to change nothing.
        adds_outputs: Whether the pass is there to add outputs, behind those that the
            graph has; otherwise their number has to stay.

    Returns:
        The graph module after the pass.

    Raises:
        AssertionError: one of these does not hold.
    """
    before = _printed(graph_module)
    expected = graph_module(*copied(tuple(inputs)))
    result = run(graph_module)
    made = result.graph_module
    made.graph.lint()
    made.recompile()
    after = _printed(made)
    assert result.modified == (before != after), "modified is not truthful"
    got = made(*copied(tuple(inputs)))
    olds, news = _flat(expected), _flat(got)
    assert len(news) >= len(olds), f"the pass left {len(news)} of {len(olds)} outputs"
    assert adds_outputs or len(news) == len(olds), (
        f"the pass made {len(olds)} outputs {len(news)}"
    )
    for old, new in zip(olds, news, strict=False):  # what is added stands behind them
        assert torch.equal(old, new), "the pass changed an output"
    if idempotent:
        again = run(made)
        assert not again.modified, "a second run changes something"
        assert _printed(again.graph_module) == after, "a second run changes something"
    return made


def _printed(gm: fx.GraphModule) -> str:
    """A graph and its bodies as text."""
    owners = {id(owner): owner for owner, _, _ in walk(gm)}
    return "\n".join(str(owner.graph) for owner in owners.values())


def _flat(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found
