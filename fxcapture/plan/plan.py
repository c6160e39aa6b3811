"""A plan: which value of which site feeds which position of which record.

Terms
    leaf: one tensor to bring out of a graph: a tensor of one of a site's marks, and
        the treatment (detach, dtype, device) of the tap that asked for it.
    slot: one position of a record.

Invariants
    A plan is frozen and mentions nodes and modules by name only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from fxcapture.trace.mark import ENTRY, RESULT
from fxcapture.trace.structure import Structure

__all__ = [
    "Leaf",
    "Plan",
    "RecordPlan",
    "Slot",
    "precedes_hooks",
    "treat",
    "treatment",
]


def treatment(
    detach: bool,
    dtype: torch.dtype | None,
    device: torch.device | None,
    floating: bool,
) -> list[tuple[str, dict[str, Any]]]:
    """The methods, with their keywords, by which a tensor becomes what a tap wants.

    The one place that says so: run on tensors by :func:`treat`, eagerly and in traces,
    and written as nodes by ``passes.insert_taps``.

    Args:
        detach: Cut it from autograd.
        dtype: Cast it to this, if it is of a floating-point dtype.
        device: Move it there.
        floating: Whether it is of one.
    """
    steps: list[tuple[str, dict[str, Any]]] = []
    if detach:
        steps.append(("detach", {}))
    options: dict[str, Any] = {}
    if dtype is not None and floating:
        options["dtype"] = dtype
    if device is not None:
        options["device"] = device
    if options:
        steps.append(("to", options))
    return steps


def treat(
    value: torch.Tensor,
    detach: bool,
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> torch.Tensor:
    """A tensor after its treatment; itself where there is nothing to do."""
    for method, options in treatment(detach, dtype, device, value.is_floating_point()):
        value = getattr(value, method)(**options)
    return value


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of one site, as one tap wants it.

    Attributes:
        kind: The kind of the mark that holds it, see :mod:`fxcapture.trace.mark`: a
            ``"result"`` tensor is the model's own, any other was made for the capture.
        index: Its place among the mark's tensors.
        detach: Cut it from autograd.
        dtype: Cast to it if it is of a floating-point dtype.
        device: Move it there.
    """

    kind: str
    index: int
    detach: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is what the module returned or received, as it is."""
        treated = self.detach or self.dtype is not None or self.device is not None
        return self.kind in (RESULT, ENTRY) and not treated

    @property
    def precedes_hooks(self) -> bool:
        """Whether it stands in the first part of a call that has forward hooks."""
        return precedes_hooks(self.kind)

    def snapshot(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` after detach, dtype and device, as a tensor of its own."""
        value = treat(value, self.detach, None, None)
        treated = treat(value, False, self.dtype, self.device)
        return treated.clone() if treated is value else treated


def precedes_hooks(kind: str) -> bool:
    """Whether marks of a kind stand in front of a call's forward hooks."""
    return kind.split(" ")[0] in (ENTRY, "received", "weights")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One recorded position.

    Attributes:
        site: Index into the site table.
        kind: The kind of the marks that hold the value.
        structure: Shape of the value.
        leaves: For each tensor leaf of ``structure``, its index there and the leaf.
        sizes: Integer leaves of ``structure``, as indices into the mark's.
    """

    site: int
    kind: str
    structure: Structure
    leaves: tuple[tuple[int, Leaf], ...]
    sizes: tuple[int, ...]

    @property
    def entry(self) -> bool:
        """Whether the value is what the module received."""
        return self.kind.split(" ")[0] in (ENTRY, "received")

    @property
    def precedes_hooks(self) -> bool:
        """Whether the value stands in the first part of a call with forward hooks."""
        return precedes_hooks(self.kind)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """One record: a slot for each position, ``None`` where not selected."""

    name: str
    paths: tuple[str, ...]
    slots: tuple[Slot | None, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every slot of every record comes from.

    Attributes:
        records: The records.
        repeated: Record name to the positions that hold a value which an earlier slot
            holds already.
    """

    records: tuple[RecordPlan, ...]
    repeated: Mapping[str, frozenset[int]] = dataclasses.field(
        init=False, compare=False
    )

    def __post_init__(self) -> None:
        seen: set[tuple[int, Leaf]] = set()
        repeated: dict[str, frozenset[int]] = {}
        for record in self.records:
            for i, slot in enumerate(record.slots):
                own = {(slot.site, leaf) for _, leaf in slot.leaves} if slot else set()
                if seen & own:
                    before = repeated.get(record.name, frozenset())
                    repeated[record.name] = before | {i}
                seen |= own
        object.__setattr__(self, "repeated", repeated)

    def wanted(self) -> dict[int, dict[Leaf, None]]:
        """Site index to the leaves to bring out, in order, each once."""
        wanted: dict[int, dict[Leaf, None]] = {}
        for slot in self.slots():
            leaves = wanted.setdefault(slot.site, {})
            for _, leaf in slot.leaves:
                leaves.setdefault(leaf)
        return wanted

    def wanted_sizes(self) -> dict[int, dict[tuple[str, int], None]]:
        """Site index to the integer leaves (kind, index) that the records need."""
        wanted: dict[int, dict[tuple[str, int], None]] = {}
        for slot in self.slots():
            sizes = wanted.setdefault(slot.site, {})
            sizes.update(dict.fromkeys((slot.kind, i) for i in slot.sizes))
        return wanted

    def slots(self) -> Iterator[Slot]:
        """Every recorded position."""
        for record in self.records:
            yield from (slot for slot in record.slots if slot is not None)
