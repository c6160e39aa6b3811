"""What an ``output_<name>`` flag asks for, in one canonical form.

Terms
    request: ``False`` (nothing), ``True`` (every entry), or a frozenset of positions,
        negative ones still unresolved.
    positions: places in the full tuple that ``True`` would give.

Invariants
    Every spelling of one selection becomes the same request.  The functions up to
    ``spell`` are traced by Dynamo, where an int of the caller may be symbolic:
    positions reach plain Python as a frozenset, which specialises them.  (On torch 2.13
    a test ``i in positions`` with a tuple of symbolic ints is traced as False.)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from fxcapture.errors import SpecTypeError

__all__ = ["Request", "flag_name", "request", "selections", "spell"]

Request = bool | frozenset[int]

#: Records that follow another record's flag, as they do in transformers.
_FOLLOWS = {"cross_attentions": "attentions", "mask_decoder_attentions": "attentions"}


def flag_name(record: str) -> str:
    """The keyword that asks for ``record``."""
    return "output_" + _FOLLOWS.get(record, record)


def request(flag: str, value: Any) -> Request:
    """What ``flag=value`` asks for.

    Args:
        flag: The keyword, for the error.
        value: ``None``, a bool, an int, or an iterable of ints.  Anything with
            ``__index__`` counts as an int; inside an iterable a bool does too.  The int
            0 selects position 0, while ``False`` and an empty iterable select nothing.

    Raises:
        SpecTypeError: it is something else; the text names the flag and the value.
    """
    if value is None or value is False:
        return False
    if value is True:
        return True
    if isinstance(value, int):
        return frozenset((value,))
    if isinstance(value, (str, bytes, float, Mapping, slice)):
        raise _bad_flag(flag, value)
    if torch.compiler.is_dynamo_compiling():
        items = frozenset(value)
        return items if items else False
    return _request_of_object(flag, value)


def _request_of_object(flag: str, value: Any) -> Request:
    if getattr(value, "shape", None) == () and "bool" in str(
        getattr(value, "dtype", "")
    ):
        return bool(value)  # np.bool_ and 0-d boolean tensors
    try:
        return frozenset((operator.index(value),))
    except TypeError:
        pass
    try:
        items = list(value)
    except TypeError:
        raise _bad_flag(flag, value) from None
    return frozenset([_index(flag, value, item) for item in items]) or False


def _index(flag: str, value: Any, item: Any) -> int:
    # A one-element array has ``__index__`` as well, but is a nested list to the user.
    if getattr(item, "shape", ()) == ():
        if "bool" in str(getattr(item, "dtype", "")):
            return int(bool(item))
        try:
            return operator.index(item)
        except TypeError:
            pass
    raise _bad_flag(flag, value, item)


def _bad_flag(flag: str, value: Any, item: Any = None) -> SpecTypeError:
    culprit = value if item is None else item
    why = f"{culprit!r} is of type {type(culprit).__name__}, which is no position"
    return SpecTypeError(
        f"{flag}={value!r} is not a selection",
        why=why,
        remedy="pass True, False, an int, or a list of ints; negative ones count from "
        "the end",
    )


def spell(value: Any, positions: Request) -> Any:
    """``value`` as it may be handed on to the model's own forward.

    A one-shot iterator has been used up by :func:`request`, and an array has no truth
    value; both become a tuple.  What the model could handle before stays as it is.
    """
    if isinstance(value, (bool, int, list, tuple)) or isinstance(positions, bool):
        return value if isinstance(value, (int, list, tuple)) else positions
    return tuple(sorted(positions))


def selections(
    records: Mapping[str, str], kwargs: dict[str, Any]
) -> dict[str, frozenset[int] | None]:
    """What the flags of a call ask of a captured declared model, as selections.

    Args:
        records: Record name to the name that it was declared by, which its flag has.
        kwargs: The call's keywords; flags are taken out, since they would make the
            model collect for itself, in a trace for each selection.

    Returns:
        Record name to positions (``None``: every one), where a flag was given.

    Raises:
        SpecTypeError: a flag's value is no selection.
    """
    flags = {name: flag_name(record) for name, record in records.items()}
    found: dict[str, frozenset[int] | None] = {}
    for name, flag in flags.items():
        value = kwargs.get(flag)
        if value is not None:
            asked = request(flag, value)
            if isinstance(asked, bool):
                found[name] = None if asked else frozenset()
            else:
                found[name] = asked
    for flag in flags.values():
        kwargs.pop(flag, None)
    return found
