"""The eager reference for function calls inside of modules.

The model runs eagerly under a function mode, and every module tells when it begins and
when it ends.  What is heard in between, and in no module inside, is the module's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

from fxcapture.plan.match import Match
from fxcapture.spec.function import (
    Function,
    canonical_name,
    is_reflected,
    module_of,
    site_path,
)
from fxcapture.spec.module_table import ModuleTable
from fxcapture.trace.functions import parameters_of
from fxcapture.trace.listen import Listener

__all__ = ["Heard", "hearing"]


@final
@dataclasses.dataclass(slots=True)
class Heard:
    """One function call: which one of its module call it is, and what it saw.

    Attributes:
        path: Its path.
        index: Its number in the module's call.
        counts: How often the module's call has called each function.
        entries: Copies of the arguments asked for.
        result: A copy of what it returned.
    """

    path: str
    index: int
    counts: dict[str, int]
    entries: dict[int | str, Any]
    result: Any

    def is_taken_by(self, function: Function) -> bool:
        """Whether a tap takes it; asked when the run has ended."""
        if function.index is None:
            return True
        total = self.counts[function.name]
        return self.index == function.index + (total if function.index < 0 else 0)


@final
class _Hearing(Listener):
    def __init__(
        self, bound: Match, seen: list[Any], copied: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self._bound = bound
        self._seen = seen
        self._copied = copied
        #: The module calls in progress: path and counts; ``None`` for none.
        self.calls: list[tuple[str, dict[str, int]] | None] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = getattr(func, "__name__", "")
        packet = getattr(func, "overloadpacket", None)
        if packet is not None:
            written = packet.__name__
        name = canonical_name(written)
        call = self.calls[-1] if self.calls else None
        if call is None or written in ("__get__", "__set__", ""):
            return func(*args, **kwargs)
        operands = (args[1], args[0], *args[2:]) if is_reflected(written) else args
        wanted = self._bound.entries.get(site_path(call[0], name), ())
        entries = {
            w: self._copied(_argument(func, w, operands, kwargs)) for w in wanted
        }
        result = func(*args, **kwargs)
        if _has_tensor(result):
            self._note(call, name, entries, result)
        return result

    def hear_named(self, name: str, value: torch.Tensor) -> None:
        call = self.calls[-1] if self.calls else None
        if call is not None:
            wanted = self._bound.entries.get(site_path(call[0], name), ())
            self._note(call, name, {w: self._copied(value) for w in wanted}, value)

    def _note(
        self, call: tuple[str, dict[str, int]], name: str, entries: Any, result: Any
    ) -> None:
        path, counts = call
        index = counts.get(name, 0)
        counts[name] = index + 1
        if site_path(path, name) in self._bound.entries:
            made = Heard(
                site_path(path, name), index, counts, entries, self._copied(result)
            )
            self._seen.append(made)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _argument(func: Any, which: int | str, args: Any, kwargs: Any) -> Any:
    names = parameters_of(func, len(args)).names
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(which, str):
        return given.get(which, given.get({"input": "self"}.get(which, which)))
    if which < len(args):
        return args[which]
    return given.get(names[which]) if which < len(names) else None


@contextlib.contextmanager
def hearing(
    model: nn.Module, bound: Match, seen: list[Any], copied: Callable[[Any], Any]
) -> Iterator[None]:
    """A time in which the function calls that a spec takes are noted.

    Args:
        model: The model.
        bound: A spec bound to it.
        seen: Receives a :class:`Heard` for each, in the order in which they return.
        copied: Copies a value.
    """
    if not bound.functions:
        yield
        return
    mode = _Hearing(bound, seen, copied)
    wanted = {module_of(path) for path in bound.entries if "::" in path}
    table = ModuleTable(model)
    paths = {id(table.first[path][1]): path for path in table.first if path in wanted}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            path = paths.get(id(module))
            # Its hooks run between the two, and are no part of any module.
            _surround(stack, mode, module, "_call_impl", None)
            _surround(stack, mode, module, "forward", path)
        stack.enter_context(mode)
        yield


def _surround(
    stack: contextlib.ExitStack, mode: _Hearing, module: nn.Module, key: str, path: Any
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
