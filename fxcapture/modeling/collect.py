"""Collecting values of module calls while one decorated call runs.

Terms
    store: the entries of one record of one decorated call, in call order.
    collector: the stores of one decorated call.
    override: a function in a module's instance ``__dict__`` under ``forward``,
        ``_call_impl`` or ``_compiled_call_impl``, which hands what the call returned to
        a collector.

Invariants
    Only wanted entries are kept; an unwanted one is ``None`` and its tensor is free.
    Entries are kept by value: a later in-place write does not show.
    The functions here are traced by Dynamo.  There the overrides are put on and taken
    off in the traced code itself, where that is a net no-op; each is bound to the one
    collector of the trace.  What eager runs do is in ``dispatch``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import ElementError
from fxcapture.spec.attention import Attention
from fxcapture.spec.declaration import Found, holds_weights, is_decorated
from fxcapture.trace.attention import FlexCall, FusedCall, WatchFused, attention_weights

__all__ = [
    "Collector",
    "Store",
    "begin",
    "count",
    "enter_traced",
    "finish",
    "leave_traced",
    "refinish",
    "trace_plan",
    "watches",
    "without_flag",
]

#: One module of a trace: (path to it, keys to override, first parameter, tasks,
#: whether its kernel gives no weights).
Seat = tuple[
    tuple[str, ...], tuple[str, ...], str, tuple[tuple[str, int, bool], ...], bool
]
_Saved = list[tuple[dict[str, Any], str, bool, Any]]


class RecordedElementError(ElementError, IndexError):
    """A recorder's index that the module's output does not have."""


def by_value(value: Any) -> Any:
    """``value`` with its tensors copied; autograd flows through the copies."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is tuple:
        return tuple([by_value(v) for v in value])
    if type(value) is list:
        return [by_value(v) for v in value]
    if type(value) is dict:
        return {k: by_value(v) for k, v in value.items()}
    return value


@final
class Store:
    """The entries of one record, in call order.

    Args:
        wanted: Positions to keep; ``None`` keeps every entry.
        late: Negative positions that only the number of calls can resolve.
        expected: With ``late``, the number of entries that the config promises.
    """

    def __init__(
        self, wanted: frozenset[int] | None, late: frozenset[int], expected: int = -1
    ) -> None:
        self.wanted = wanted
        self.late = late
        self.expected = expected
        self.window = -min(late) if late else 0
        self.entries: list[Any] = []
        self.any_value = False
        # Position -> (the tensor the module returned, its version), see ``settle``.
        self.originals: dict[int, tuple[Any, int]] = {}

    def behind(self, entries: int) -> Store:
        """An empty store that has seen this many entries."""
        store = Store(self.wanted, self.late, self.expected)
        store.entries = [None] * entries
        return store

    def wants_next(self) -> bool:
        """Whether the next entry has to be kept."""
        return (
            self.wanted is None or self.window > 0 or len(self.entries) in self.wanted
        )

    def add(self, value: Any) -> None:
        """Append what a module returned."""
        kept = None
        if value is not None and self.wants_next():
            kept = by_value(value)
            self.remember(value)
        self.put(value is not None, kept)

    def put(self, is_value: bool, kept: Any) -> None:
        """Append an entry that has been copied already, or is not wanted."""
        self.entries.append(kept)
        self.any_value = self.any_value or is_value
        gone = len(self.entries) - 1 - self.window
        if self.window and gone >= 0 and gone not in (self.wanted or ()):
            self.entries[gone] = None
            self.originals.pop(gone, None)

    def replace_last(self, value: Any) -> None:
        """Put what the forward hooks made of the last entry in its place."""
        if self.entries[-1] is not None:
            self.entries[-1] = None  # free it before the next copy is made
            self.entries[-1] = by_value(value)
            self.originals.pop(len(self.entries) - 1, None)

    def remember(self, value: Any) -> None:
        """Note the module's own tensor, without keeping it alive."""
        if (
            not torch.compiler.is_dynamo_compiling()
            and isinstance(value, torch.Tensor)
            and value.grad_fn is not None
        ):
            position = len(self.entries)
            self.originals[position] = (weakref.ref(value), value._version)

    def settle(self) -> list[Any]:
        """The entries, at the end of the call.

        While autograd records, the module's own tensor stands in for its copy if it is
        still alive and nothing wrote to it: so gradients of a record can be retained,
        as they can with a forward hook.
        """
        if self.late:
            n = len(self.entries)
            keep = {n + i for i in self.late if n + i >= 0}
            self.entries = [
                e if p in keep or p in (self.wanted or ()) else None
                for p, e in enumerate(self.entries)
            ]
        for position, (ref, version) in self.originals.items():
            tensor = ref()
            if (
                tensor is not None
                and tensor._version == version
                and self.entries[position] is not None
            ):
                self.entries[position] = tensor
        return self.entries


