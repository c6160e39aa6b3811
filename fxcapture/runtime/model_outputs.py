"""Output objects of decorated calls: a mapping, a dataclass, or transformers' own.

transformers' ``ModelOutput`` is both; it counts as a mapping here, and takes names that
are no fields of it.  These functions are traced by Dynamo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "get_field",
    "has_field",
    "inject_declared",
    "inject_records",
    "to_tuple",
]


def inject_records(
    outputs: Any, records: Mapping[str, tuple[Any, ...]], *, owner: str = "the model"
) -> Any:
    """``outputs`` with ``records`` in its fields.

    Args:
        outputs: A mapping such as transformers' ``ModelOutput``, or a dataclass.
        records: Record name to entries.
        owner: Whose output it is, for the error.

    Returns:
        The same object, or a changed copy of a frozen dataclass.

    Raises:
        TypeError: the object cannot hold them.
    """
    if isinstance(outputs, dict):
        for name, entries in records.items():
            outputs[name] = entries
        return outputs
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for name in records:
            if not hasattr(outputs, name):
                raise TypeError(
                    f"{owner} returned a {type(outputs).__name__}, which has no field "
                    f"{name!r}\n  what to do: add `{name}: tuple | None = None` to the "
                    "dataclass"
                )
        if type(outputs).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return dataclasses.replace(outputs, **records)
        for name, entries in records.items():
            setattr(outputs, name, entries)
        return outputs
    raise TypeError(
        f"{owner} returned a {type(outputs).__name__}, which cannot hold the records "
        f"{', '.join(records)}\n  what to do: return a ModelOutput, a dataclass with "
        "these fields, or a dict from the decorated method"
    )


def inject_declared(
    outputs: Any,
    records: Mapping[str, tuple[Any, ...]],
    declared: Iterable[str],
    flags: Mapping[str, frozenset[int] | None],
) -> Any:
    """``outputs`` with the declared records in those of its fields that it has.

    Args:
        outputs: What the model returned.
        records: Record name to entries.
        declared: The records that the model declares; none if the spec is the user's.
        flags: What the call's flags ask of them; those that nothing is asked of are
            left out.
    """
    fields = {
        name: records[name]
        for name in declared
        if flags.get(name) != frozenset() and has_field(outputs, name)
    }
    return inject_records(outputs, fields) if fields else outputs


def to_tuple(outputs: Any) -> Any:
    """The values of an output object that are not ``None``, as a tuple."""
    if hasattr(outputs, "to_tuple"):
        return outputs.to_tuple()
    if isinstance(outputs, dict):
        return tuple([v for v in outputs.values() if v is not None])
    if dataclasses.is_dataclass(outputs):
        values = [getattr(outputs, f.name) for f in dataclasses.fields(outputs)]
        return tuple([v for v in values if v is not None])
    return outputs


def has_field(outputs: Any, name: str) -> bool:
    """Whether the output object knows ``name``."""
    return name in outputs if type(outputs) is dict else hasattr(outputs, name)


def get_field(outputs: Any, name: str) -> Any:
    """The value under ``name``."""
    return outputs[name] if type(outputs) is dict else getattr(outputs, name)
