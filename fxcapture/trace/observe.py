"""What an override does in place of a module's ``forward``: call it, and emit marks.

Terms
    target: how one module is tapped, as constants that can stand in a trace.
    override: the function that stands in the instance's ``__dict__`` for the time of a
        scope.
    watched: the call runs under a function mode that sees its fused attention calls.
        Only where no pass of ours will see the graph; elsewhere the call's span is
        marked, and the pass finds them there.

Invariants
    Everything here is traced by Dynamo, or runs eagerly, alike; what a call of a plain
    target makes Dynamo trace is a few bytecodes, since most calls are such.
    A module with forward hooks has two overrides: one of ``forward``, and one behind
    the hooks, whose result is what the caller received.  They share no state, since a
    higher-order operator's body may not write to anything outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.reductions import Reducers
from fxcapture.spec.attention import Attention
from fxcapture.trace.attention import (
    FlexCall,
    FusedCall,
    WatchFused,
    attention_weights,
)
from fxcapture.trace.mark import (
    BEGIN,
    ENTRY,
    HOOKED,
    ORIGINAL,
    RESULT,
    Emit,
    emit_mark,
    received,
    receiver,
    reduced,
    weights,
)
from fxcapture.trace.signature import Parameters, argument
from fxcapture.trace.structure_text import encode
from fxcapture.trace.templates import copied, reduced_element

__all__ = ["Request", "Target", "emit_result", "find", "observed", "override_keys"]


class Request(NamedTuple):
    """A reduction that one record wants of a target.

    Attributes:
        record: The record's name.
        output: The tap's ``output``.
        entry: Which of the target's ``entries`` to reduce; -1 for none.
        result: Whether to reduce the result.
        each: Whether it takes one tensor, and so is given each of a container.
    """

    record: str
    output: int | str | None
    entry: int
    result: bool
    each: bool = True


class Target(NamedTuple):
    """How one module is tapped; constants only, so that it can stand in a trace.

    Attributes:
        path: The path the user sees; it names the site.
        real_path: Names to follow from the root to the module.
        key: What the scope overrides: ``"forward"``; ``"_call_impl"`` to see what the
            module's forward hooks return.
        parameters: The parameters of ``forward``.
        entries: Which of them to copy on entry, by position or name.
        requests: The reductions to compute.
        attention: The attention weights to compute, as (record, which part).
        drops: Keywords that the call is not handed.
    """

    path: str
    real_path: tuple[str, ...]
    key: str
    parameters: Parameters = Parameters((), (), True, True)
    entries: tuple[int | str, ...] = ()
    requests: tuple[Request, ...] = ()
    attention: tuple[tuple[str, Attention], ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the result of ``forward`` is wanted."""
        extra = self.entries or self.requests or self.attention or self.drops
        return self.key == "forward" and not extra


def find(model: nn.Module, target: Target) -> nn.Module:
    """The module a target means."""
    module = model
    for name in target.real_path:
        module = module._modules[name]  # type: ignore[assignment]
    return module


def override_keys(module: nn.Module) -> tuple[str, ...]:
    """Which attributes a scope overrides to see what the module's caller receives."""
    if _torch.has_forward_hooks(module):
        return ("forward", "_call_impl")
    return ("forward",)


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
    """
    path, _, key, parameters, entries, requests, attention, drops = target
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
    if attention and watched:
        calls: list[FusedCall | FlexCall] = []
        with WatchFused(calls):
            value = original(*args, **kwargs)
    else:
        if attention and (emit is not None or _torch.is_traced()):
            (emit or emit_mark)(token, [], [], "N", path, BEGIN)
        value = original(*args, **kwargs)
    # All is made before the first mark is emitted: a reduction may raise.
    made: list[tuple[Any, str]] = []
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
    if emit is None:
        # Asked here and not before: Dynamo may have traced the beginning of the call,
        # given up, and run the rest as it is.  All marks of a call go one way.
        if not _torch.is_traced():
            _torch.outside_dynamo(_hand_over, token, path, made)
            return value
        emit = emit_mark
    for part, kind in made:
        emit_result(emit, token, part, path, kind)
    return value


def _hand_over(
    token: torch.Tensor | None, path: str, made: list[tuple[Any, str]]
) -> None:
    """Hand the marks of a call to the call in flight."""
    take = receiver.get()
    if take is not None:
        for part, kind in made:
            emit_result(take, token, part, path, kind)
