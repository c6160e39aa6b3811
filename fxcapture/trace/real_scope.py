"""The scope around a call: overrides that stand in the instances while it runs.

Where one graph is not the whole run, code that Dynamo compiles in pieces, and code that
runs eagerly, both find the overrides in the instances.

Terms
    group: targets that are tapped alike, so that one override serves them all and
        Dynamo compiles what calls them once.  Each module has a token, a tensor that an
        override reads from the instance and a graph has as an input: by it a run knows
        which module a mark stands for.
    region: a module that is compiled on its own, because the user asks for it
        (``regions=``) or because he had compiled it by itself and targets stand in it.
    holder: a call in flight, for which the overrides stand.

Invariants
    Overrides are made once and kept, since Dynamo guards on them, and shared by the
    calls that run at the same time.  A thread without a call in flight runs, and
    traces, what the overrides stand for and nothing else.
    When the last call ends, the instances are as they were.  Two scopes may override
    one module at once and need not leave in the order they came: an override that is
    not on top when its last call ends stays, inactive, until what stands on it goes.
    An exception may come between any two bytecodes.  Holders that an interrupted call
    left are told by the Python frame that held them, which does not run any more; the
    next call drops them, and puts right what was half done.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.reductions import Reducers
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.selector import Selector
from fxcapture.trace.listen import innermost, unheard
from fxcapture.trace.observe import observer
from fxcapture.trace.override import LOCK, Override
from fxcapture.trace.target import Target, find

__all__ = ["Holder", "RealScope", "RunRegion", "hold_by"]

_numbers = itertools.count()

#: Runs a region: (its class, what it stands for, *args, **kwargs).
RunRegion = Callable[..., Any]


class Holder(NamedTuple):
    """A call in flight, by the thread and the frame that hold the scope.

    Attributes:
        thread: The thread.
        frame: The Python frame; when it does not run any more, the call has ended,
            whatever ended it.
    """

    thread: threading.Thread
    frame: types.FrameType

    @property
    def runs(self) -> bool:
        """Whether the call may still be running."""
        if self.thread is not threading.current_thread():
            return self.thread.is_alive()
        frame: types.FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def hold_by(depth: int = 1) -> Holder:
    """A holder for the caller, or for the one ``depth`` frames above this function."""
    return Holder(threading.current_thread(), sys._getframe(depth))


@final
class RealScope:
    """The overrides of one spec in one model.

    Args:
        model: The model.
        bind: Binds the spec to the model as it is now (a ``plan.match.Match``).
        in_flight: Whether the call in flight of this thread is one that the scope
            serves; asked by overrides, and at trace time.
        asks: Asked outside of graphs, by a module's token, whether what the module
            receives has to be copied.
        reducers: Record name to its reduction.
        regions: Modules to compile on their own, besides those that are already.
        run_region: Runs one of them.
        watched: Compute attention weights in the trace too: a graph may end inside of
            a call, whose span is then in no graph as a whole.

    Attributes:
        bound: The spec bound to the model's modules as they are now.

    Raises:
        TargetError: the spec, or ``regions``, does not fit the model.
    """

    _lock = LOCK

    def __init__(
        self,
        model: nn.Module,
        bind: Callable[[], Any],
        in_flight: Callable[[], bool],
        asks: Callable[[torch.Tensor], bool],
        reducers: Reducers,
        regions: Selector | None,
        run_region: RunRegion,
        watched: bool,
    ) -> None:
        self._model = model
        self._bind = bind
        self._in_flight = in_flight
        self._at_trace: Callable[[], bool] = _torch.constant(lambda: in_flight())
        self._asks = asks
        self._reducers = reducers
        self._regions = regions
        self._run_region = run_region
        self._watched = watched
        self._name = f"_fxcapture_{next(_numbers)}"
        self._holders: list[Holder] = []
        self._installed: list[Override] = []
        self._tree: _Tree | None = None
        self._made: list[Override] = []
        self._overridden: list[nn.Module] = []
        self._states: list[tuple[bool, bool]] = []
        self._groups: dict[Any, tuple[str, Callable[..., Any]]] = {}
        self._of_regions: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._members: dict[str, str] = {}
        self._token_of: dict[str, torch.Tensor] = {}
        self._path_of: dict[int, str] = {}
        self.bound: Any = bind()
        if regions is not None:
            regions.match(ModuleTable(model))

    def enter(self, holder: Holder) -> None:
        """Let the overrides stand for a call; its frame is the one that called."""
        with self._lock:
            if self._holders:
                self._holders = [h for h in self._holders if h.runs]
            if not self._holders:
                self._uninstall()  # what an interrupted call has left
                self._refresh()
                self._installed = list(self._made)
                for override in self._made:
                    override.install()
            self._holders.append(holder)

    def leave(self, holder: Holder) -> None:
        """A call has ended; with the last one, the overrides go."""
        with self._lock:
            self._holders = [h for h in self._holders if h is not holder]
            if not self._holders:
                self._uninstall()

    def _uninstall(self) -> None:
        for override in reversed(self._installed):
            override.remove()
        self._installed = []

    @property
    def leaves_to_passes(self) -> bool:
        """Whether passes find the function calls in what is traced."""
        return not self._watched and bool(self.bound.functions)

    def path_of_token(self, token: torch.Tensor) -> str | None:
        """The path of the module that a token stands for; ``None`` if not of ours."""
        return self._path_of.get(id(token))

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
        self._tree = None  # until all that may raise is done
        tree = _Tree(self._model)
        self.bound = self._bind()
        # Regions first: a region's own value is read around what was compiled.
        made = dict(self._make_regions())
        for target in self.bound.listening:
            module = find(self._model, target)
            region = made.get((id(module), "region"))
            joined = region is not None and region.key == target.key == "forward"
            if joined and target.functions:
                # The other way round: the calls inside are marked in what is compiled.
                joined = False
                del made[id(module), "region"]
                made[id(module), target.key] = self._make(target, module, None)
                made[id(module), "region"] = region
                continue
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
        self._tree = tree

    def _make_regions(self) -> Iterator[tuple[Any, Override]]:
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

    def _region(self, module: nn.Module, key: str) -> Override:
        original = f"{self._name}_region"
        kind = (key, "_orig_mod" in module._modules)
        if kind not in self._of_regions:
            made = self._region_method(original, *kind)
            self._of_regions[kind] = _torch.own_code(made, f"region_{key}")
        return Override(module, key, self._of_regions[kind], {original: None})

    def _region_method(
        self, original: str, key: str, wrapped: bool
    ) -> Callable[..., Any]:
        """An override that serves every region of one kind; Dynamo compiles it once."""
        run_region, in_flight = self._run_region, self._in_flight
        in_place = key == "_compiled_call_impl"

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            below: Any
            if not _torch.is_traced() and not _torch.outside_dynamo(in_flight):
                below = self.__dict__.get(original) or getattr(self, key)
                return below(*args, **kwargs)
            if wrapped:
                below = self._orig_mod
            elif in_place:
                below = self._call_impl  # type: ignore[no-untyped-call]
            else:
                below = getattr(self, original)
            if _torch.is_traced():
                return below(*args, **kwargs)
            if innermost() is None:
                return run_region(type(self), below, *args, **kwargs)
            # What is compiled marks its own function calls, if they are tapped.
            return unheard(run_region, (type(self), below, *args), kwargs)

        return forward

    def _make(
        self, target: Target, module: nn.Module, runs: RunRegion | None
    ) -> Override:
        name, method = self._group(target, module, runs)
        self._members.setdefault(name, target.path)
        token = self._token_of.get(target.path)
        if token is None:
            token = torch.empty(0)
            self._token_of[target.path] = token
            self._path_of[id(token)] = target.path
        own = {f"{self._name}_{target.key}": None, f"{self._name}_token": token}
        return Override(module, target.key, method, own)

    def _group(
        self, target: Target, module: nn.Module, runs: RunRegion | None
    ) -> tuple[str, Callable[..., Any]]:
        likeness = self.bound.likeness(target.path)
        # What one class calls, and by which code, says nothing of another's.
        kind = type(module) if target.functions else None
        alike = (target._replace(path="", real_path=()), likeness, runs, kind)
        if alike not in self._groups:
            name = f"#{len(self._groups)}"
            self._groups[alike] = (
                name,
                self._method(
                    f"{self._name}_{target.key}",
                    target._replace(path=name, real_path=()),
                    runs,
                ),
            )
        return self._groups[alike]

    def _method(
        self, original: str, target: Target, runs: RunRegion | None
    ) -> Callable[..., Any]:
        """An override that serves every module of one group.

        It says nothing of the module it is bound to: what it calls and which module it
        is, it reads from two attributes of the instance.  So Dynamo compiles a block
        once and runs that code for each block of its kind; the token is an input of it.

        Args:
            original: Attribute that holds what the override stands for.
            target: Its path names the group.
            runs: Outside of graphs, makes the call.
        """
        token = f"{self._name}_token"
        at_trace, in_flight, asks = self._at_trace, self._in_flight, self._asks
        reducers, takes = self._reducers, bool(target.entries)
        watched, key = self._watched, target.key
        # Regions leave attention weights and function calls to a pass alike.
        in_trace, for_real = observer(target, watched), observer(target, True)

        def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            inner: Any
            if _torch.is_traced():
                inner, own = getattr(self, original), getattr(self, token)
                if not at_trace():
                    return inner(*args, **kwargs)
                return in_trace(
                    inner, args, kwargs, target, own, None, reducers, watched
                )
            inner, own = self.__dict__.get(original), self.__dict__.get(token)
            if inner is None:
                # Taken away by another thread since it was looked up here.
                return getattr(self, key)(*args, **kwargs)
            if not _torch.outside_dynamo(in_flight):
                return inner(*args, **kwargs)
            copies = takes and _torch.outside_dynamo(asks, own)
            if runs is not None:
                inner = functools.partial(runs, type(self), inner)
            return for_real(
                inner, args, kwargs, target, own, None, reducers, True, copies
            )

        return _torch.own_code(forward, f"{type(self).__name__}_{key}{target.path}")


def _is_below(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(f"{parent}."))


@final
class _Tree:
    """What tells, cheaply, whether a module tree is still the same.

    Asked at each call, of every module: its loops run in C.
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
