"""The mark op, and the scope that puts marks behind module calls.

A *mark* is an operator without outputs that stands in a graph right behind one call of
one module and holds what the call returned.  A *scope* is the time in which the target
modules emit marks (or hand their values to a collector): on entry each target gets a
``forward`` of its own in the instance's ``__dict__``, on exit the key goes again.

Terms
    target: how one module is tapped, as constants (see :class:`Target`).
    observation: what one call produced: a structure, and its leaves.
    derived value: a tensor computed for the capture and not by the model: a copy of an
        input, taken when the module was entered, or a reduction.

Invariants
    The functions between ``enter`` and ``leave`` are traced by Dynamo.  There the set
    and the delete of the key are a net no-op: nothing is written to the module when the
    compiled code runs, no hook dictionary changes, no guard on hooks is added.  That
    holds for ``module.__dict__[key] = ...`` only; ``setattr`` would be replayed.
    Each call gives one mark, also a call that returned no tensor.
    A module with forward hooks gives two: one behind ``forward`` and a *hooked* one
    behind the hooks, whose result is what the caller received.  Two marks, and no state
    shared between the two overrides, since a higher-order operator's body may not write
    to anything outside of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import ElementError
from fxcapture.reductions import Reducers
from fxcapture.spec.attention import Attention
from fxcapture.trace.attention import FlexCall, FusedCall, WatchFused, attention_weights
from fxcapture.trace.structure import encode, parse

__all__ = [
    "MARK",
    "NoArgument",
    "Observation",
    "Reducers",
    "Request",
    "Target",
    "describe_forward",
    "emit_mark",
    "enter",
    "find",
    "has_forward",
    "leave",
    "observe",
    "observe_any",
    "override_keys",
]

# torch.library has no annotations: what is called of it is untyped.
_LIBRARY: Any = torch.library.Library("fxcapture", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "mark(Tensor? token, Tensor[] result, Tensor[] derived, SymInt[] sizes, "
    "SymInt[] entry_sizes, str structure, str entries, str path, bool hooked) -> ()"
)


def _no_op(
    token: torch.Tensor | None,
    result: Sequence[torch.Tensor],
    derived: Sequence[torch.Tensor],
    sizes: Sequence[int],
    entry_sizes: Sequence[int],
    structure: str,
    entries: str,
    path: str,
    hooked: bool,
) -> None:
    """A mark that was not turned into a tap does nothing."""


# CompositeExplicitAutograd and not CompositeImplicitAutograd: tracers must see the op.
_LIBRARY.impl("mark", _no_op, "CompositeExplicitAutograd")
torch.library.register_fake("fxcapture::mark", _no_op, lib=_LIBRARY)
# Under vmap a mark observes what it would without: it computes nothing.
torch.library.register_vmap(
    "fxcapture::mark", lambda info, in_dims, *args: (None, None), lib=_LIBRARY
)
MARK = torch.ops.fxcapture.mark.default
torch.fx.node.has_side_effect(MARK)


class Request(NamedTuple):
    """A reduction that one record wants of a target.

    Attributes:
        record: The record's name.
        output: The tap's ``output``.
        entry: Which of the target's ``entries`` to reduce, or behind them which of its
            ``attention``; -1 for none.
        result: Whether to reduce the result.
    """

    record: str
    output: int | str | None
    entry: int
    result: bool


class Target(NamedTuple):
    """How one module is tapped; constants only, so that it can stand in a trace.

    Attributes:
        path: The path the user sees; it names the site.
        real_path: Names to follow from the root to the module.
        key: What the scope overrides: ``"forward"``; ``"_call_impl"`` to see what the
            module's forward hooks return.
        entries: Parameters of ``forward`` to copy on entry, by position or name.
        names: Parameter names of ``forward``, in order.
        defaults: Their default values, where they are plain constants.
        requests: The reductions to compute.
        attention: Which attention weights to compute, of each fused call it makes.
        positional: How many of ``names`` may be passed by position.
    """

    path: str
    real_path: tuple[str, ...]
    key: str
    entries: tuple[int | str, ...]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    requests: tuple[Request, ...]
    attention: tuple[Attention, ...] = ()
    positional: int = 0


class Observation(NamedTuple):
    """What one call produced.

    The fields are the mark op's arguments, in their order.

    Attributes:
        token: Stands for the module where one graph serves several of them; the path is
            then that of their group.
        result: Tensor leaves of the result; the model's own, not copied.
        derived: Tensor leaves of the entries, copied on entry, then attention weights,
            then the reductions.
        sizes: Integer leaves of the result.
        entry_sizes: Integer leaves of the entries.
        structure: Structure of the result, see :mod:`fxcapture.trace.structure`.
        entries: Structure of the copied arguments, a tuple; behind them, for each of
            the
            target's ``attention``, a tuple of the weights of each fused call.
        path: The module's path.
        hooked: The result is what the forward hooks made of a call that has just given
            an observation of its own.
    """

    token: torch.Tensor | None
    result: list[torch.Tensor]
    derived: list[torch.Tensor]
    sizes: list[int]
    entry_sizes: list[int]
    structure: str
    entries: str
    path: str
    hooked: bool


#: Receives the fields of an :class:`Observation`, in their order.  Not an object, which
#: Dynamo would trace the making of, and the taking apart.
Emit = Callable[..., None]
#: Says of a call outside of every graph, by its module's token, whether what it got has
#: to be copied.
Asks = Callable[[torch.Tensor], bool]
#: What ``enter`` changed: (dictionary, key, whether it was there, what was there).
Saved = list[tuple[dict[str, Any], str, bool, Any]]

#: Puts a mark into the graph that is being traced.
emit_mark: Emit = torch.ops.fxcapture.mark


def enter(
    model: nn.Module, targets: Sequence[Target], emit: Emit, reducers: Reducers
) -> Saved:
    """Make each target hand an observation of each of its calls to ``emit``."""
    saved: Saved = []
    for target in targets:
        module = find(model, target)
        key = target.key
        slot = module.__dict__
        saved.append((slot, key, key in slot, slot.get(key)))
        slot[key] = observe(getattr(module, key), target, emit, reducers)
    return saved


def find(model: nn.Module, target: Target) -> nn.Module:
    """The module a target means."""
    module = model
    for name in target.real_path:
        # Dynamo sees through torch.compile's wrapper: to it, wrapper and wrapped module
        # are one object.
        if name == "_orig_mod" and torch.compiler.is_dynamo_compiling():
            continue
        module = module._modules[name]  # type: ignore[assignment]
    return module


def leave(saved: Saved) -> None:
    """Undo ``enter``; in reverse, since one module may stand in the list twice.

    Dynamo loses the undoing where it has traced the body of a conditional or a loop in
    between: it goes back to what it knew before the body, and the dictionary that is
    written here is not the one it replays (torch 2.13 and 2.14).  Whoever traces a
    scope has to look for such operators, see ``passes.forgets_overrides``.
    """
    for slot, key, present, value in reversed(saved):
        if present:
            slot[key] = value
        else:
            del slot[key]


def observe(
    original: Callable[..., Any], target: Target, emit: Emit, reducers: Reducers
) -> Callable[..., Any]:
    """``original``, which then hands an :class:`Observation` to ``emit``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _observed(original, args, kwargs, target, None, emit, reducers)

    return forward


