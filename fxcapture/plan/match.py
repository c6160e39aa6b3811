"""A spec bound to the modules of one model, before anything runs.

Terms
    match: the paths that a tap's target means in one model, and how each is tapped.

Invariants
    It mentions modules by path only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import final

import torch
from torch import nn

from fxcapture.errors import ElementError, NeverCalledError, nearest
from fxcapture.plan.function_targets import (
    function_target,
    inner_targets,
    modules_inside,
)
from fxcapture.reductions import Reduction
from fxcapture.spec.attention import Attention
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.function import module_of, site_path
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.recorded import Recorded
from fxcapture.spec.tap import Tap
from fxcapture.trace.signature import describe_forward, has_forward
from fxcapture.trace.target import FunctionTarget, Request, Target, override_keys

__all__ = [
    "Match",
    "entry_name",
    "match",
    "reducers_of",
    "request_of",
    "takes_entry",
]


@final
# Without slots, for the cached properties; compared and hashed by identity.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """A spec bound to the modules of one model.

    Attributes:
        paths: Record name to the matched paths, in module order.
        targets: How each matched module is tapped.
        classes: Path to class name.
        requests: Path to the reductions its marks carry.
        entries: Path to the arguments its marks carry.
        attention: Path to the attention weights wanted of it, by record.
        likenesses: Path to what decides which values its marks carry.
        recorded: What a declaration takes of each module of a record.
        functions: Path to the function calls wanted of what runs inside the module.
        inner: The modules inside of those, whose function calls are their own; tapped
            in no other way.
        inside_fused: A target stands inside a ``nn.TransformerEncoderLayer``, whose
            fused kernel for inference calls none of its submodules, or asks for what
            ``nn.MultiheadAttention`` has in no kernel of its own.
        packed: Paths that want attention weights and hold a ``nn.MultiheadAttention``.
        of_transformers: Paths of modules of that library, for advice.
    """

    paths: Mapping[str, tuple[str, ...]]
    targets: tuple[Target, ...]
    classes: Mapping[str, str]
    requests: Mapping[str, tuple[Request, ...]]
    entries: Mapping[str, tuple[int | str, ...]]
    inside_fused: bool
    attention: Mapping[str, tuple[tuple[str, Attention], ...]] = dataclasses.field(
        default_factory=dict
    )
    likenesses: Mapping[str, Hashable] = dataclasses.field(default_factory=dict)
    recorded: Mapping[str, Recorded] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, tuple[FunctionTarget, ...]] = dataclasses.field(
        default_factory=dict
    )
    inner: tuple[Target, ...] = ()
    packed: frozenset[str] = frozenset()
    of_transformers: frozenset[str] = frozenset()

    @functools.cached_property
    def listening(self) -> tuple[Target, ...]:
        """The targets where function calls are marked while they run."""
        return (*self.targets, *self.inner)

    @functools.cached_property
    def _records(self) -> dict[str, tuple[str, ...]]:
        return {
            path: tuple(
                name
                for name, paths in self.paths.items()
                if path in paths
                for _ in range(self._entries_of(name, path))
            )
            for path in self.entries
        }

    def _entries_of(self, record: str, path: str) -> int:
        recorded = self.recorded.get(record)
        return 1 if recorded is None else len(recorded.of(path))

    @functools.cached_property
    def _hooked(self) -> frozenset[str]:
        return frozenset(t.path for t in self.targets if t.key == "_call_impl")

    def records_of(self, path: str) -> tuple[str, ...]:
        """Names of the records that tap the module at ``path``.

        Each as often as a call of the module gives it an entry.
        """
        return self._records.get(path, ())

    def likeness(self, path: str) -> Hashable:
        """Equal for modules whose calls give the same kinds of values."""
        return self.likenesses.get(path)

    def is_hooked(self, path: str) -> bool:
        """Whether each call of the module gives a second observation, behind hooks."""
        return path in self._hooked


def _last(h: torch.Tensor) -> torch.Tensor:
    return h[:, -1]


def _mean(h: torch.Tensor) -> torch.Tensor:
    return h.mean(dim=1)


_NAMED = {"last": _last, "mean": _mean}


def reducers_of(spec: CaptureSpec) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Record name to its reduction as a function."""
    return {
        name: _NAMED[tap.reduce] if isinstance(tap.reduce, str) else tap.reduce
        for name, tap in spec.items()
        if tap.reduce is not None
    }


