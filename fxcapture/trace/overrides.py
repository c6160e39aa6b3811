"""Overrides that stand in the instances while a broken run lasts.

Terms
    group: targets that are tapped alike, so that one override serves them all and
        Dynamo compiles what calls them once.  Each module has a token, a tensor that an
        override reads from the instance and a graph has as an input: by it a run knows
        which module a mark stands for.
    region: a module that is compiled on its own, because the user asks for it
        (``regions=``) or because he had compiled it by itself and targets stand in it.

Invariants
    Overrides are made once and kept, since Dynamo guards on them, and shared by the
    calls that run at the same time: each call finds its own frame.
    When the last call ends, the instances are as they were.  Two programs may override
    one module at once and need not leave in the order they came: an override that is
    not on top when its last call ends stays, inactive, until what stands on it goes.
"""

from __future__ import annotations

import itertools
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.plan.plan import Match, match
from fxcapture.spec.selector import ModuleTable, Selector
from fxcapture.spec.tap import CaptureSpec
from fxcapture.trace.mark import (
    Asks,
    Emit,
    Reducers,
    Target,
    find,
    observe_any,
)

__all__ = ["Overrides"]

_numbers = itertools.count()

#: Runs a region: (its class, what it stands for, *args, **kwargs).
RunRegion = Callable[..., Any]


@final
class Overrides:
    """The overrides of one program; a context manager that may be entered many times.

    Args:
        model: The model.
        spec: What is captured.
        emit: Receives the observations in a trace.
        seen: Receives those outside of one.
        asks: Asked outside of one what is wanted of a call.
        reducers: Record name to its reduction.
        regions: Modules to compile on their own, besides those that are already.
        run_region: Runs one of them.

    Attributes:
        bound: The spec bound to the model's modules as they are now.

    Raises:
        TargetError: the spec, or ``regions``, does not fit the model.
    """

    _lock = threading.RLock()

    def __init__(
        self,
        model: nn.Module,
        spec: CaptureSpec,
        emit: Emit,
        seen: Emit,
        asks: Asks,
        reducers: Reducers,
        regions: Selector | None,
        run_region: RunRegion,
    ) -> None:
        self._model = model
        self._spec = spec
        self._emit = emit
        self._seen = seen
        self._asks = asks
        self._reducers = reducers
        self._regions = regions
        self._run_region = run_region
        self._name = f"_fxcapture_{next(_numbers)}"
        self._count = 0
        self._installed: list[_Override] = []
        self._tree: _Tree | None = None
        self._made: list[_Override] = []
        self._overridden: list[nn.Module] = []
        self._states: list[tuple[bool, bool]] = []
        self._groups: dict[Any, tuple[str, Callable[..., Any]]] = {}
        self._members: dict[str, str] = {}
        self._token_of: dict[str, torch.Tensor] = {}
        self._path_of: dict[int, str] = {}
        self.bound: Match = match(spec, model)
        if regions is not None:
            regions.match(ModuleTable(model))

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
        if (
            self._tree is not None
            and self._tree.is_same()
            # Otherwise other attributes would have to be overridden by now.
            and _torch.override_states(self._overridden) == self._states
        ):
            return
        self._tree = _Tree(self._model)
        self.bound = match(self._spec, self._model)
        # Regions first: a region's own value is read around what was compiled.
        made = dict(self._make_regions())
        for target in self.bound.targets:
            module = find(self._model, target)
            region = made.get((id(module), "region"))
            joined = region is not None and region.key == target.key == "forward"
            if joined and "_orig_mod" not in module._modules:
                # One override for both: a call then goes through one method less.
                del made[id(module), "region"]
                runs: RunRegion | None = self._run_region
            else:
                runs = None
            made[id(module), target.key] = self._make(target, module, runs)
        self._made = list(made.values())
        self._overridden = list({id(o.module): o.module for o in self._made}.values())
        self._states = _torch.override_states(self._overridden)

    def _make_regions(self) -> Iterator[tuple[Any, _Override]]:
        table = ModuleTable(self._model)
        wanted = self._regions.match(table) if self._regions is not None else ()
        targets = [t.path for t in self.bound.targets]
        for entry in table.candidates():
            module, path = entry.module, entry.path
            inside = any(t == path or _is_below(t, path) for t in targets)
            asked = path in wanted and module is table.first[path][1]
            if (asked or inside) and _torch.is_compiled_in_place(module):
                yield (
                    (id(module), "region"),
                    self._region(module, "_compiled_call_impl"),
                )
            elif asked or (inside and "_orig_mod" in module._modules):
                yield (id(module), "region"), self._region(module, "forward")

    def _region(self, module: nn.Module, key: str) -> _Override:
        original = f"{self._name}_region"
        run_region = self._run_region
        # A scripted module's table of children has no ``get``.
        inner = module._modules
        wrapped = inner["_orig_mod"] if "_orig_mod" in inner else None  # noqa: SIM401
        in_place = key == "_compiled_call_impl"

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if wrapped is not None:
                below: Callable[..., Any] = wrapped
            elif in_place:
                below = self._call_impl
            else:
                below = getattr(self, original)
            if _torch.is_traced():
                return below(*args, **kwargs)
            return run_region(type(self), below, *args, **kwargs)

        return _Override(module, key, forward, {original: None})

    def _make(
        self, target: Target, module: nn.Module, runs: RunRegion | None
    ) -> _Override:
        name, method = self._group(target, runs)
        self._members.setdefault(name, target.path)
        token = self._token_of.get(target.path)
        if token is None:
            token = torch.empty(0)
            self._token_of[target.path] = token
            self._path_of[id(token)] = target.path
        own = {f"{self._name}_{target.key}": None, f"{self._name}_token": token}
        return _Override(module, target.key, method, own)

    def _group(
        self, target: Target, runs: RunRegion | None
    ) -> tuple[str, Callable[..., Any]]:
        spec = self._spec
        records = self.bound.records_of(target.path)
        kinds = frozenset(
            (
                t.output,
                t.point,
                t.initial,
                t.detach,
                t.dtype,
                t.device,
                t.reduce,
                t.attention,
            )
            for t in (spec[r] for r in records)
        )
        alike = (target._replace(path="", real_path=()), kinds, runs)
        if alike not in self._groups:
            name = f"#{len(self._groups)}"
            method = observe_any(
                f"{self._name}_{target.key}",
                f"{self._name}_token",
                target._replace(path=name, real_path=()),
                self._emit,
                self._reducers,
                self._seen,
                self._asks,
                runs,
            )
            self._groups[alike] = (name, method)
        return self._groups[alike]