def restore_left_behind(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """Undo overrides that a traced scope has left in the instances.

    It should leave none.  What Dynamo makes of a scope depends on everything that is
    traced between its ends, so whoever runs new code of Dynamo's looks once.

    Returns:
        Paths of the modules where one was left.
    """
    found = []
    for target in targets:
        slot = find(model, target).__dict__
        left: Any = slot.get(target.key)
        if getattr(left, "__code__", None) is _OVERRIDE_CODE:
            names = left.__code__.co_freevars
            cells = dict(zip(names, left.__closure__, strict=True))
            original = cells["original"].cell_contents
            found.append(target.path)
            if getattr(original, "__self__", None) is find(model, target):
                del slot[target.key]
            else:
                slot[target.key] = original
    return found


_OVERRIDE_CODE = observe(
    len, Target("", (), "forward", (), (), (), ()), emit_mark, {}
).__code__


def observe_any(
    original: str,
    token: str,
    target: Target,
    emit: Emit,
    reducers: Reducers,
    seen: Emit,
    asks: Asks,
    runs: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The same as a method that serves every module of one group.

    It says nothing of the module it is bound to: what it calls and which module it is,
    it reads from two attributes of the instance.  So Dynamo compiles a block once and
    runs that code for each block of its kind; the token, a tensor, is an input of it.

    Args:
        original: Attribute that holds what the override stands for.
        token: Attribute that holds the module's token.
        target: Its path names the group.
        emit: Receives the observations in a trace.
        reducers: Record name to its reduction.
        seen: Receives those of calls outside of every graph.
        asks: Asked outside of graphs what is wanted of the call.
        runs: Outside of graphs, makes the call: (the module's class, what the override
            stands for, *args, **kwargs).
    """
    takes = bool(target.entries)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        inner, own = getattr(self, original), getattr(self, token)
        if _torch.is_traced():
            return _observed(inner, args, kwargs, target, own, emit, reducers)
        copies = takes and asks(own)
        if runs is not None:
            inner = functools.partial(runs, type(self), inner)
        return _observed(inner, args, kwargs, target, own, seen, reducers, copies)

    return forward


def _observed(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target,
    token: torch.Tensor | None,
    emit: Emit,
    reducers: Reducers,
    copies: bool = True,
) -> Any:
    path, _, key, wanted_entries, _, _, requests, attention, _ = target
    derived: list[torch.Tensor] = []
    reduced: list[torch.Tensor] = []
    entry_sizes: list[int] = []
    entries = "t()"
    if wanted_entries:
        bound = tuple([_argument(target, e, args, kwargs) for e in wanted_entries])
        seen: list[torch.Tensor] = []
        # What most calls take and return is not worth tracing ``encode`` for.
        if len(bound) == 1 and isinstance(bound[0], torch.Tensor):
            seen.append(bound[0])
            entries = "t(T)"
        else:
            entries = encode(bound, seen, entry_sizes)
        # Copied now: the module may write to its input before it returns.
        derived = [t.clone() for t in seen] if copies else seen
        if not (copies or requests or attention):
            derived = []
        for request in requests:
            if 0 <= request.entry < len(wanted_entries):
                for i in entry_leaves(entries, request.entry):
                    reduced.append(reducers[request.record](derived[i]))
    if attention:
        calls: list[FusedCall | FlexCall] = []
        with WatchFused(calls):
            value = original(*args, **kwargs)
        entries = with_attention(entries, len(attention), len(calls))
        for wanted in attention:
            derived = derived + [attention_weights(call, wanted) for call in calls]
        for request in requests:
            if request.entry >= len(wanted_entries):
                for i in entry_leaves(entries, request.entry):
                    reduced.append(reducers[request.record](derived[i]))
    else:
        value = original(*args, **kwargs)
    result: list[torch.Tensor] = []
    sizes: list[int] = []
    if isinstance(value, torch.Tensor):
        result.append(value)
        structure = "T"
    else:
        structure = encode(value, result, sizes)
    for request in requests:
        if request.result:
            for i in element_leaves(structure, request.output):
                reduced.append(reducers[request.record](result[i]))
    if reduced:
        derived = derived + reduced
    hooked = key == "_call_impl"
    emit(token, result, derived, sizes, entry_sizes, structure, entries, path, hooked)
    return value


class NoArgument:
    """Stands for an argument of a call that cannot be told, or does not exist."""


_NO_ARGUMENT = NoArgument()


def _argument(
    target: Target, which: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One argument of a call, however it was passed, or its default."""
    if isinstance(which, int):
        if which < len(args):
            return args[which]
        if which >= len(target.names):
            return _NO_ARGUMENT
        name = target.names[which]
    else:
        name = which
    if name in kwargs:
        return kwargs[name]
    if name not in target.names:
        return _NO_ARGUMENT
    position = target.names.index(name)
    if position < len(args) and position < target.positional:
        return args[position]
    return target.defaults[position]


@_torch.constant
def element_leaves(text: str, output: int | str | None) -> tuple[int, ...]:
    """Tensor leaves of the element ``output``; none where it does not exist.

    The plan raises the error for a missing element, with the record's name in it.
    """
    try:
        return tuple(parse(text).element(output, "the output").leaves("tensor"))
    except ElementError:
        return ()


@_torch.constant
def entry_leaves(text: str, entry: int) -> tuple[int, ...]:
    """Tensor leaves of one of the copied arguments."""
    return tuple(parse(text).children[entry].leaves("tensor"))


@_torch.constant
def with_attention(entries: str, num_wanted: int, num_calls: int) -> str:
    """The structure of the entries with that of the attention weights behind them."""
    own = entries.removeprefix("t(").removesuffix(")")
    weights = "t(" + ",".join(["T"] * num_calls) + ")"
    return "t(" + ",".join(([own] if own else []) + [weights] * num_wanted) + ")"


class Parameters(NamedTuple):
    """What a ``forward`` takes.

    Attributes:
        names: Its named parameters, in order.
        defaults: Their default values; ``None`` for one that is no plain constant.
        takes_more: It has ``*args``.
        takes_named: It has ``**kwargs``.
        positional: How many of ``names`` may be passed by position: the first ones.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    takes_more: bool
    takes_named: bool
    positional: int = 0


def describe_forward(module: nn.Module) -> Parameters:
    """The parameters of a module's ``forward``.

    A library that puts a ``forward(*args, **kwargs)`` of its own into the instance
    hides them; then those of the class's ``forward`` are meant.
    """
    found = _parameters_of(module.forward)
    if not found.names and found.takes_more and "forward" in module.__dict__:
        behind = _parameters_of(getattr(type(module), "forward", None), skip=1)
        found = behind if behind.names else found
    return found


def _parameters_of(function: Any, skip: int = 0) -> Parameters:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):  # builtin or scripted: no signature to read
        return Parameters((), (), True, True)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    plain = (bool, int, float, str)
    return Parameters(
        tuple(p.name for p in named),
        tuple(p.default if isinstance(p.default, plain) else None for p in named),
        any(p.kind is p.VAR_POSITIONAL for p in parameters),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        sum(p.kind is not p.KEYWORD_ONLY for p in named),
    )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a container such as ``ModuleList`` cannot."""
    if "forward" in module.__dict__:
        return True
    # Through the class dictionaries: a scripted module's ``forward`` is a descriptor
    # that works on instances only.
    owner = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    return owner is not nn.Module


def override_keys(module: nn.Module) -> tuple[str, ...]:
    """Which attributes a scope overrides to see what the module's caller receives."""
    if _torch.has_forward_hooks(module):
        return ("forward", "_call_impl")
    return ("forward",)