@final
class Collector:
    """The stores of one decorated call."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        # Under Dynamo a nested decorated call silences the outer collector so; in an
        # eager run a context variable does.
        self.listening = True

    def anew(self) -> Callable[[], Collector]:
        """Makes collectors that take up where this one is now, and hold no value."""
        seen = [(n, s.behind(0), len(s.entries)) for n, s in self.stores.items()]

        def made() -> Collector:
            collector = Collector()
            collector.stores = {name: empty.behind(n) for name, empty, n in seen}
            return collector

        return made


def begin(
    collector: Collector,
    tasks: Sequence[tuple[str, int, bool]],
    first: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Before the call: a copy of its first argument, if that is wanted.

    Copied now, since the module may write to its input before it returns.
    """
    for record, _, initial in tasks:
        if initial:
            store = collector.stores[record]
            if not store.entries and store.wants_next():
                value = _first_argument(first, args, kwargs)
                store.remember(value)
                return by_value(value)
    return None


def watches(collector: Collector, tasks: Sequence[tuple[str, int, bool]]) -> bool:
    """Whether fused attention has to be watched, since a module may return no weights.

    It costs a look at every call of torch's, so only where weights are wanted.
    """
    for record, _, _ in tasks:
        if holds_weights(record) and collector.stores[record].wants_next():
            return True
    return False


