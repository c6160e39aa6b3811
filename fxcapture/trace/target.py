"""How modules are tapped, as constants that can stand in a trace.

Terms
    target: how one module is tapped.
    request: a reduction that one record wants of a target.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from fxcapture import _torch
from fxcapture.spec.attention import Attention
from fxcapture.trace.signature import Parameters

__all__ = ["FunctionTarget", "Request", "Target", "find", "override_keys"]


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


class FunctionTarget(NamedTuple):
    """How the calls of one function inside of a module are tapped; constants only.

    Attributes:
        name: The function's name, in its one spelling.
        indices: Which calls of one call of the module; ``None`` for all.
        entries: Which arguments to mark, by position or name.
        requests: The reductions to compute.
    """

    name: str
    indices: tuple[int, ...] | None = None
    entries: tuple[int | str, ...] = ()
    requests: tuple[Request, ...] = ()

    def wants(self, index: int) -> bool:
        """Whether a record may want the call of a number."""
        return self.indices is None or index in self.indices


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
        functions: The function calls inside of it that are tapped; empty where those
            of the module around it are, which do not include its own; ``None`` where
            nobody listens.
        silent: Nothing else of it is tapped.
    """

    path: str
    real_path: tuple[str, ...]
    key: str
    parameters: Parameters = Parameters((), (), True, True)
    entries: tuple[int | str, ...] = ()
    requests: tuple[Request, ...] = ()
    attention: tuple[tuple[str, Attention], ...] = ()
    drops: tuple[str, ...] = ()
    functions: tuple[FunctionTarget, ...] | None = None
    silent: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the result of ``forward`` is wanted."""
        extra = self.entries or self.requests or self.attention or self.drops
        return self.key == "forward" and not extra and not self.functions


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
