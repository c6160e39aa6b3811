"""The values captured by one run.

Invariants
    Records never change after the run.  They hold no reference to the model, the graph
    or the compiled program: dropping them frees what they captured.
    Two records that name one value hold it once until somebody looks at both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch

from fxcapture.errors import CaptureError
from fxcapture.plan.plan import Plan
from fxcapture.plan.printing import preformatted
from fxcapture.plan.records_file import flatten, read_records, write_records
from fxcapture.trace.structure_text import map_tensors

__all__ = ["RETURNED_NONE", "Captured", "Records", "load_records"]

#: What a position says of itself where the module gave no value.
RETURNED_NONE = "None (the module returned None)"


@final
class Records(Mapping[str, tuple[Any, ...]]):
    """Record name to a tuple with one entry for each position.

    An entry is ``None`` where the position was not selected (or where the module itself
    returned ``None``).  Tensors are snapshots: nothing the model did later shows in
    them.  They carry gradients unless the tap said ``detach``.

    No two records share memory, so that they can be handed to any writer: where two
    name the same value in the same form, the second is copied when it is first asked
    for.  A tensor that requires grad is not copied, since gradients are those of the
    one that the model used.

    ``pickle``, ``copy.deepcopy``, ``torch.save`` and ``torch.load`` (with its safe
    default) take records.  Tensors of a copy are leaves: the autograd graph is not
    copied.
    """

    __slots__ = ("_inputs", "_paths", "_plan", "_shared", "_values")

    def __init__(
        self,
        values: Mapping[str, tuple[Any, ...]],
        paths: Mapping[str, tuple[str, ...]],
        plan: Plan | None = None,
        inputs: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        #: Without a plan: record name to the positions that are inputs, for printing.
        self._inputs = inputs or {}
        self._values = dict(values)
        self._paths = dict(paths)
        self._plan = plan  # for printing; it mentions modules by name only
        #: Record name to the positions whose value an earlier one holds.
        self._shared: Mapping[str, frozenset[int]] = plan.repeated if plan else {}

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        if name in self._shared:
            self._part(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _part(self, name: str) -> None:
        """Give a record memory of its own."""
        positions = self._shared[name]
        self._values[name] = tuple(
            [
                map_tensors(value, _own) if i in positions else value
                for i, value in enumerate(self._values[name])
            ]
        )
        self._shared = {n: p for n, p in self._shared.items() if n != name}

    def paths(self, name: str) -> tuple[str, ...]:
        """The module path behind each position of a record.

        A shared module stands under its first name, whichever it was called through.
        The initial position names the module whose input it is.
        """
        return self._paths[name]

    def to(self, *args: Any, **kwargs: Any) -> Records:
        """Records whose tensors went through ``torch.Tensor.to``.

        Args:
            *args: As of ``torch.Tensor.to``: a device, a dtype, or both.
            **kwargs: Its keywords.  A dtype changes floating-point tensors alone.

        Returns:
            New records.  A tensor that is as asked for already is the same one.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.to(*args, **kwargs)
            if moved.dtype == tensor.dtype or tensor.is_floating_point():
                return moved
            return tensor.to(moved.device)

        return self._mapped(move)

    def cpu(self) -> Records:
        """Records whose tensors are on the host."""
        return self._mapped(lambda tensor: tensor.cpu())

    def numpy(self) -> dict[str, tuple[Any, ...]]:
        """Record name to entries, with NumPy arrays for tensors.

        An array of a tensor on the host shares its memory.  Gradients are left behind.

        Raises:
            CaptureError: NumPy has no such dtype.
        """

        def array(tensor: torch.Tensor) -> Any:
            try:
                return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
            except TypeError as error:
                raise CaptureError(
                    f"a tensor of {tensor.dtype} cannot become a NumPy array",
                    why="NumPy has no such dtype",
                    remedy="convert first: records.to(torch.float32).numpy()",
                ) from error

        return {
            name: tuple([map_tensors(value, array) for value in self[name]])
            for name in self
        }

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor by a name of its own, as writers of tensors take them.

        The name is ``record/position``, and ``record/position/i`` for the i-th tensor
        of an entry that is a container.  Tensors are not copied.

        Raises:
            CaptureError: two would have one name, as ``a/0`` is a record's name.
        """
        return flatten(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which :func:`load_records` reads.

        Names, paths, structure and selection go with the tensors; a tensor that stands
        in two places is written once.  Other readers of safetensors find the tensors
        under the names of :meth:`as_dict`.  No package but torch is needed.

        Args:
            path: Where to; a file that is there is replaced when all is written.

        Raises:
            CaptureError: a tensor has no place in the format, such as a sparse one.
            OSError: the file cannot be written.
        """
        write_records(path, self._values, self._paths, self._plan)

    def _mapped(self, change: Callable[[torch.Tensor], Any]) -> Records:
        values = {
            name: tuple([map_tensors(value, change) for value in entries])
            for name, entries in self._values.items()
        }
        made = Records(values, self._paths, self._plan, self._inputs)
        made._shared = self._shared
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Records, (self._values, self._paths)

    def __deepcopy__(self, memo: Any) -> Records:
        return self._mapped(
            lambda t: t.detach().clone().requires_grad_(t.requires_grad)
        )

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
                entry = slot.entry if slot else i in self._inputs.get(name, ())
                shown = (repr(path) if path else "(model)") + " (input)" * entry
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


def load_records(path: str | os.PathLike[str], *, trust: Iterable[str] = ()) -> Records:
    """The records that :meth:`Records.save` has written.

    The file may be anybody's: reading it imports and runs nothing.

    Args:
        path: The file.
        trust: Modules whose container classes may be imported, see :func:`load`.
            Without it a class that is loaded already is used; a plain container with
            the same fields stands in for any other.

    Returns:
        The records, on the CPU, each tensor in memory of its own.

    Raises:
        CaptureError: the file is no such file, or is damaged.
        OSError: it cannot be read.
    """
    return Records(*read_records(path, trust))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


# torch.load, by default, makes objects of classes that are known to be harmless.
torch.serialization.add_safe_globals([Records])


class Captured(NamedTuple):
    """What a call of a captured model returns.

    Attributes:
        output: The model's own output; ``None`` under ``keep_output=False``.
        records: What was captured.
    """

    output: Any
    records: Records
