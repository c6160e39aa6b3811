"""The function calls of an eager run, by the module that makes them.

The model runs under a function mode, and every module tells when it begins and when it
ends.  What is heard in between, and in no module inside, is the module's own.  Hooks
run between a module and its caller, and are no part of either.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, final

import torch
from torch import nn

from fxcapture.spec.function import canonical_name, is_reflected
from fxcapture.trace.functions import holds_tensor, own_name, parameters_of
from fxcapture.trace.listen import Listener

__all__ = ["HeardCall", "Hears", "hearing"]


@final
@dataclasses.dataclass(slots=True)
class HeardCall:
    """One function call.

    Attributes:
        path: Path of the module that makes it.
        name: The function's name.
        index: Which call of that name it is in the module's call.
        counts: How often the module's call has called each function so far.
        called: What is called; ``None`` for a value that the code gives a name.
        args: Its positional arguments; of a reflected operator, in the order of its
            operands.
        kwargs: Its keyword arguments.
    """

    path: str
    name: str
    index: int
    counts: dict[str, int]
    called: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def argument(self, which: int | str) -> Any:
        """One argument, by the position or name of its parameter."""
        if self.called is None:
            return self.args[0]
        parameters = parameters_of(self.called, len(self.args))
        names = parameters.names
        given = dict(zip(names, self.args, strict=False))
        given |= {own_name(parameters, k): v for k, v in self.kwargs.items()}
        if isinstance(which, str):
            return given.get(own_name(parameters, which))
        if which < len(self.args):
            return self.args[which]
        return given.get(names[which]) if which < len(names) else None


class Hears(Protocol):
    """What is told of each call that returns a tensor, or a container with one."""

    def begins(self, call: HeardCall) -> Any:
        """A call begins; what this returns comes back when it has ended."""

    def ended(self, call: HeardCall, begun: Any, result: Any) -> None:
        """It has returned ``result``."""


@final
class _Hearing(Listener):
    def __init__(self, hears: Hears) -> None:
        super().__init__()
        self._hears = hears
        #: The module calls in progress: path and counts; ``None`` for none.
        self.calls: list[tuple[str, dict[str, int]] | None] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        written = getattr(packet, "__name__", "")
        module = self.calls[-1] if self.calls else None
        if module is None or written in ("__get__", "__set__", ""):
            return func(*args, **kwargs)
        operands = (args[1], args[0], *args[2:]) if is_reflected(written) else args
        call = self._call(
            module, canonical_name(written), func, tuple(operands), kwargs
        )
        begun = self._hears.begins(call)
        result = func(*args, **kwargs)
        if holds_tensor(result):
            self._end(call, begun, result)
        return result

    def hear_named(self, name: str, value: torch.Tensor) -> None:
        module = self.calls[-1] if self.calls else None
        if module is not None:
            call = self._call(module, canonical_name(name), None, (value,), {})
            self._end(call, self._hears.begins(call), value)

    def _call(
        self,
        module: tuple[str, dict[str, int]],
        name: str,
        called: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> HeardCall:
        path, counts = module
        return HeardCall(path, name, counts.get(name, 0), counts, called, args, kwargs)

    def _end(self, call: HeardCall, begun: Any, result: Any) -> None:
        call.counts[call.name] = call.index + 1
        self._hears.ended(call, begun, result)


@contextlib.contextmanager
def hearing(model: nn.Module, paths: Mapping[int, str], hears: Hears) -> Iterator[None]:
    """A time in which the function calls of some modules are told.

    Args:
        model: The model.
        paths: The modules, by their identity, and their paths.
        hears: Is told.
    """
    mode = _Hearing(hears)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            _surround(stack, mode, module, "_call_impl", None)
            _surround(stack, mode, module, "forward", paths.get(id(module)))
        stack.enter_context(mode)
        yield


def _surround(
    stack: contextlib.ExitStack,
    mode: _Hearing,
    module: nn.Module,
    key: str,
    path: str | None,
) -> None:
    below, slot = getattr(module, key), module.__dict__
    present, own = key in slot, slot.get(key)

    def surrounding(*args: Any, **kwargs: Any) -> Any:
        mode.calls.append(None if path is None else (path, {}))
        try:
            return below(*args, **kwargs)
        finally:
            mode.calls.pop()

    slot[key] = surrounding

    def restore() -> None:
        if present:
            slot[key] = own
        else:
            del slot[key]

    stack.callback(restore)
