"""The hooks that a model had when its code was compiled.

A hook, or that there is none, is compiled in, and torch by default does not look again:
a hook that is registered later would not run, and one that was removed would run on.

Invariants
    To ask whether the hooks may be others costs the same for models of any size: one
    number, which grows with each hook that is registered anywhere in the process, and
    the lengths of the tables that had hooks, since removing one moves no number.
    Modules are walked when these have moved, and then only.
    A table that is written to directly, past torch's functions, is not noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from fxcapture import _torch

__all__ = ["HookState"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HookState:
    """Which hooks stood on a model's modules, and on all modules, at one moment.

    Attributes:
        made: How many hooks had been made in the process.
        tables: The tables with hooks in them.
        hooks: The hooks of each, by numbers that no other hook of the process has.
    """

    made: int
    tables: tuple[Mapping[int, Any], ...]
    hooks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> HookState:
        """The state of a model now."""
        made = _torch.hooks_made()  # first: a hook that comes meanwhile is looked for
        tables = tuple(_torch.hook_tables(model))
        return cls(made=made, tables=tables, hooks=tuple([tuple(t) for t in tables]))

    def may_differ(self) -> bool:
        """Whether the model's hooks may be others by now; costs next to nothing."""
        return self.made != _torch.hooks_made() or any(
            len(t) != len(ids) for t, ids in zip(self.tables, self.hooks, strict=True)
        )
