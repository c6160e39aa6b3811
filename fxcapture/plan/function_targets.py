"""How modules are tapped whose function calls a spec names.

Terms
    inner module: one inside of such a module; the function calls that it makes are its
        own, so that it has to tell when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import nn

from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.function import site_path
from fxcapture.spec.module_table import ModuleTable
from fxcapture.trace.signature import has_forward
from fxcapture.trace.target import FunctionTarget, Request, Target

__all__ = ["function_target", "inner_targets", "modules_inside"]


def function_target(
    module: str,
    name: str,
    spec: CaptureSpec,
    paths: Mapping[str, tuple[str, ...]],
    entries: Mapping[str, Collection[int | str]],
    requests: Mapping[str, tuple[Request, ...]],
) -> FunctionTarget:
    """How the calls of a function inside of a module are tapped.

    Args:
        module: The module's path.
        name: The function's name.
        spec: The spec.
        paths: Record name to the matched paths.
        entries: Path to the arguments to mark.
        requests: Path to the reductions.
    """
    path = site_path(module, name)
    indices: set[int] | None = set()
    for record, found in paths.items():
        function = spec[record].function
        if path not in found or function is None or indices is None:
            continue
        if function.index is None or function.counts_from_end:
            indices = None  # which one it is, is known when the module returns
        else:
            indices.add(function.index)
    return FunctionTarget(
        name=name,
        indices=None if indices is None else tuple(sorted(indices)),
        entries=tuple(entries[path]),
        requests=requests[path],
    )


def modules_inside(modules: Iterable[str], table: ModuleTable) -> dict[str, None]:
    """Paths of the modules inside of some, without these themselves."""
    first = {id(module): path for path, (_, module) in table.first.items()}
    return {
        first[id(inner)]: None
        for path in modules
        for inner in table.first[path][1].modules()
        if inner is not table.first[path][1] and id(inner) in first
    }


def inner_targets(
    paths: Iterable[str],
    table: ModuleTable,
    keys_of: Callable[[nn.Module], tuple[str, ...]],
) -> tuple[Target, ...]:
    """Targets for inner modules that are tapped in no other way."""
    return tuple(
        Target(
            path=path,
            real_path=tuple(table.first[path][0].split(".")),
            key=keys_of(table.first[path][1])[-1],
            functions=(),
            silent=True,
        )
        for path in paths
        if has_forward(table.first[path][1])
    )
