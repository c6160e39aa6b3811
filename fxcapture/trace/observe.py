"""What an override does in place of a module's ``forward``: call it, and emit marks.

Terms
    target: how one module is tapped, as constants that can stand in a trace.
    override: the function that stands in the instance's ``__dict__`` for the time of a
        scope.
    watched: the call runs under a function mode that sees its fused attention calls.
        Only where no pass of ours will see the graph; elsewhere the call's span is
        marked, and the pass finds them there.
    heard: the same of the function calls inside of it, see ``trace.listen``.

Invariants
    Everything here is traced by Dynamo, or runs eagerly, alike; what a call of a plain
    target makes Dynamo trace is a few bytecodes, since most calls are such.
    A module with forward hooks has two overrides: one of ``forward``, and one behind
    the hooks, whose result is what the caller received.  They share no state, since a
    higher-order operator's body may not write to anything outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxcapture import _torch
from fxcapture.reductions import Reducers
from fxcapture.trace.attention import (
    FlexCall,
    FusedCall,
    WatchFused,
    attention_weights,
)
from fxcapture.trace.emit import deliver
from fxcapture.trace.listen import Listen
from fxcapture.trace.mark import (
    BEGIN,
    CALLS,
    ENTRY,
    HOOKED,
    ORIGINAL,
    RESULT,
    RETURNED,
    Emit,
    emit_mark,
    received,
    reduced,
    weights,
)
from fxcapture.trace.signature import argument
from fxcapture.trace.structure_text import encode
from fxcapture.trace.target import FunctionTarget, Target
from fxcapture.trace.templates import copied, reduced_element

__all__ = ["observed", "observed_unheard", "observer"]


def observed(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target,
    token: torch.Tensor | None,
    emit: Emit | None,
    reducers: Reducers,
    watched: bool,
    copies: bool = True,
    originals: bool = False,
    listens: bool = False,
) -> Any:
    """Call ``original``, and emit all the marks that a target asks for.

    Args:
        original: What the override stands for.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        target: How the module is tapped.
        token: Stands for the module where the override serves several.
        emit: Takes the marks; ``None``: the trace that this runs in, or where there is
            none, the call in flight.
        reducers: Record name to its reduction.
        watched: Compute attention weights here.
        copies: ``False`` where no record can select what the call receives.
        originals: Also emit what it receives as it is; where nothing is traced.
        listens: Mark the function calls inside of it here.
    """
    (path, _, key, parameters, entries, requests, attention, drops, functions,
     silent) = target  # fmt: skip
    if silent:
        return original(*args, **kwargs)
    hooked = key == "_call_impl"
    taken: list[Any] = []
    received_as_is: list[torch.Tensor] = []
    versions: list[int] = []
    if entries:
        taken = [argument(parameters, e, args, kwargs) for e in entries]
        if originals and copies:
            encode(tuple(taken), received_as_is, [])
            versions = [_torch.version_of(t) for t in received_as_is]
        if copies:
            # Copied now: the module may write to its input before it returns.
            taken = [copied(a) for a in taken]
    if drops:
        kwargs = {k: v for k, v in kwargs.items() if k not in drops}
    # All is made before the first mark is emitted: a reduction may raise.
    made: list[tuple[Any, str]] = []
    calls: list[FusedCall | FlexCall] = []
    spanned = (attention and not watched) or (functions and not listens)
    spanned = spanned and (emit is not None or _torch.is_traced())
    if spanned:
        (emit or emit_mark)(token, [], [], "N", path, BEGIN)
    if functions and listens:
        value, names = _heard(
            original, args, kwargs, path, functions, token, emit, reducers,
            calls if attention and watched else None,
        )  # fmt: skip
        made.append((names, CALLS))
    elif attention and watched:
        with WatchFused(calls):
            value = original(*args, **kwargs)
    else:
        value = original(*args, **kwargs)
    if spanned and functions and requests:
        (emit or emit_mark)(token, [], [], "N", path, RETURNED)
    if entries and copies:
        made.append((tuple(taken), ENTRY))
        for record, _, entry, _, each in requests:
            if entry >= 0:
                part = reduced_element(reducers[record], taken[entry], None, each)
                made.append((part, received(record)))
    if attention and watched:
        for record, which in attention:
            found = [attention_weights(call, which) for call in calls]
            if record in reducers and len(found) == 1:
                found = [reducers[record](found[0])]
            made.append((tuple(found), weights(record)))
    for record, output, _, result, each in requests:
        if result:
            part = reduced_element(reducers[record], value, output, each)
            made.append((part, reduced(record)))
    if received_as_is and emit is not None:
        emit(token, received_as_is, versions, "N", path, ORIGINAL)
    made.append((value, HOOKED if hooked else RESULT))
    deliver(emit, token, path, made)
    return value


def _heard(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    functions: tuple[FunctionTarget, ...],
    token: torch.Tensor | None,
    emit: Emit | None,
    reducers: Reducers,
    calls: list[FusedCall | FlexCall] | None,
) -> tuple[Any, str]:
    """Call ``original`` and mark the function calls inside of it.

    ``calls`` receives its fused attention calls; the rest as in :func:`observed`.

    Returns:
        What it returned, and the names of the functions called, with spaces between.
    """
    listener = Listen(path, functions, token, emit, reducers)
    with listener:
        if calls is None:
            value = original(*args, **kwargs)
        else:
            with WatchFused(calls):
                value = original(*args, **kwargs)
    return value, " ".join(listener.names)


def observed_unheard(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target,
    token: torch.Tensor | None,
    emit: Emit | None,
    reducers: Reducers,
    watched: bool,
    copies: bool = True,
    originals: bool = False,
) -> Any:
    """Like :func:`observed`, where listeners stand around the call.

    Neither what the call computes itself nor what is computed for records is a function
    call of the module around.
    """
    with Listen(target[0], (), None, None, reducers):
        return observed(
            original, args, kwargs, target, token, emit, reducers, watched, copies,
            originals, True,
        )  # fmt: skip


def observer(target: Target, listens: bool) -> Callable[..., Any]:
    """The function that observes the calls of a target.

    Args:
        target: How the module is tapped.
        listens: No pass of ours finds the function calls that are tapped.
    """
    heard = listens and target[8] is not None
    return observed_unheard if heard else observed
