"""The functions that Dynamo is given to trace.

Invariants
    What Dynamo compiles it keeps under the code object, so that each program makes a
    copy with code of its own (``_torch.own_code``); none of these is compiled itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxcapture.reductions import Reducers, bind_inputs
from fxcapture.trace.mark import emit_mark, input_named
from fxcapture.trace.scope import enter, leave

__all__ = ["NotTracedError", "call_function", "call_model", "whole_function"]


class NotTracedError(Exception):
    """Dynamo ran a function that is there to be traced, and nothing has run yet.

    So it does under a dispatch mode, and where the user has told it to compile nothing.
    """


def whole_function(
    model: nn.Module,
    steps: Callable[[], Any],
    reducers: Reducers,
    late: Sequence[str],
    keep_output: bool,
) -> Callable[..., Any]:
    """A function that calls the model with marks, and leaves no trace of them on it.

    It takes the inputs of reductions, by name or ``None``, and the model's arguments.

    Args:
        model: The model.
        steps: Gives the way to the targets, see ``trace.scope.way_to``.
        reducers: Record name to its reduction.
        late: The inputs that a pass has to find in the graph.
        keep_output: Whether to return the model's output, or ``None``.
    """

    def captured(inputs: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NotTracedError  # what follows is traced, never executed
        saved = enter(model, steps(), emit_mark, bind_inputs(reducers, inputs))
        for name in late:
            given = [] if inputs[name] is None else [inputs[name]]
            emit_mark(None, given, [], "N", "", input_named(name))
        try:
            output = model(*args, **kwargs)
        finally:
            leave(saved)
        return output if keep_output else None

    return captured


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model whose overrides stand in its instances."""
    return model(*args, **kwargs)


def call_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call what a region runs."""
    return function(*args, **kwargs)
