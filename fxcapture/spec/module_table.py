"""The modules of a model, under the paths that a user sees.

Terms
    path: the dotted path the user sees.  Wrappers put names between (``_orig_mod``,
        ``module`` of a DataParallel, ``_fsdp_wrapped_module``,
        ``_checkpoint_wrapped_module``); they are looked through.
    real path: the path as ``named_modules`` spells it, wrappers included.

Invariants
    A module object is listed once, under its first path; ``aliases`` has its others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

from torch import nn

__all__ = ["Entry", "ModuleTable"]

# Names that a wrapper puts into a path.  ``module`` is one only below a wrapper class,
# since a model may well have an attribute of that name.
_WRAPPER_NAMES = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)


def _is_wrapper(parent: nn.Module, name: str) -> bool:
    if name in _WRAPPER_NAMES:
        return True
    return name == "module" and isinstance(
        parent, (nn.DataParallel, nn.parallel.DistributedDataParallel)
    )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One module under one of its paths."""

    path: str
    real_path: str
    module: nn.Module


@final
class ModuleTable:
    """Every module of a model under the paths a user sees.

    Args:
        model: The root; its path is ``""``.

    Attributes:
        first: Path to (real path, module): each object once, under its first name; a
            wrapper stands for what it wraps, except that of ``torch.compile``, which
            Dynamo looks through itself.
        aliases: Every path, further names of a shared module included, to the path
            in ``first``.
        inner: (path, module) of modules that a wrapper hides: same path, other object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.first: dict[str, tuple[str, nn.Module]] = {}
        self.aliases: dict[str, str] = {}
        self.inner: list[Entry] = []
        path_of: dict[int, str] = {}
        for entry in _walk(model, "", "", set()):
            key = id(entry.module)
            if key in path_of:
                self.aliases.setdefault(entry.path, path_of[key])
            elif entry.path in self.first:
                path_of[key] = entry.path
                real, wrapper = self.first[entry.path]
                if "_orig_mod" in wrapper._modules:
                    self.first[entry.path] = (entry.real_path, entry.module)
                    entry = Entry(entry.path, real, wrapper)
                self.inner.append(entry)
            else:
                path_of[key] = entry.path
                self.first[entry.path] = (entry.real_path, entry.module)
                self.aliases[entry.path] = entry.path

    def candidates(self) -> Iterator[Entry]:
        """Each module object once, those behind wrappers included."""
        hidden: dict[str, list[Entry]] = {}
        for entry in self.inner:
            hidden.setdefault(entry.path, []).append(entry)
        for path, (real, module) in self.first.items():
            yield Entry(path, real, module)
            yield from hidden.get(path, ())

    def named(self, path: str) -> str | None:
        """The first path of the module that ``path`` names, by any of its names.

        ``path`` may spell wrapper names out.
        """
        if path in self.aliases:
            return self.aliases[path]
        for known, (real, _) in self.first.items():
            if path == real:
                return known
        for entry in self.inner:
            if path == entry.real_path:
                return entry.path
        # A wrapper around the model itself is gone by now; its name may still be there.
        bare = ".".join(s for s in path.split(".") if s not in _WRAPPER_NAMES)
        return self.aliases.get(bare) if bare != path else None


def _walk(module: nn.Module, path: str, real: str, above: set[int]) -> Iterator[Entry]:
    """Depth first, every name of every module; none is entered inside itself."""
    yield Entry(path, real, module)
    if id(module) in above:
        return
    above = above | {id(module)}
    for name, child in module._modules.items():
        if child is None:
            continue
        real_child = f"{real}.{name}" if real else name
        if _is_wrapper(module, name):
            yield from _walk(child, path, real_child, above)
        else:
            yield from _walk(
                child, f"{path}.{name}" if path else name, real_child, above
            )