def entry_name(tap: Tap) -> int | str | None:
    """The argument a tap copies on entry; ``None`` if it copies none."""
    if tap.point == "input":
        return 0 if tap.output is None else tap.output
    return 0 if tap.initial else None


def takes_entry(tap: Tap) -> bool:
    """Whether a tap wants something that stands among a site's entries."""
    fallback = tap.attention is not None and tap.recorded is None
    return entry_name(tap) is not None or fallback


def match(
    spec: CaptureSpec,
    model: nn.Module,
    keys_of: Callable[[nn.Module], tuple[str, ...]] = override_keys,
) -> Match:
    """Find the modules that a spec means.

    Args:
        spec: The spec.
        model: The model.
        keys_of: Which attributes of a module are overridden.

    Raises:
        TargetNotFoundError: a target matches nothing.
        AmbiguousTargetError: a class name names several classes.
        NeverCalledError: an exact path names a container that cannot be called.
        ElementError: ``point="input"`` names a parameter that ``forward`` lacks.
    """
    table = ModuleTable(model)
    paths: dict[str, tuple[str, ...]] = {}
    entries: dict[str, dict[int | str, None]] = {}
    names: dict[str, dict[str, None]] = {}
    for name, tap in spec.items():
        found = tap.target.match(table, optional=tap.optional)
        found = tuple(p for p in found if _callable_or_named(p, table, tap, name))
        entry = entry_name(tap)
        for path in found:
            if tap.function is None:
                if entry is not None:
                    _check_parameter(table.first[path][1], entry, path, tap, name)
            else:
                entries.setdefault(path, {})
                names.setdefault(path, {}).setdefault(tap.function.name)
        if tap.function is not None:
            found = tuple(site_path(p, tap.function.name) for p in found)
        paths[name] = found
        for path in found:
            wanted = entries.setdefault(path, {})
            if entry is not None:
                wanted.setdefault(entry)
    targets = []
    requests: dict[str, tuple[Request, ...]] = {}
    attention: dict[str, tuple[tuple[str, Attention], ...]] = {}
    for path, wanted in entries.items():
        order = tuple(wanted)
        attention[path] = tuple(
            (name, asked)
            for name, found in paths.items()
            if path in found
            and (asked := spec[name].attention) is not None
            and not _returns_weights(spec[name], path)
        )
        requests[path] = tuple(
            request_of(name, spec[name], order)
            for name, found in paths.items()
            if path in found
            and spec[name].reduce is not None
            and spec[name].attention is None
        )
    functions = {
        path: tuple(
            function_target(path, n, spec, paths, entries, requests) for n in found
        )
        for path, found in names.items()
    }
    listeners = modules_inside(functions, table)
    for path, wanted in entries.items():
        if path not in table.first:
            continue  # a function's
        real_path, module = table.first[path]
        order = tuple(wanted)
        keys = keys_of(module)
        fused = any(
            tap.recorded is not None and path in tap.recorded.fused
            for tap in spec.values()
        )
        parameters = describe_forward(module)
        heard = functions.get(path, () if path in listeners else None)
        for key in keys:
            # Of a pair, the inner override sees what forward received, the outer what
            # the caller gets.
            outer = len(keys) > 1 and key == keys[-1]
            targets.append(
                Target(
                    path=path,
                    real_path=tuple(real_path.split(".")) if real_path else (),
                    key=key,
                    parameters=parameters,
                    entries=() if outer else order,
                    requests=tuple(r._replace(entry=-1) for r in requests[path])
                    if outer
                    else requests[path],
                    attention=() if outer else attention[path],
                    drops=("output_attentions",) if fused and not outer else (),
                    functions=() if outer and heard else heard,
                )
            )
    packed = frozenset(
        path
        for path, asked in attention.items()
        if asked and _holds_packed(table.first[path][1])
    )
    return Match(
        paths=paths,
        targets=tuple(targets),
        classes={
            p: type(table.first[p if p in table.first else module_of(p)][1]).__name__
            for p in entries
        },
        requests=requests,
        entries={p: tuple(w) for p, w in entries.items()},
        attention=attention,
        likenesses={
            path: frozenset(
                _kind(spec[n])
                for n, found in paths.items()
                if any(path in (p, module_of(p)) for p in found)
            )
            for path in entries
        },
        recorded={
            n: tap.recorded for n, tap in spec.items() if tap.recorded is not None
        },
        packed=packed,
        of_transformers=frozenset(
            path
            for path in entries
            if path in table.first and _of_transformers(table.first[path][1])
        ),
        inside_fused=bool(packed)
        or any(
            isinstance(entry.module, nn.TransformerEncoderLayer)
            and any(
                p.startswith(f"{entry.path}." if entry.path else "") and p != entry.path
                for p in entries
            )
            for entry in table.candidates()
        ),
        functions=functions,
        inner=inner_targets(
            [path for path in listeners if path not in entries], table, keys_of
        ),
    )


