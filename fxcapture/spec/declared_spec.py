"""The capture spec that a model's own declarations amount to.

Invariants
    Targets are the paths of the modules as they are now, so that a spec made of a
    declaration needs none of the declaration's own rules.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fxcapture.errors import SpecError, TargetNotFoundError
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.declaration import Found, declaration, find, sub_models
from fxcapture.spec.tap import Tap

__all__ = ["declared_spec"]


def declared_spec(model: nn.Module, **select: Any) -> CaptureSpec:
    """What ``model`` and its sub-models declare that they can record, as a spec.

    Example::

        declared_spec(model, hidden_states=[0, -2])

    A record that several sub-models declare is named after each of them:
    ``encoder_hidden_states`` and ``decoder_hidden_states``.

    Args:
        model: A model with ``_can_record_outputs``, or with such sub-models.
        select: Record name to positions, for :class:`~fxcapture.spec.tap.Tap`.

    Raises:
        TargetNotFoundError: nothing is declared, or no module fits the declarations.
        SpecError: the recorders of one record name different elements, or ``select``
            names a record that is not declared.
    """
    owners = sub_models(model)
    count: dict[str, int] = {}
    for _, owner in owners:
        for record in declaration(owner):
            count[record] = count.get(record, 0) + 1
    taps: dict[str, Tap] = {}
    for path, owner in owners:
        for record in declaration(owner):
            found = [f for f in find(owner, (record,)) if f.owner is None]
            if found:
                name = record if count[record] == 1 else _name(path, record, taps)
                taps[name] = _tap(path, record, found, select.get(name))
    if not taps:
        raise TargetNotFoundError(
            f"{type(model).__name__} declares nothing that can be captured",
            why="neither it nor a sub-model has a _can_record_outputs that fits a "
            "module",
            remedy="pass a CaptureSpec, or declare _can_record_outputs on the class",
        )
    unknown = [name for name in select if name not in taps]
    if unknown:
        raise SpecError(
            f"{unknown[0]!r} is not a record of {type(model).__name__}",
            nearest=sorted(taps),
            remedy="select among the declared records",
        )
    return CaptureSpec(taps)


def _name(path: str, record: str, taken: dict[str, Tap]) -> str:
    if not path:
        return record
    short = f"{path.rsplit('.', 1)[-1]}_{record}"
    return f"{path.replace('.', '_')}_{record}" if short in taken else short


def _tap(path: str, record: str, found: list[Found], select: Any) -> Tap:
    tasks = [task for target in found for task in target.tasks]
    indices = sorted({task.element for task in tasks})
    if len(indices) > 1:
        raise SpecError(
            f"the recorders of {record!r} name the elements {indices}",
            why="one tap takes one element of each output",
            remedy="pass a CaptureSpec with a record for each element",
        )
    prefix = f"{path}." if path else ""
    return Tap(
        [f"{prefix}{target.path}" for target in found],
        output=indices[0],
        select=select,
        initial=any(task.initial for task in tasks),
        optional=True,
    )
