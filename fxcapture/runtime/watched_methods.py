"""Methods that a captured model hands on to its model, and what they leave uncaptured.

A method such as ``generate`` calls the model, not its captured program.  Outside of a
recording that is said, once for each method of a captured model.

Invariants
    A method runs as it is, with the model as ``self``.  The overrides that notice what
    it calls stand while it runs, and until it was said.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxcapture import _torch
from fxcapture.runtime.call import call_in_flight
from fxcapture.runtime.recording import recording_of
from fxcapture.trace.override import Override
from fxcapture.trace.target import find

__all__ = ["delegate", "watched"]


def delegate(name: str) -> Callable[..., Any]:
    """A method that is the model's own, which may have overridden nn.Module's."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._fxc_model, name)(*args, **kwargs)
        return self if result is self._fxc_model else result

    return method


def watched(captured: Any, name: str, found: Any) -> Any:
    """What a captured model hands out for an attribute of its model.

    A method says once that what it calls is not captured; all else is as it is.
    """
    model = captured._fxc_model
    if name.startswith("_") or name in captured._fxc_told:
        return found
    if not inspect.ismethod(found) or found.__self__ is not model:
        return found

    @functools.wraps(found.__func__)
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        called: set[bool] = set()
        with _noticing(captured, called):
            result = found(*args, **kwargs)
        if called and name not in captured._fxc_told:
            captured._fxc_told.add(name)
            warnings.warn(
                _text(captured._fxc_model, name, True in called), stacklevel=2
            )
        return result

    method.fxc_method = found  # type: ignore[attr-defined]
    return types.MethodType(method, model)


def _text(model: nn.Module, name: str, whole: bool) -> str:
    said = f"captured.{name}(...) called {type(model).__name__}"
    if whole:
        return (
            f"{said} and nothing was captured: the method calls the model itself\n"
            "  what to do: open a recording around it, `with captured.recording() as "
            f"run: captured.{name}(...)`, and read run.calls"
        )
    return (
        f"{said}'s submodules and nothing was captured: the method does not call the "
        "model\n"
        f"  what to do: compile the method, fxcapture.compile(model.{name}, spec)"
    )


@contextlib.contextmanager
def _noticing(captured: Any, called: set[bool]) -> Iterator[None]:
    """Notice whether this thread calls the model (true) or a target of it (false)."""
    model, _, program = captured._fxc_parts()
    thread = threading.get_ident()

    def notice(module: nn.Module) -> None:
        call = call_in_flight.get()
        if threading.get_ident() != thread or recording_of(module) is not None:
            return
        if call is None or not program.owns(call):
            called.add(module is model)

    modules = [model, *(find(model, target) for target in program.bound.targets)]
    overrides = [_override(m, notice) for m in {id(m): m for m in modules}.values()]
    try:
        for override in overrides:
            override.install()
        yield
    finally:
        for override in reversed(overrides):
            override.remove()


def _override(module: nn.Module, notice: Callable[[nn.Module], None]) -> Override:
    in_place = _torch.is_compiled_in_place(module)
    key = "_compiled_call_impl" if in_place else "_call_impl"
    below: list[Any] = []

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not _torch.is_traced():
            notice(self)
        return below[0](*args, **kwargs)

    return Override(module, key, call, {}, _torch.out_of_sight, below)
