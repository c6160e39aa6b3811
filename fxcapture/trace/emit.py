"""How the marks of a call are handed on, wherever the code runs that makes them."""

from __future__ import annotations

from typing import Any

import torch

from fxcapture import _torch
from fxcapture.trace.mark import Emit, emit_mark, receiver
from fxcapture.trace.structure_text import encode

__all__ = ["deliver", "emit_result"]


@_torch.untraced
def emit_result(
    emit: Emit, token: torch.Tensor | None, value: Any, path: str, kind: str
) -> None:
    """Emit the mark that ends a call."""
    if isinstance(value, torch.Tensor):
        emit(token, [value], [], "T", path, kind)
    else:
        tensors: list[torch.Tensor] = []
        sizes: list[int] = []
        structure = encode(value, tensors, sizes)
        emit(token, tensors, sizes, structure, path, kind)


def deliver(
    emit: Emit | None,
    token: torch.Tensor | None,
    path: str,
    made: list[tuple[Any, str]],
) -> None:
    """Emit all marks of a call.

    Args:
        emit: Takes the marks; ``None``: the trace that this runs in, or where there is
            none, the call in flight.
        token: Stands for the module where one trace serves several.
        path: Path of the call.
        made: Each value with the kind of its mark; what ends the call is last.
    """
    if emit is None:
        # Asked here and not before: Dynamo may have traced the beginning of the call,
        # given up, and run the rest as it is.  All marks of a call go one way.
        if not _torch.is_traced():
            _torch.outside_dynamo(_hand_over, token, path, made)
            return
        emit = emit_mark
    for part, kind in made:
        emit_result(emit, token, part, path, kind)


def _hand_over(
    token: torch.Tensor | None, path: str, made: list[tuple[Any, str]]
) -> None:
    """Hand the marks of a call to the call in flight."""
    take = receiver.get()
    if take is not None:
        for part, kind in made:
            emit_result(take, token, part, path, kind)
