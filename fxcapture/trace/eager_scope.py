"""The scope around a call that runs eagerly: overrides out of Dynamo's sight.

Other threads may run, and trace, compiled code of the same modules meanwhile.  An
override of ``forward`` would show in their guards, and they would compile again; one of
what a module is *called* through does not: Dynamo goes from the module straight to its
class's ``forward``.

Terms
    holder: a call in flight, for which the overrides stand.
    called module: what the caller of a target calls: its outermost wrapper, or itself.
    direct call: ``child.forward(...)``, which does not go through what is overridden
        here; ``forward`` is overridden for it, unless the model is known to be traced.

Invariants
    Nothing that is called here is compiled by us.  A module that was compiled by itself
    is read from outside; where a target stands inside of it, it runs uncompiled.
    No module is kept alive, and between calls there are no overrides.
    An exception may come between any two bytecodes: see ``trace.real_scope``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture._torch.dynamo import end_piece
from fxcapture.trace.observe import observer
from fxcapture.trace.override import LOCK, Override
from fxcapture.trace.real_scope import Holder
from fxcapture.trace.target import Target

__all__ = ["EagerScope", "make_way_for_trace"]

#: Modules that were traced with calls of ours, and the scopes that hold any now.
_traced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_scopes: weakref.WeakSet[EagerScope] = weakref.WeakSet()
_lock = LOCK
#: Told when the last call of a scope has ended.
_left = threading.Condition(_lock)
#: How long a trace waits for calls that are under way, in seconds.
_PATIENCE_S = 1.0


def make_way_for_trace(model: nn.Module) -> None:
    """Called by a thread that begins to trace ``model``.

    What would show in the trace is taken away.  Calls of other threads that are under
    way are waited for, and later ones wait for the trace; for a moment only, since one
    may itself wait for this thread: then Dynamo guards on what it sees of it, and
    compiles once more.
    """
    modules = list(model.modules())
    mine = set(map(id, modules))
    until = time.monotonic() + _PATIENCE_S
    with _lock:
        for module in modules:
            _traced.add(module)
        for scope in list(_scopes):
            scope.hide(mine)
        while any(scope.serves_others(mine) for scope in list(_scopes)):
            if not _left.wait(timeout=max(0.0, until - time.monotonic())):
                break


@contextlib.contextmanager
def _no_trace_of(model: nn.Module | None) -> Iterator[None]:
    """While it is held, no other thread traces a model that is known to be traced.

    A trace reads the instances' dictionaries, which must not change meanwhile.  It is
    held only for as long as that takes, and before ``_lock``, as a trace does.
    """
    if model is not None and model not in _traced:
        with _lock:
            if model not in _traced:  # nor is while the lock is held
                yield
                return
    with _torch.no_tracing():
        yield


@final
class EagerScope:
    """The overrides of one spec in one model.

    Args:
        model: The model; not kept alive.
        bound: The spec bound to the model's modules, with ``forward`` as every key.
        current: The call in flight of this thread.
        owner: What owns the calls that the scope serves.
    """

    def __init__(
        self,
        model: nn.Module,
        bound: Any,
        current: Callable[[], Any],
        owner: Any,
    ) -> None:
        self.bound = bound
        self._model = weakref.ref(model)
        self._current = current
        self._owner = weakref.ref(owner)
        self._at_trace: Callable[[], bool]
        self._at_trace = _torch.constant(lambda: self._call() is not None)
        self._holders: list[Holder] = []
        self._installed: list[Override] = []
        self._direct: list[Override] = []
        self._tokens = {t.path: torch.empty(0) for t in bound.listening}
        self._path_of = {id(token): path for path, token in self._tokens.items()}
        self._local = threading.local()
        with _lock:
            _scopes.add(self)

    def enter(self, holder: Holder) -> None:
        """Let the overrides stand for a call; its frame is the one that called."""
        model = self._model()
        assert model is not None
        with _no_trace_of(model), _lock:
            if self._holders:
                self._holders = [h for h in self._holders if h.runs]
            if not self._holders:
                self._uninstall()  # what an interrupted call has left
                for override in self._overrides(model):
                    self._installed.append(override)
                    override.install()
            self._holders.append(holder)

    def leave(self, holder: Holder) -> None:
        """A call has ended; with the last one, the overrides go."""
        with _lock:
            self._holders = [h for h in self._holders if h is not holder]
            if not self._holders:
                self._uninstall()
                _left.notify_all()

    def serves_others(self, modules: Collection[int]) -> bool:
        """Whether calls of other threads have overrides on modules, by identity."""
        me = threading.current_thread()
        return any(h.thread is not me and h.runs for h in self._holders) and any(
            id(override.module) in modules for override in self._installed
        )

    def hide(self, modules: Collection[int]) -> None:
        """Take away what Dynamo can see on modules, by their identity."""
        with _lock:
            for override in reversed(self._direct):
                if id(override.module) in modules:
                    override.remove()

    def path_of_token(self, token: torch.Tensor) -> str | None:
        """The path of the module that a token stands for; ``None`` if not of ours."""
        return self._path_of.get(id(token))

    def representative(self, group: str) -> str:
        """What is said of a path holds for it alone."""
        return group

    def _uninstall(self) -> None:
        for override in reversed(self._installed):
            override.remove()
        self._installed, self._direct = [], []

    def _overrides(self, model: nn.Module) -> Iterator[Override]:
        enclosing: dict[int, nn.Module] = {}
        called: list[tuple[Target, nn.Module]] = []
        for target in self.bound.listening:
            way = _way(model, target.real_path)
            depth = len(way) - 1
            while target.real_path[depth - 1 : depth] == ("_orig_mod",):
                depth -= 1
            called.append((target, way[depth]))
            enclosing.update({id(m): m for m in way[:depth] if _is_compiled(m)})
        enclosing.pop(id(model), None)
        for block in enclosing.values():
            yield self._uncompiled(block)
        for target, module in called:
            in_place = _torch.is_compiled_in_place(module)
            if in_place and id(module) not in enclosing:
                yield self._calling(target, module, "_compiled_call_impl")
            else:
                yield self._calling(target, module, "_call_impl")
                if module not in _traced and "_orig_mod" not in module._modules:
                    direct = self._directly(target, module)
                    self._direct.append(direct)
                    yield direct

    def _uncompiled(self, block: nn.Module) -> Override:
        """The override of a compiled module that runs what it was compiled from."""
        in_place = _torch.is_compiled_in_place(block)
        wrapped = None if in_place else block._modules["_orig_mod"]
        key = "_compiled_call_impl" if in_place else "_call_impl"
        current = self._call
        below: list[Any] = []

        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return below[0](*args, **kwargs)
            if wrapped is None:
                return _torch.call_uncompiled(self, *args, **kwargs)
            return wrapped(*args, **kwargs)

        return Override(block, key, call, {}, _torch.out_of_sight, below)

    def _calling(self, target: Target, module: nn.Module, key: str) -> Override:
        """The override of what a module is called through."""
        expected, observe = self._expected, self._observing(target)
        is_hidden = self._is_hidden
        below: list[Any] = []

        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() and is_hidden():
                return below[0](*args, **kwargs)
            # Its forward is about to be called, and is not to be taken twice.
            awaited = expected()
            number = len(awaited)
            awaited.append(self)
            try:
                return observe(below[0], args, kwargs)
            finally:
                del awaited[number:]

        return Override(module, key, call, {}, _torch.out_of_sight, below)

    def _directly(self, target: Target, module: nn.Module) -> Override:
        """The override of ``forward``, for calls that go to it directly."""
        expected, observe = self._expected, self._observing(target)
        is_hidden = self._is_hidden
        below: list[Any] = []

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() and is_hidden():
                return below[0](*args, **kwargs)
            awaited = expected()
            if awaited and awaited[-1] is self:
                awaited[-1] = None
                return below[0](*args, **kwargs)
            return observe(below[0], args, kwargs)

        return Override(module, "forward", forward, {}, types.MethodType, below)

    def _is_hidden(self) -> bool:
        """In a trace: whether it is to go by; if not, the graph ends here.

        Another thread traces what the model is made of; or it is code that the model
        has compiled for itself, traced in this call, of which the rest runs as it is.
        """
        if not self._at_trace():
            return True
        end_piece()
        return False

    def _expected(self) -> list[Any]:
        """The modules of this thread that are called and whose forward is not yet."""
        found: list[Any] | None = getattr(self._local, "awaited", None)
        if found is None:
            found = self._local.awaited = []
        return found

    def _call(self) -> Any:
        """This thread's call in flight, if it is one that the scope serves."""
        call = self._current()
        return call if call is not None and call.owner is self._owner() else None

    def _observing(self, target: Target) -> Callable[..., Any]:
        current, token, plain = self._call, self._tokens[target.path], target.is_plain
        records, run = self.bound.records_of(target.path), observer(target, True)
        plain = plain and target.functions is None

        def observe(below: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            call = current()
            if call is None:
                return below(*args, **kwargs)
            watched = copies = originals = False
            if not plain:
                copies = call.wants_entry(records)
                originals = copies and torch.is_grad_enabled()
                originals = originals and not torch.is_inference_mode_enabled()
                watched = bool(target.attention) and call.wants_hit(records)
            take = call.take
            return run(
                below, args, kwargs, target, token, take, {}, watched, copies, originals
            )

        return observe


def _way(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules from the root to the one that the names lead to."""
    way = [model]
    for name in names:
        way.append(way[-1]._modules[name])  # type: ignore[arg-type]
    return way


def _is_compiled(module: nn.Module) -> bool:
    return _torch.is_compiled_in_place(module) or "_orig_mod" in module._modules