def _holds_packed(module: nn.Module) -> bool:
    return any(isinstance(child, nn.MultiheadAttention) for child in module.modules())


def _of_transformers(module: nn.Module) -> bool:
    return any(c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _returns_weights(tap: Tap, path: str) -> bool:
    return tap.recorded is not None and path in tap.recorded.eager


def _kind(tap: Tap) -> Hashable:
    """What decides which values a tap's marks carry; not which of them are kept."""
    skipped = ("target", "select", "optional")
    fields = dataclasses.fields(tap)
    return tuple(getattr(tap, f.name) for f in fields if f.name not in skipped)


def request_of(name: str, tap: Tap, entries: tuple[int | str, ...]) -> Request:
    """The reduction that a record's tap wants of a module.

    Args:
        name: The record's name.
        tap: Its tap, which reduces.
        entries: The arguments that the module's marks carry.
    """
    entry = entry_name(tap)
    return Request(
        name,
        tap.output,
        -1 if entry is None else entries.index(entry),
        tap.point == "output",
        each=isinstance(tap.reduce, (str, Reduction)),
    )


def _callable_or_named(path: str, table: ModuleTable, tap: Tap, name: str) -> bool:
    """Whether a match can be called; a container that a glob swept up is skipped.

    A container that was named exactly is an error instead.
    """
    module = table.first[path][1]
    if has_forward(module):
        return True
    if tap.target.names(path) and not tap.optional:
        raise NeverCalledError(
            f"record {name!r}: target {path!r} is never called",
            why=f"a {type(module).__name__} is a container without its own forward",
            nearest=[f"{path}.{n}" if path else n for n, _ in module.named_children()],
            remedy=f"name its children, such as {path + '.*' if path else '*'!r}",
        )
    return False


def _check_parameter(
    module: nn.Module, entry: int | str, path: str, tap: Tap, name: str
) -> None:
    names, _, takes_more, takes_named, _ = describe_forward(module)
    if isinstance(entry, int):
        known = takes_more or takes_named or 0 <= entry < len(names)
    else:
        known = takes_named or entry in names
    if tap.point == "input" and not known and not tap.optional:
        raise ElementError(
            f"record {name!r}: input {entry!r} does not exist in {path!r} "
            f"({type(module).__name__})",
            why="forward takes " + (", ".join(names) or "no parameters"),
            nearest=nearest(str(entry), names),
            remedy="name a parameter of forward, by position or name",
        )
