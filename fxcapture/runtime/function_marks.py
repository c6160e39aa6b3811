"""Marks for the function calls that are tapped, in a graph that Dynamo has traced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxcapture import passes
from fxcapture.plan.match import Match, reducers_of
from fxcapture.reductions import Reduction
from fxcapture.runtime.capture import Capture
from fxcapture.trace.target import FunctionTarget

__all__ = ["mark_function_calls"]


def mark_function_calls(
    graph: fx.GraphModule, capture: Capture, bound: Match, whole: bool
) -> None:
    """Mark what the records of a capture take of the calls inside of modules.

    Args:
        graph: A marked graph; edited.
        capture: The capture.
        bound: Its spec bound to the model.
        whole: The graph is the whole run.  A piece does not see the call's inputs:
            what they reduce is reduced behind it.
    """
    if not bound.functions:
        return

    def functions(path: str) -> Sequence[FunctionTarget]:
        return bound.functions.get(capture.representative(path), ())

    reducers = {
        name: (lambda value: value)
        if isinstance(reduce, Reduction) and reduce.source is not None and not whole
        else reduce
        for name, reduce in reducers_of(capture.spec).items()
    }
    passes.mark_functions(graph, functions, reducers)
