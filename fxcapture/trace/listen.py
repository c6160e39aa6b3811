"""The function calls inside of a module, heard while the module runs.

Where a pass of this package sees the graph, it finds them there
(:mod:`fxcapture.passes.mark_functions`).  Elsewhere the module runs under
:class:`Listen`, and every module inside of it under a listener of its own, whose calls
do not count for the module around it.

Invariants
    What the model computes is not touched.  Everything here is traced by Dynamo, or
    runs eagerly, alike.
    A call is heard by the innermost listener alone.  What this package computes for a
    record is heard by none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxcapture import _torch
from fxcapture.reductions import Reducers
from fxcapture.spec.function import canonical_name, numbered, site_path
from fxcapture.trace.emit import deliver
from fxcapture.trace.functions import (
    argument_of,
    holds_tensor,
    name_of,
    writes_to_arguments,
)
from fxcapture.trace.mark import (
    ENTRY,
    NAMED,
    RESULT,
    Emit,
    emit_mark,
    naming,
    received,
    reduced,
)
from fxcapture.trace.target import FunctionTarget
from fxcapture.trace.templates import copied, reduced_element

__all__ = ["Listen", "Listener", "function_values", "innermost", "named", "unheard"]


def function_values(
    target: FunctionTarget, taken: Sequence[Any], value: Any, reducers: Reducers
) -> list[tuple[Any, str]]:
    """What the marks of one function call hold, each with its kind.

    Args:
        target: How the function is tapped.
        taken: The arguments that the target marks.
        value: What the call returned.
        reducers: Record name to its reduction.
    """
    made: list[tuple[Any, str]] = []
    if taken:
        made.append((tuple(taken), ENTRY))
    for record, output, entry, result, each in target.requests:
        if entry >= 0:
            part = reduced_element(reducers[record], taken[entry], None, each)
            made.append((part, received(record)))
        if result:
            part = reduced_element(reducers[record], value, output, each)
            made.append((part, reduced(record)))
    made.append((value, RESULT))
    return made


class Listener(TorchFunctionMode):
    """What hears the function calls of this thread, and the values that get a name.

    Attributes:
        skips: The next call that it hears is one that an inner listener has heard.
    """

    skips: bool = False

    def hear_named(self, name: str, value: torch.Tensor) -> None:
        """Hear of a value that the model's code gives a name."""


class Listen(Listener):
    """A time in which the function calls of one module call are heard.

    Args:
        path: The module's path.
        functions: The functions that are tapped; none: nothing is, and the module
            around does not hear the calls.
        token: Stands for the module where one trace serves several.
        emit: Takes the marks, see ``emit.deliver``.
        reducers: Record name to its reduction.

    Attributes:
        outer: The listener around it.
        names: Names of the calls that it has heard, in order.
    """

    def __init__(
        self,
        path: str,
        functions: tuple[FunctionTarget, ...],
        token: torch.Tensor | None,
        emit: Emit | None,
        reducers: Reducers,
    ) -> None:
        super().__init__()
        self.path = path
        self.functions = functions
        self.token = token
        self.emit = emit
        self.reducers = reducers
        self.outer = innermost()
        self.skips = False
        self.names: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and emit its marks if it is tapped."""
        if kwargs is None:
            kwargs = {}
        called = _torch.traceable(func)
        if self.outer is not None:
            self.outer.skips = True
        if self.skips:
            self.skips = False
            return called(*args, **kwargs)
        if not self.functions:
            return called(*args, **kwargs)
        name = name_of(func)
        target = None
        for tapped in self.functions:
            if tapped.name == name:
                target = tapped
        if target is None or not name:
            value = called(*args, **kwargs)
            if name and holds_tensor(value):
                self.names.append(name)
            return value
        taken = [argument_of(func, e, tuple(args), kwargs) for e in target.entries]
        if taken and writes_to_arguments(func, tuple(kwargs)):
            taken = [copied(a) for a in taken]
        value = called(*args, **kwargs)
        if holds_tensor(value):
            self.hear(target, taken, value)
        return value

    def hear(self, target: FunctionTarget, taken: Sequence[Any], value: Any) -> None:
        """Emit the marks of a call that has returned."""
        index = self.names.count(target.name)
        self.names.append(target.name)
        if target.wants(index):
            path = numbered(site_path(self.path, target.name), index)
            made = function_values(target, taken, value, self.reducers)
            deliver(self.emit, self.token, path, made)

    def hear_named(self, name: str, value: torch.Tensor) -> None:
        """Emit the marks of a named value, if it is tapped."""
        name = spelled(name)
        for target in self.functions:
            if target.name == name:
                self.hear(target, [value for _ in target.entries], value)
                return
        if self.functions:
            self.names.append(name)


@_torch.constant
def spelled(name: str) -> str:
    """A name as taps spell it."""
    return canonical_name(name)


@_torch.constant
def _is_naming() -> bool:
    """Whether a pass will look for names in what this thread traces."""
    return naming.get()


def innermost() -> Listener | None:
    """The innermost listener of this thread; can be traced."""
    for i in range(_torch.num_function_modes() - 1, -1, -1):
        mode = _torch.function_mode(i)
        if isinstance(mode, Listener):
            return mode
    return None


def unheard(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call something whose function calls are no module's: a compiled graph."""
    return _torch.call_without_modes(Listener, function, args, kwargs or {})


def named(name: str, value: torch.Tensor) -> torch.Tensor:
    """Give a value inside of a model's code a name that a tap can use.

    Example::

        class Router(nn.Module):
            def forward(self, x):
                scores = fxc.named("scores", self.gate(x))
                return scores.softmax(-1)

        fxc.compile(model, {"scores": fxc.Tap("**.router::scores")})

    It returns ``value`` itself and does nothing else.  A plain compiled, exported or
    scripted model does not contain it; in one that is captured it is a call site, like
    a call of a function of that name.

    Args:
        name: A Python identifier; the same name may stand at several places.
        value: The tensor; of any shape and dtype.

    Returns:
        ``value``.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return value
    if torch.compiler.is_dynamo_compiling() and _is_naming():
        emit_mark(None, [value], [], "T", spelled(name), NAMED)
        return value
    listener = innermost()
    if listener is not None:
        listener.hear_named(name, value)
    return value
