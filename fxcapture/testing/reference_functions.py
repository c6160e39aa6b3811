"""The eager reference for function calls inside of modules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, final

from torch import nn

from fxcapture.inspect.hearing import HeardCall, hearing
from fxcapture.plan.match import Match
from fxcapture.spec.function import Function, module_of, site_path
from fxcapture.spec.module_table import ModuleTable

__all__ = ["Heard", "hearing_taps"]


@final
@dataclasses.dataclass(slots=True)
class Heard:
    """One function call that a spec may take.

    Attributes:
        path: Its path.
        call: The call.
        entries: Copies of the arguments asked for.
        result: A copy of what it returned.
    """

    path: str
    call: HeardCall
    entries: dict[int | str, Any]
    result: Any

    def is_taken_by(self, function: Function) -> bool:
        """Whether a tap takes it; asked when the run has ended."""
        if function.index is None:
            return True
        total = self.call.counts[function.name] if function.index < 0 else 0
        return self.call.index == function.index + total


@final
class _Notes:
    def __init__(
        self, bound: Match, seen: list[Any], copied: Callable[[Any], Any]
    ) -> None:
        self._bound = bound
        self._seen = seen
        self._copied = copied

    def begins(self, call: HeardCall) -> Any:
        wanted = self._bound.entries.get(site_path(call.path, call.name), ())
        return {w: self._copied(call.argument(w)) for w in wanted}

    def ended(self, call: HeardCall, begun: Any, result: Any) -> None:
        path = site_path(call.path, call.name)
        if path in self._bound.entries:
            self._seen.append(Heard(path, call, begun, self._copied(result)))


@contextlib.contextmanager
def hearing_taps(
    model: nn.Module, bound: Match, seen: list[Any], copied: Callable[[Any], Any]
) -> Iterator[None]:
    """A time in which the function calls that a spec takes are noted.

    Args:
        model: The model.
        bound: A spec bound to it.
        seen: Receives a :class:`Heard` for each, in the order in which they return.
        copied: Copies a value.
    """
    if not bound.functions:
        yield
        return
    wanted = {module_of(path) for path in bound.entries if "::" in path}
    table = ModuleTable(model)
    paths = {id(table.first[path][1]): path for path in table.first if path in wanted}
    with hearing(model, paths, _Notes(bound, seen, copied)):
        yield
