"""The values captured by one run.

Invariants
    Records never change after the run.  They hold no reference to the model, the graph
    or the compiled program: dropping them frees what they captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch

from fxcapture.plan.plan import Plan
from fxcapture.plan.printing import preformatted

__all__ = ["RETURNED_NONE", "Captured", "Records"]

#: What a position says of itself where the module gave no value.
RETURNED_NONE = "None (the module returned None)"


@final
class Records(Mapping[str, tuple[Any, ...]]):
    """Record name to a tuple with one entry for each position.

    An entry is ``None`` where the position was not selected (or where the module itself
    returned ``None``).  Tensors are snapshots: nothing the model did later shows in
    them.  They carry gradients unless the tap said ``detach``.  Two records that ask
    for the same value in the same form share one tensor.
    """

    __slots__ = ("_paths", "_plan", "_values")

    def __init__(
        self,
        values: Mapping[str, tuple[Any, ...]],
        paths: Mapping[str, tuple[str, ...]],
        plan: Plan | None = None,
    ) -> None:
        self._values = dict(values)
        self._paths = dict(paths)
        self._plan = plan  # for printing; it mentions modules by name only

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def paths(self, name: str) -> tuple[str, ...]:
        """The module path behind each position of a record.

        A shared module stands under its first name, whichever it was called through.
        The initial position names the module whose input it is.
        """
        return self._paths[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return Records, (self._values, self._paths)

    def __repr__(self) -> str:
        slots = {r.name: r.slots for r in self._plan.records} if self._plan else {}
        lines = []
        for name, values in self._values.items():
            length = f"{len(values)} position{'s' * (len(values) != 1)}"
            # Without a plan it is not known which of the two it was.
            nothing = ", all None: not selected, or the module returned None"
            empty = name not in slots and values and all(v is None for v in values)
            lines.append(f"  {name}: {length}{nothing if empty else ''}")
            chosen = slots.get(name, (None,) * len(values))
            for i, (value, slot) in enumerate(zip(values, chosen, strict=True)):
                if value is None and slot is None:
                    continue
                path = self._paths[name][i]
                shown = (repr(path) if path else "(model)") + (
                    " (input)" if slot and slot.entry else ""
                )
                lines.append(
                    f"    [{i}] {shown}: "
                    + (RETURNED_NONE if value is None else _brief(value))
                )
        return "Records(\n" + "\n".join(lines) + "\n)" if lines else "Records()"

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_brief, value))})"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{k}={_brief(v)}" for k, v in value.items())
        return f"{type(value).__name__}({inner})"
    return repr(value)


class Captured(NamedTuple):
    """What a call of a captured model returns.

    Attributes:
        output: The model's own output; ``None`` under ``keep_output=False``.
        records: What was captured.
    """

    output: Any
    records: Records
