"""Marks for the function calls that are tapped, in a graph that Dynamo has traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from fxcapture import passes
from fxcapture.passes.analyses.direct_calls import forwards_inside
from fxcapture.plan.match import Match, reducers_of
from fxcapture.reductions import Reduction
from fxcapture.runtime.capture import Capture
from fxcapture.spec.module_table import ModuleTable
from fxcapture.trace.target import FunctionTarget

__all__ = ["mark_function_calls"]


def mark_function_calls(
    graph: fx.GraphModule,
    model: nn.Module,
    capture: Capture,
    bound: Match,
    whole: bool,
) -> None:
    """Mark what the records of a capture take of the calls inside of modules.

    Args:
        graph: A marked graph; edited.
        model: The model.
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
    table = ModuleTable(model)

    @functools.cache
    def code_of(path: str) -> Any:
        return forwards_inside(table.first[capture.representative(path)][1])

    passes.mark_functions(graph, functions, reducers, code_of=code_of)
