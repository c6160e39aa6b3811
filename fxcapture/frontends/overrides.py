"""Overrides that stand in the instances while a broken run lasts.

Terms
    group: targets that are tapped alike, so that one override serves them all and
        Dynamo compiles what calls them once.  Each module has a token, a tensor that an
        override reads from the instance and a graph has as an input: by it a run knows
        which module a mark stands for.

Invariants
    Overrides are made once and kept, since Dynamo guards on them, and shared by the
    calls that run at the same time: each call finds its own frame.
    When the last call ends, the instances are as they were.  Two programs may override
    one module at once and need not leave in the order they came: an override that is
    not on top when its last call ends stays, inactive, until what stands on it goes.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from fxcapture.mark import Emit, Reducers, Target, find, observe_any, override_keys
from fxcapture.plan import Match, match
from fxcapture.spec import CaptureSpec

__all__ = ["Overrides"]

_numbers = itertools.count()


@final
class Overrides:
    """The overrides of one program; a context manager that may be entered many times.

    Args:
        model: The model.
        spec: What is captured.
        emit: Receives the observations, in a trace and outside of one.
        reducers: Record name to its reduction.

    Attributes:
        bound: The spec bound to the model's modules as they are now.
    """

    _lock = threading.RLock()

    def __init__(
        self, model: nn.Module, spec: CaptureSpec, emit: Emit, reducers: Reducers
    ) -> None:
        self._model = model
        self._spec = spec
        self._emit = emit
        self._reducers = reducers
        self._name = f"_fxcapture_{next(_numbers)}"
        self._count = 0
        self._installed: list[_Override] = []
        self._modules: tuple[int, ...] = ()
        self._made: list[_Override] = []
        self._groups: dict[Any, tuple[str, Callable[..., Any]]] = {}
        self._members: dict[str, str] = {}
        self._token_of: dict[str, torch.Tensor] = {}
        self._path_of: dict[int, str] = {}
        self.bound: Match = match(spec, model, eager_caller=True)

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._refresh()
                for override in self._made:
                    override.install()
                self._installed = list(self._made)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for override in reversed(self._installed):
                    override.remove()
                self._installed = []

    def path_of_token(self, token: torch.Tensor) -> str:
        """The path of the module that a token stands for."""
        return self._path_of[id(token)]

    def representative(self, group: str) -> str:
        """A member of a group; what is said of it holds for every other."""
        return self._members.get(group, group)

    def _refresh(self) -> None:
        """Look the targets up again if the module tree is not what it was."""
        modules = tuple(_identities(self._model))
        if modules == self._modules and not any(o.is_stale() for o in self._made):
            return
        self.bound = match(self._spec, self._model, eager_caller=True)
        self._modules = modules
        self._made = [self._make(target) for target in self.bound.targets]

    def _make(self, target: Target) -> _Override:
        module = find(self._model, target)
        name, method = self._group(target)
        self._members.setdefault(name, target.path)
        token = self._token_of.get(target.path)
        if token is None:
            token = torch.empty(0)
            self._token_of[target.path] = token
            self._path_of[id(token)] = target.path
        return _Override(module, target.key, method, token, self._name)

    def _group(self, target: Target) -> tuple[str, Callable[..., Any]]:
        spec = self._spec
        records = tuple(self.bound.records_of(target.path))
        kinds = frozenset(
            (t.output, t.point, t.initial, t.detach, t.dtype, t.device, t.reduce)
            for t in (spec[r] for r in records)
        )
        alike = (target._replace(path="", real_path=()), kinds)
        if alike not in self._groups:
            name = f"#{len(self._groups)}"
            shared = target._replace(path=name, real_path=())
            method = observe_any(
                f"{self._name}_{target.key}",
                f"{self._name}_token",
                shared,
                self._emit,
                self._reducers,
            )
            self._groups[alike] = (name, method)
        return self._groups[alike]


def _identities(model: nn.Module) -> list[int]:
    """Which module objects a model consists of, cheaply."""
    found: list[int] = []
    stack = [model]
    seen: set[int] = set()
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(id(module))
        stack.extend(m for m in module._modules.values() if m is not None)
    return found


@final
class _Override:
    """One override in one instance, and the two attributes that its method reads."""

    def __init__(
        self,
        module: nn.Module,
        key: str,
        method: Callable[..., Any],
        token: torch.Tensor,
        name: str,
    ) -> None:
        self._module = module
        self._slot = module.__dict__
        self._key = key
        self._keys = override_keys(module, eager_caller=True)
        self._wrapper = types.MethodType(method, module)
        self._token = token
        self._name = name
        self._below: tuple[bool, Any] = (False, None)
        self._wanted = False

    def is_stale(self) -> bool:
        """Whether another attribute would have to be overridden by now."""
        return override_keys(self._module, eager_caller=True) != self._keys

    def install(self) -> None:
        """Put the override on top of what the instance has."""
        if not self._wanted and _OVERRIDES.get(id(self._wrapper)) is not self:
            self._below = (self._key in self._slot, self._slot.get(self._key))
            self._slot[f"{self._name}_{self._key}"] = getattr(self._module, self._key)
            self._slot[f"{self._name}_token"] = self._token
            self._slot[self._key] = self._wrapper
            _OVERRIDES[id(self._wrapper)] = self
        self._wanted = True

    def remove(self) -> None:
        """Take it away, with inactive ones below it; later, if another is on top."""
        self._wanted = False
        top: _Override | None = self
        while top is not None and not top._wanted:
            if self._slot.get(self._key) is not top._wrapper:
                return
            present, value = top._below
            del _OVERRIDES[id(top._wrapper)]
            if present:
                self._slot[self._key] = value
            else:
                del self._slot[self._key]
            self._slot.pop(f"{top._name}_{self._key}", None)
            self._slot.pop(f"{top._name}_token", None)
            top = _OVERRIDES.get(id(value)) if present else None


#: The overrides that stand somewhere now, by the identity of their method.
_OVERRIDES: dict[int, _Override] = {}
