"""Bind a spec to the modules that a foreign graph shows.

Invariants
    A record's positions depend on every hit, so a module that may be a hit and of which
    the graph shows no call is an error, also where the tap is optional: a graph without
    marks cannot tell a module that was not called from one that left no operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxcapture.errors import AmbiguousSiteError, TargetNotFoundError
from fxcapture.foreign.reader import REMEDY, Call, ForeignGraph
from fxcapture.plan.function_targets import function_target
from fxcapture.plan.match import Match, entry_name, request_of
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.function import module_of, site_path
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.tap import Tap

__all__ = ["bind", "calls_of"]


def bind(spec: CaptureSpec, graph: ForeignGraph) -> Match:
    """The spec bound to the graph's modules; every matched one has a call.

    Raises:
        TargetNotFoundError: a target matches nothing that the graph shows.
        AmbiguousSiteError: the graph does not say whether a module was called.
    """
    table = ModuleTable(graph.tree)
    real = {path: entry[0] for path, entry in table.first.items()}
    paths: dict[str, tuple[str, ...]] = {}
    records: dict[str, list[str]] = {}
    functions: dict[str, dict[str, None]] = {}
    for name, tap in spec.items():
        found = _match(name, tap, graph, table)
        for path in found:
            _check_called(name, path, real[path], graph)
        if tap.function is not None:
            for path in found:
                records.setdefault(path, [])
                functions.setdefault(path, {}).setdefault(tap.function.name)
            found = tuple(site_path(p, tap.function.name) for p in found)
        paths[name] = found
    for name, found in paths.items():
        for path in found:
            records.setdefault(path, []).append(name)
    entries = {
        path: tuple(
            dict.fromkeys(
                entry for name in names if (entry := entry_name(spec[name])) is not None
            )
        )
        for path, names in records.items()
    }
    requests = {
        path: tuple(
            request_of(name, spec[name], entries[path])
            for name in names
            if spec[name].reduce is not None
        )
        for path, names in records.items()
    }
    return Match(
        paths=paths,
        targets=(),
        classes={
            p: type(table.first[p if p in table.first else module_of(p)][1]).__name__
            for p in records
        },
        requests=requests,
        entries=entries,
        inside_fused=False,
        functions={
            path: tuple(
                function_target(path, n, spec, paths, entries, requests) for n in found
            )
            for path, found in functions.items()
        },
    )


def calls_of(bound: Match, graph: ForeignGraph) -> list[tuple[str, Call | None]]:
    """(path, call) of every matched call in call order; no call for the root itself."""
    table = ModuleTable(graph.tree)
    found: list[tuple[str, Call]] = [
        (path, call)
        for path in bound.entries
        if path and path in table.first
        for call in graph.calls[table.first[path][0]]
    ]
    found.sort(key=lambda item: item[1].order)
    ordered: list[tuple[str, Call | None]] = list(found)
    if "" in bound.entries:
        ordered.append(("", None))
    return ordered


def _match(
    name: str, tap: Tap, graph: ForeignGraph, table: ModuleTable
) -> tuple[str, ...]:
    by_class = any(_is_by_class(part, table) for part in tap.target.parts)
    if by_class:
        _check_classes(name, tap, graph)
    try:
        found = tap.target.match(table)
    except TargetNotFoundError as error:
        if not tap.optional:
            raise
        raise AmbiguousSiteError(
            f"record {name!r}: {error.what} that the graph shows",
            why="a graph without marks does not tell a module that was not called from "
            "one that left no operation, so optional=True cannot be decided",
            nearest=error.nearest,
            remedy=REMEDY,
        ) from error
    if any(not _is_exact(part, table) for part in tap.target.parts):
        _check_gaps(name, found, graph)
    return found


def _is_exact(part: Any, table: ModuleTable) -> bool:
    return isinstance(part, str) and part in table.aliases


def _is_by_class(part: Any, table: ModuleTable) -> bool:
    """Whether a part of a target looks at classes, or at modules themselves."""
    if not isinstance(part, str):
        return True
    return part.isidentifier() and part not in table.aliases


def _check_classes(name: str, tap: Tap, graph: ForeignGraph) -> None:
    """Refuse a class target where some module's class is not known."""
    for path in graph.names:
        if path in graph.classes or _surely_not(path, tap, graph):
            continue
        raise AmbiguousSiteError(
            f"record {name!r}: {tap.target} cannot be matched",
            why=f"the class {graph.names[path]!r} of {path or 'the model'!r} is not "
            "loaded, or one of several of that name, so that its bases are not known",
            remedy="import the model's code first, or use paths or a glob",
        )
    for path in graph.shown:
        if not path or path in graph.names or _is_list(path, graph):
            continue
        if graph.holds_module(path):
            continue
        raise AmbiguousSiteError(
            f"record {name!r}: {tap.target} cannot be matched",
            why=f"the graph names {path!r}, shows no call of it and does not say its "
            "class",
            remedy="use paths or a glob; or " + REMEDY,
        )


def _surely_not(path: str, tap: Tap, graph: ForeignGraph) -> bool:
    """Whether no class that a module may be of fits a target."""
    candidates = graph.candidates.get(path, ())
    for part in tap.target.parts:
        if isinstance(part, type):
            if not candidates or any(issubclass(c, part) for c in candidates):
                return False
        elif isinstance(part, str):
            bases = [base.__name__ for c in candidates for base in c.__mro__]
            if not candidates or part in bases:
                return False
        else:
            return False
    return True


def _is_list(path: str, graph: ForeignGraph) -> bool:
    """Whether a path is a container of numbered modules, which nobody calls."""
    below = {p[len(path) + 1 :].split(".")[0] for p in graph.children(path)}
    return bool(below) and all(name.isdigit() for name in below)


def _check_called(name: str, path: str, real: str, graph: ForeignGraph) -> None:
    why = graph.hidden_calls(real) if path else ""
    if not why and path and real not in graph.calls:
        why = (
            "it shows no call of the module: either there was none, or it left no "
            "operation behind"
        )
    if why:
        error = graph.ambiguous(real, why)
        raise AmbiguousSiteError(
            f"record {name!r}: {error.what}", why=why, remedy=error.remedy
        )


def _check_gaps(name: str, found: Sequence[str], graph: ForeignGraph) -> None:
    """Refuse where a list of modules has a number that the graph does not show."""
    numbers: dict[str, set[int]] = {}
    for path in found:
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            numbers.setdefault(parent, set()).add(int(last))
    for parent, seen in numbers.items():
        for number in range(max(seen)):
            path = f"{parent}.{number}" if parent else str(number)
            if number not in seen and path not in graph.calls:
                raise AmbiguousSiteError(
                    f"record {name!r}: the graph shows {parent or 'the model'!r} up to "
                    f"number {max(seen)} and nothing of {path!r}",
                    why="it may have been called and left no operation, which would "
                    "shift the positions behind it",
                    remedy="name the modules one by one; or " + REMEDY,
                )
