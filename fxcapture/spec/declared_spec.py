"""The capture spec that a model's own declarations amount to.

Invariants
    Targets are the paths of the modules as they are now, so that a spec made of a
    declaration needs none of the declaration's own rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fxcapture.errors import SpecError, TargetNotFoundError
from fxcapture.spec.attention import Attention
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.declaration import (
    Found,
    declaration,
    find,
    holds_weights,
    sub_models,
)
from fxcapture.spec.function import Function, site_path
from fxcapture.spec.recorded import Recorded
from fxcapture.spec.tap import Tap

__all__ = ["declared_records", "declared_spec", "record_spec"]


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
    taps, _ = declared_records(model)
    unknown = [name for name in select if name not in taps]
    if unknown:
        raise SpecError(
            f"{unknown[0]!r} is not a record of {type(model).__name__}",
            nearest=sorted(taps),
            remedy="select among the declared records",
        )
    return CaptureSpec({n: t.with_select(select.get(n)) for n, t in taps.items()})


def declared_records(model: nn.Module) -> tuple[CaptureSpec, dict[str, str]]:
    """The same with every position, and for each tap the record as it was declared."""
    owners = sub_models(model)
    count: dict[str, int] = {}
    for _, owner in owners:
        for record in declaration(owner):
            count[record] = count.get(record, 0) + 1
    taps: dict[str, Tap] = {}
    records: dict[str, str] = {}
    for path, owner in owners:
        for record in declaration(owner):
            found = [f for f in find(owner, (record,)) if not f.nested]
            if found:
                name = record if count[record] == 1 else _name(path, record, taps)
                taps[name] = _tap(path, record, found)
                records[name] = record
    if not taps:
        raise _nothing_declared(model)
    return CaptureSpec(taps), records


def _nothing_declared(model: nn.Module) -> TargetNotFoundError:
    target, example = _near_example(model)
    return TargetNotFoundError(
        f"{type(model).__name__} declares nothing that can be captured",
        why="without a spec, what the model declares is captured: _can_record_outputs "
        "on its class, a dict of record names to the classes of modules; neither it "
        "nor a sub-model has one that fits a module",
        remedy=f'pass a spec: a dict such as {{"states": fxcapture.Tap({target!r})}}; '
        f'or declare _can_record_outputs = {{"states": {example}}} on the class',
    )


def _near_example(model: nn.Module) -> tuple[str, str]:
    """A target that fits a model, and the name of a class that it matches.

    The blocks of the model, if it has a list of them.
    """
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            return f"{path}.*" if path else "*", type(module[0]).__name__
    for name, module in model.named_children():
        return name, type(module).__name__
    return "", type(model).__name__


def record_spec(model: nn.Module, records: Iterable[str]) -> CaptureSpec:
    """What a decorated call of ``model`` captures; records without modules left out.

    It says all that the declaration says, and is for this package alone.
    """
    taps = {}
    for record in records:
        # By path, since a wrapper stands for what it wraps.
        found = {
            f.path: f for f in find(model, (record,)) if not (f.nested and f.enclosed)
        }
        if found:
            function = _function(record, found.values())
            initial = [p for p, f in found.items() if any(t.initial for t in f.tasks)]
            weights = holds_weights(record) and function is None
            taps[record] = Tap(
                list(found),
                recorded=Recorded(
                    elements=tuple(
                        (
                            path
                            if function is None
                            else site_path(path, function.name),
                            tuple(task.element for task in f.tasks),
                        )
                        for path, f in found.items()
                    ),
                    initial=frozenset(initial),
                    keeps=record == "hidden_states",
                    fused=frozenset(path for path, f in found.items() if f.fused),
                    eager=frozenset(path for path, f in found.items() if f.eager),
                ),
                initial=bool(initial),
                attention=Attention() if weights else None,
                optional=True,
                function=function,
            )
    return CaptureSpec(taps)


def _function(record: str, found: Iterable[Found]) -> Function | None:
    """The function calls that all recorders of a record name; ``None`` for none.

    Raises:
        SpecError: they name different ones.
    """
    written = {task.function for target in found for task in target.tasks}
    if len(written) > 1:
        shown = ", ".join(sorted(map(repr, written)))
        raise SpecError(
            f"the recorders of {record!r} name different functions: {shown}",
            why="the entries of a record are values of one kind",
            remedy="declare one record for each function",
        )
    [name] = written
    return None if name is None else Function.of(name)


def _name(path: str, record: str, taken: dict[str, Tap]) -> str:
    if not path:
        return record
    short = f"{path.rsplit('.', 1)[-1]}_{record}"
    return f"{path.replace('.', '_')}_{record}" if short in taken else short


def _tap(path: str, record: str, found: list[Found]) -> Tap:
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
        initial=any(task.initial for task in tasks),
        optional=True,
        function=_function(record, found),
    )
