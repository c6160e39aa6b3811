"""Collecting in eager runs: overrides that any number of threads share.

Terms
    dispatcher: an override on a module that belongs to no run; it asks the running
        thread for its collector.
    place: (identity of a module, key of the override).
    duty: what one run wants at one place.

Invariants
    When no decorated call runs, no dispatcher stands on any module.  How many runs need
    one is counted under a lock; the last one takes it off.
    A model that is also traced is never captured eagerly while a thread traces it, and
    there hooks that last for the call take the overrides' place: Dynamo's guards do not
    look at them, so that compiled code which another thread runs stays valid.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture._torch import constant, no_tracing
from fxcapture._torch.dynamo_for_decorators import end_piece, outside_dynamo, untraced
from fxcapture.modeling.collect import (
    Collector,
    begin,
    count,
    finish,
    refinish,
    watches,
    without_flag,
)
from fxcapture.spec.declaration import Found, Task
from fxcapture.trace.attention import FlexCall, FusedCall, WatchFused

__all__ = ["collect_from", "is_collecting", "make_way_for_tracing", "silence"]

_Place = tuple[int, str]
#: How long a trace waits for eager captures of the same model that are under way.
_PATIENCE_S = 10.0


@final
class _Duty:
    """What one eager run does at one override.

    Attributes:
        tasks: What to record; may be empty.
        first: Name of the first parameter of the module's ``forward``.
        instead: What to call in place of a block that was compiled by itself, because
            a value inside of it is wanted.
        fused: Its attention kernel returns no weights.
    """

    def __init__(
        self,
        tasks: tuple[Task, ...] = (),
        first: str = "",
        instead: Callable[..., Any] | None = None,
    ) -> None:
        self.fused = False
        self.tasks = tasks
        self.first = first
        self.instead = instead


#: The key of a place where real hooks stand in for an override.
_HOOKS = "hooks"


@final
class _Installed:
    """A dispatcher that stands on a module, and how many runs need it."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module = module
        self.key = key
        self.runs = 0
        self.handles: list[Any] = []
        if key == _HOOKS:
            before, after = _hooks((id(module), key))
            self.handles = [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
            return
        self.present = key in module.__dict__
        self.previous = module.__dict__.get(key)
        self.dispatcher = _dispatcher((id(module), key), getattr(module, key))
        module.__dict__[key] = self.dispatcher

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        # Whoever replaced the dispatcher during the run keeps what was put there; it
        # wraps a dispatcher that finds no session from now on.
        if self.handles or self.module.__dict__.get(self.key) is not self.dispatcher:
            return
        if self.present:
            self.module.__dict__[self.key] = self.previous
        else:
            del self.module.__dict__[self.key]


@final
class _Session:
    """One eager run that collects.

    Args:
        collector: Receives the values.
        found: The modules to record of.
        quiet: Stay out of sight of Dynamo's guards.  They look at the instance
            dictionary, and by default not at hooks; the price is that
            ``child.forward(...)`` is not seen.
    """

    def __init__(
        self, collector: Collector, found: Sequence[Found], *, quiet: bool
    ) -> None:
        self.collector = collector
        self._found = found
        self.duties: dict[_Place, _Duty] = {}
        self.modules: dict[_Place, nn.Module] = {}
        # Of the calls under way, innermost last: copied first argument, and the watch
        # on fused attention.
        self.starts: list[tuple[Any, WatchFused | None]] = []
        for target in found:
            if target.compiled and target.owner is not None:
                continue  # inside a compiled sub-model that captures for itself
            for block in target.compiled:
                if block is not target.seat:
                    key, inner = _uncompiled(block)
                    self._duty(block, key).instead = inner
            for key in _keys(target, quiet):
                duty = self._duty(target.seat, key)
                duty.tasks, duty.first = target.tasks, target.first
                duty.fused = target.fused

    def join_checkpoint(self) -> None:
        """Collect alike when the checkpoint that this runs in computes anew."""
        _torch.while_recomputing(id(self._found), self._repetition)

    def _repetition(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        found, collector = self._found, self.collector.anew()

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            leave = collect_from(collector(), found)
            try:
                yield
            finally:
                leave()

        return again

    def end_watches(self) -> None:
        """End the watches of calls that raised: no hook runs behind those."""
        while self.starts:
            _, watch = self.starts.pop()
            if watch is not None:
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _duty(self, module: nn.Module, key: str) -> _Duty:
        place = (id(module), key)
        self.modules[place] = module
        return self.duties.setdefault(place, _Duty())


_active: ContextVar[_Session | None] = ContextVar("fxcapture_session", default=None)
_lock = threading.Lock()
_idle = threading.Condition(_lock)
_installed: dict[_Place, _Installed] = {}
_traced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_collecting() -> bool:
    """Whether this thread is in a decorated call that collects."""
    return _active.get() is not None


def silence() -> Callable[[], None]:
    """Enter a decorated call that wants nothing, inside one that collects.

    Returns:
        A function that leaves it again.
    """
    return functools.partial(_active.reset, _active.set(None))


def collect_from(collector: Collector, found: Sequence[Found]) -> Callable[[], None]:
    """Hand what ``found`` return in this thread to ``collector`` from now on.

    Returns:
        A function that ends it.
    """
    with contextlib.ExitStack() as stack:
        quiet = _is_traced(found)
        if quiet:
            stack.enter_context(no_tracing())
        session = _Session(collector, found, quiet=quiet)
        while not _install(session, quiet):
            # A thread has begun to trace the model in the meantime.
            quiet = True
            stack.enter_context(no_tracing())
            session = _Session(collector, found, quiet=True)
        stack.callback(_remove, session)
        stack.callback(session.end_watches)
        stack.callback(_active.reset, _active.set(session))
        return stack.pop_all().close


def make_way_for_tracing(model: nn.Module) -> None:
    """Called by a thread that begins to trace ``model``.

    Eager captures that are under way are waited for; later ones wait for the trace.
    """
    modules = list(model.modules())
    mine = {id(module) for module in modules}
    until = time.monotonic() + _PATIENCE_S
    with _lock:
        for module in modules:
            _traced.add(module)
        # Bounded: a capture under way may itself wait for this thread's compilation.
        while any(place[0] in mine for place in _installed):
            if not _idle.wait(timeout=max(0.0, until - time.monotonic())):
                break


def _is_traced(found: Sequence[Found]) -> bool:
    return any(f.compiled or f.seat in _traced for f in found)


def _install(session: _Session, quiet: bool) -> bool:
    with _lock:
        if not quiet and any(m in _traced for m in session.modules.values()):
            return False
        for place, module in session.modules.items():
            if place not in _installed:
                _installed[place] = _Installed(module, place[1])
            _installed[place].runs += 1
        return True


def _remove(session: _Session) -> None:
    with _lock:
        for place in reversed(session.modules):
            installed = _installed[place]
            installed.runs -= 1
            if not installed.runs:
                del _installed[place]
                installed.remove()
        _idle.notify_all()


@constant
def _thread_collects() -> bool:
    return is_collecting()


def _session() -> _Session | None:
    """What this thread collects in; asked outside of every graph.

    A thread that traces and does not collect may meet what another one put there.  In
    the pieces of a model that collects eagerly, a piece ends here: Dynamo would trace
    the collecting as a part of it (from torch 2.14 on, which knows context variables),
    once and for all runs of the piece.
    """
    if torch.compiler.is_dynamo_compiling():
        if not _thread_collects():
            return None
        end_piece()
    return _active.get()


def _dispatcher(place: _Place, original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        duty = None if session is None else session.duties.get(place)
        if session is None or duty is None:
            return original(*args, **kwargs)
        outside_dynamo(session.join_checkpoint)
        function = duty.instead or original
        if not duty.tasks:
            return function(*args, **kwargs)
        collector, tasks = session.collector, duty.tasks
        if place[1] == "_call_impl":
            before = count(collector, tasks)
            value = function(*args, **kwargs)
            outside_dynamo(refinish, collector, tasks, before, value)
        else:
            start = outside_dynamo(begin, collector, tasks, duty.first, args, kwargs)
            calls: list[FusedCall | FlexCall] = []
            if duty.fused:
                kwargs = without_flag(kwargs)
            if watches(collector, tasks):
                with WatchFused(calls):
                    value = function(*args, **kwargs)
            else:
                value = function(*args, **kwargs)
            outside_dynamo(finish, collector, tasks, start, value, calls)
        return value

    return dispatch


# All dispatchers share one code object, which is what Dynamo goes by.
untraced(_dispatcher((0, ""), print))


def _hooks(place: _Place) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        session = _session()
        if session is None or (duty := session.duties.get(place)) is None:
            return None
        session.join_checkpoint()
        start = begin(session.collector, duty.tasks, duty.first, args, kwargs)
        watch = None
        if watches(session.collector, duty.tasks):
            watch = WatchFused([])
            watch.__enter__()  # type: ignore[no-untyped-call]
        session.starts.append((start, watch))
        return (args, without_flag(kwargs)) if duty.fused else None

    def after(module: nn.Module, args: Any, output: Any) -> None:
        session = _session()
        if session is not None and (duty := session.duties.get(place)) is not None:
            start, watch = session.starts.pop()
            if watch is not None:
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            calls = [] if watch is None else watch.calls
            finish(session.collector, duty.tasks, start, output, calls)

    return before, after


def _uncompiled(block: nn.Module) -> tuple[str, Callable[..., Any]]:
    """The key under which a compiled block is entered, and its uncompiled form."""
    if _torch.is_compiled_in_place(block):
        return "_compiled_call_impl", block._call_impl
    inner: Any = block._modules["_orig_mod"]
    return "forward", inner.__call__


def _keys(target: Found, quiet: bool) -> tuple[str, ...]:
    seat = target.seat
    if _torch.is_compiled_in_place(seat):
        return ("_compiled_call_impl",)
    if "_orig_mod" in seat._modules:
        return ("forward",)
    if quiet:
        return (_HOOKS,)
    if _torch.has_forward_hooks(seat):
        return ("forward", "_call_impl")
    return ("forward",)
