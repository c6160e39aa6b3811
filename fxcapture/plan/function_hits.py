"""Which function calls of a run are hits of a record.

Terms
    index: the number of a call among those of its name in one call of its module.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from fxcapture.errors import NeverCalledError, nearest
from fxcapture.plan.match import Match
from fxcapture.plan.sites import Site
from fxcapture.spec.function import Function, module_of, site_path
from fxcapture.spec.tap import Tap

__all__ = ["check_called_inside", "function_hits"]


def function_hits(
    function: Function, paths: Set[str], sites: Sequence[Site]
) -> list[int]:
    """The places among the sites of the calls that a record takes, in call order.

    Args:
        function: Which calls.
        paths: Paths of the function's calls, for each module.
        sites: Every site of the run, in call order; those of a module call follow those
            of the functions inside of it.
    """
    if not function.counts_from_end:
        return [
            i
            for i, site in enumerate(sites)
            if site.path in paths and function.index in (None, site.index)
        ]
    hits = []
    modules = {module_of(path): path for path in paths}
    # Calls of a module may be nested in one another: the innermost ends first.
    pending: dict[str, list[list[int]]] = {path: [] for path in paths}
    for i, site in enumerate(sites):
        if site.path in pending:
            calls = pending[site.path]
            if site.index == 0:
                calls.append([])
            calls[-1].append(i)
        elif site.path in modules and site.functions is not None:
            path = modules[site.path]
            if function.name in site.functions:
                found = pending[path].pop()
                assert function.index is not None
                if -function.index <= len(found):
                    hits.append(found[function.index])
    return sorted(hits)


def check_called_inside(
    record: str, tap: Tap, bound: Match, missing: Sequence[str], sites: Sequence[Site]
) -> None:
    """Check that the modules of a tap make the function calls that it names.

    A module that a glob or a class has swept up need not make one, as long as another
    does; one that is named has to.

    Args:
        record: The record's name.
        tap: Its tap.
        bound: The spec bound to the model.
        missing: Paths of the function's calls that the run did not make.
        sites: The run's sites.

    Raises:
        NeverCalledError: they do not.
    """
    if len(missing) < len(bound.paths[record]):
        missing = [p for p in missing if tap.target.names(module_of(p))]
    if missing:
        raise _not_called_inside(record, tap, bound, missing, sites)


def _not_called_inside(
    record: str, tap: Tap, bound: Match, missing: Sequence[str], sites: Sequence[Site]
) -> NeverCalledError:
    """The error for modules that did not make the function calls of a tap."""
    function = tap.function
    assert function is not None
    path = module_of(missing[0])
    shown = f"{path or 'the model'!r} ({bound.classes[missing[0]]})"
    if len(missing) > 1:
        shown += f" and {len(missing) - 1} more"
    called = [s.functions for s in sites if s.path == path and s.functions is not None]
    every = dict.fromkeys(name for found in called for name in found)
    names = [name for name in every if "::" not in name]
    inner = [name for name in every if name.endswith(f"::{function.name}")]
    if not called:
        why = "this run never called the module as one whose function calls are seen"
        remedy = "narrow the target to modules that run, or pass optional=True"
    elif function.name in names:
        most = max(found.count(function.name) for found in called)
        why = f"a call of it calls {function.name} {most} time" + "s" * (most != 1)
        remedy = "name an index that there is, or leave it out for all calls"
    else:
        why = "it calls " + (", ".join(names) or "no function that returns a tensor")
        why += "; calls inside of the modules in it belong to those"
        remedy = "name one of these, or the module that makes the call"
        if inner:
            module = f"{path}.{module_of(inner[0])}" if path else module_of(inner[0])
            remedy += f": {site_path(module, str(function))!r} does"
    return NeverCalledError(
        f"record {record!r}: {tap.written} matched {shown}, which does not call "
        f"'{function}' itself",
        why=why,
        nearest=nearest(function.name, names),
        remedy=remedy,
    )