def without_flag(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module whose kernel gives no weights, asked for none.

    transformers hands the flag on to the kernel's wrapper, which only warns that it
    cannot do it, in a way that Dynamo does not trace.
    """
    return {k: v for k, v in kwargs.items() if k != "output_attentions"}


def finish(
    collector: Collector,
    tasks: Sequence[tuple[str, int, bool]],
    start: Any,
    value: Any,
    calls: Sequence[FusedCall | FlexCall] = (),
) -> None:
    """Behind the call: record of what it returned.

    Args:
        collector: Receives it.
        tasks: What to record of the module.
        start: What ``begin`` returned.
        value: What the module returned.
        calls: The fused calls that it made.  Where it returned no attention weights and
            made one of them, its weights are recorded.
    """
    for record, index, initial in tasks:
        store = collector.stores[record]
        if initial and not store.entries:
            store.put(True, start)
        element = _element(record, index, value)
        if element is None and len(calls) == 1 and holds_weights(record):
            wanted = store.wants_next()
            store.put(True, attention_weights(calls[0], _ALL) if wanted else None)
        else:
            store.add(element)


_ALL = Attention()


def count(collector: Collector, tasks: Sequence[tuple[str, int, bool]]) -> list[int]:
    """How many entries each record has."""
    return [len(collector.stores[record].entries) for record, _, _ in tasks]


def refinish(
    collector: Collector,
    tasks: Sequence[tuple[str, int, bool]],
    before: list[int],
    value: Any,
) -> None:
    """Behind the forward hooks: what the caller gets replaces what was recorded."""
    for (record, index, _), entries in zip(tasks, before, strict=True):
        store = collector.stores[record]
        element = _element(record, index, value)
        if element is None and holds_weights(record):
            continue  # what was recorded are the kernel's weights, if anything
        if len(store.entries) > entries:
            store.replace_last(element)


def _first_argument(first: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    if first in kwargs:
        return kwargs[first]
    return next(iter(kwargs.values())) if kwargs and not first else None


def _element(record: str, index: int, value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if -len(value) <= index < len(value):
        return value[index]
    raise RecordedElementError(
        f"index={index} of the recorder of {record!r} does not exist",
        why=f"the module returned a tuple of {len(value)} elements",
        remedy="declare OutputRecorder(..., index=) with an element that it returns",
    )


# ---------------------------------------------------------------- under Dynamo


def trace_plan(found: Sequence[Found], model: nn.Module) -> tuple[Seat, ...]:
    """``found`` as constants that may stand in a trace.

    A seat without tasks is a nested sub-model that captures for itself: while it runs,
    the outer collector does not listen, and it returns an output object whatever its
    config says.
    """
    seats: list[Seat] = []
    owners = {id(t.owner) for t in found if t.owner is not None}
    for name, module in model.named_modules():
        config = getattr(module, "config", None) if module is not model else None
        converts = getattr(config, "return_dict", None) is False
        if id(module) in owners or (converts and is_decorated(type(module).forward)):
            steps = tuple(n for n in name.split(".") if n != "_orig_mod")
            seats.append((steps, ("forward",), "", (), False))
    for target in found:
        hooked = _torch.has_forward_hooks(target.module)
        seats.append(
            (
                # Dynamo takes a wrapper that torch.compile made for what it wraps.
                tuple(n for n in target.real_path if n != "_orig_mod"),
                ("forward", "_call_impl") if hooked else ("forward",),
                target.first,
                tuple((t.record, t.element, t.initial) for t in target.tasks),
                target.fused,
            )
        )
    return tuple(seats)


def enter_traced(  # traced, never executed
    model: nn.Module, seats: Sequence[Seat], collector: Collector
) -> _Saved:
    """Put an override on each seat; traced by Dynamo, in its plainest Python."""
    saved: _Saved = []
    for path, keys, first, tasks, fused in seats:
        module = model
        for name in path:
            module = module._modules[name]  # type: ignore[assignment]
        slot = module.__dict__
        for key in keys:
            original = getattr(module, key)
            saved.append((slot, key, key in slot, slot.get(key)))
            if not tasks:
                slot[key] = _nested(collector, original)
            elif key == "forward":
                slot[key] = _recording(collector, tasks, first, fused, original)
            else:
                slot[key] = _rerecording(collector, tasks, original)
    return saved


def leave_traced(saved: _Saved) -> None:  # traced, never executed
    """Undo ``enter_traced``."""
    for slot, key, present, value in reversed(saved):
        if present:
            slot[key] = value
        else:
            del slot[key]


def _nested(  # traced, never executed
    collector: Collector, original: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_dict") is None:
            kwargs["return_dict"] = True
        listening = collector.listening
        collector.listening = False
        value = original(*args, **kwargs)
        collector.listening = listening
        return value

    return forward


def _recording(  # traced, never executed
    collector: Collector,
    tasks: Sequence[tuple[str, int, bool]],
    first: str,
    fused: bool,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if collector.listening:
            start = begin(collector, tasks, first, args, kwargs)
            if fused:
                kwargs = without_flag(kwargs)
            calls: list[FusedCall | FlexCall] = []
            if watches(collector, tasks):
                with WatchFused(calls):
                    value = original(*args, **kwargs)
            else:
                value = original(*args, **kwargs)
            finish(collector, tasks, start, value, calls)
            return value
        return original(*args, **kwargs)

    return forward


def _rerecording(  # traced, never executed
    collector: Collector,
    tasks: Sequence[tuple[str, int, bool]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if collector.listening:
            before = count(collector, tasks)
            value = original(*args, **kwargs)
            refinish(collector, tasks, before, value)
            return value
        return original(*args, **kwargs)

    return call