def _is_below(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(f"{parent}."))


@final
class _Tree:
    """What tells, cheaply, whether a module tree is still the same.

    Asked at each call, of every module: the loops are C's.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = [module._modules for module in model.modules()]
        # A scripted module's table is of another type, and nothing in it is overridden.
        tables = [table for table in tables if isinstance(table, dict)]
        self._empty = [table for table in tables if not table]
        self._parents = [table for table in tables if table]
        self._children = [table.values() for table in self._parents]
        self._lengths = list(map(len, self._parents))
        self._names = list(_chain(self._parents))
        self._modules = list(_chain(self._children))

    def is_same(self) -> bool:
        """Whether each module has the children that it had, by the same names."""
        return (
            not any(self._empty)
            and list(map(len, self._parents)) == self._lengths
            and list(_chain(self._parents)) == self._names
            # By identity: a module's class may define what equal means.
            and all(map(operator.is_, _chain(self._children), self._modules))
        )


_chain: Callable[[Any], Iterator[Any]] = itertools.chain.from_iterable


@final
class _Override:
    """One override in one instance, and the attributes that its method reads.

    Args:
        module: The instance.
        key: Name of the attribute to override.
        method: A function of the instance; bound here.
        attributes: What to put beside it; ``None`` stands for what was overridden.
    """

    def __init__(
        self,
        module: nn.Module,
        key: str,
        method: Callable[..., Any],
        attributes: dict[str, Any],
    ) -> None:
        self.module = module
        self.key = key
        self._slot = module.__dict__
        self._wrapper = types.MethodType(method, module)
        self._attributes = attributes
        self._below: tuple[bool, Any] = (False, None)
        self._wanted = False

    def install(self) -> None:
        """Put the override on top of what the instance has."""
        if not self._wanted and _OVERRIDES.get(id(self._wrapper)) is not self:
            self._below = (self.key in self._slot, self._slot.get(self.key))
            original = getattr(self.module, self.key)
            for name, value in self._attributes.items():
                self._slot[name] = original if value is None else value
            self._slot[self.key] = self._wrapper
            _OVERRIDES[id(self._wrapper)] = self
        self._wanted = True

    def remove(self) -> None:
        """Take it away, with inactive ones below it; later, if another is on top."""
        self._wanted = False
        top: _Override | None = self
        while top is not None and not top._wanted:
            if self._slot.get(self.key) is not top._wrapper:
                return
            present, value = top._below
            del _OVERRIDES[id(top._wrapper)]
            if present:
                self._slot[self.key] = value
            else:
                del self._slot[self.key]
            for name in top._attributes:
                self._slot.pop(name, None)
            top = _OVERRIDES.get(id(value)) if present else None


#: The overrides that stand somewhere now, by the identity of their method.
_OVERRIDES: dict[int, _Override] = {}
