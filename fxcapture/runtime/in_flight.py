"""The time in which a call that is not one graph runs, with the overrides in place."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable
from typing import Any, final

from fxcapture.runtime.call import Call, call_in_flight, put_in_flight
from fxcapture.trace.eager_scope import EagerScope
from fxcapture.trace.fused_layers import fused_attention
from fxcapture.trace.mark import naming, receiver
from fxcapture.trace.real_scope import Holder, RealScope

__all__ = ["Again", "InFlight"]

Scope = RealScope | EagerScope
Current = contextvars.ContextVar[Call | None]


@final
class Again:
    """The time in which a checkpoint computes a call anew.

    Args:
        scope: The overrides.
        call: An empty call that equals the one that was computed.
        current: Holds the call in flight.
        kept: What has to live as long.
    """

    def __init__(self, scope: Scope, call: Call, current: Current, kept: Call) -> None:
        self._kept = kept
        self._parts = contextlib.ExitStack()
        self._layers = fused_attention(not scope.bound.inside_fused, depth=3)
        self._in_flight = InFlight(scope, call.anew(), current, depth=3)

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            self._layers.__enter__()
            stack.push(self._layers.__exit__)
            self._in_flight.__enter__()
            stack.push(self._in_flight.__exit__)
            self._parts = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._parts.__exit__(*error)


@final
class InFlight:
    """The time in which a call is the one in flight and its overrides stand.

    Args:
        scope: The overrides.
        call: The call.
        current: Holds the call in flight.
        depth: How many frames above ``__enter__`` the one is that holds the scope.
    """

    def __init__(
        self, scope: Scope, call: Call, current: Current, depth: int = 2
    ) -> None:
        self._scope = scope
        self._current = current
        self.call = call
        self._depth = depth
        self._holder: Holder | None = None
        self._reset: list[Callable[[], None]] = []

    def __enter__(self) -> Call:
        try:
            before = put_in_flight(self._current, self.call, self._depth + 1)
            self._reset.append(lambda: self._current.reset(before))
            if self._current is call_in_flight:
                taking = receiver.set(self.call.take)
                self._reset.append(lambda: receiver.reset(taking))
            if isinstance(self._scope, RealScope) and self._scope.leaves_to_passes:
                names = naming.set(True)
                self._reset.append(lambda: naming.reset(names))
            self._holder = self.call.holder
            assert self._holder is not None
            self._scope.enter(self._holder)
            self.call.bound = self._scope.bound
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.call

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if self._holder is not None:
            self._scope.leave(self._holder)
        self.call.holder = None
        while self._reset:
            self._reset.pop()()
