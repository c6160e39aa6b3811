"""The spec that a command line or a file spells out.

Invariants
    A file imports nothing but what ``--trust`` names.  What ``--tap`` names is trusted:
    it stands on the command line, as the model's factory does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fxcapture.cli.values import UsageError, read_file, scalar, split_outside_brackets
from fxcapture.errors import SpecError, nearest
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.stored import Trust, trusting
from fxcapture.spec.tap import Tap

__all__ = ["load_spec", "parse_tap"]


def load_spec(
    file: Path | None, taps: Sequence[str], trust: Sequence[str] = ()
) -> CaptureSpec:
    """A spec from a file, from ``--tap`` options, or both together.

    Args:
        file: A JSON or YAML file.
        taps: Texts of ``--tap``.
        trust: Modules whose objects the file may name.

    Raises:
        UsageError: there is none, or a text is no valid tap.
        RecordNameError: two records have one name.
    """
    pairs: list[tuple[str, Tap]] = []
    if file is not None:
        pairs += _spec_of(read_file(file), str(file), _trusting(trust))
    pairs += [parse_tap(text) for text in taps]
    if not pairs:
        raise UsageError(
            "no spec: what should be captured?",
            "pass --tap 'hidden=model.layers.*,output=0,select=[0,-2]' or --spec FILE",
        )
    return CaptureSpec(pairs)


def _trusting(trust: Sequence[str]) -> Trust:
    try:
        return trusting(trust)
    except SpecError as error:
        raise UsageError(
            f"--trust names no module: {error.why}", "write --trust package.module"
        ) from error


def _spec_of(data: Any, where: str, trust: Trust) -> Iterator[tuple[str, Tap]]:
    """The taps of a stored spec, or of a plain mapping of name to target or fields."""
    if isinstance(data, Mapping) and "taps" in data:
        data = data["taps"]
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{where} holds no spec", "write a mapping of record name to tap"
        )
    for name, fields in data.items():
        if isinstance(fields, (str, list)):
            fields = {"target": fields}
        if not isinstance(fields, Mapping) or "target" not in fields:
            raise UsageError(
                f"{where}: record {name!r} has no target",
                "write {target: model.layers.*, output: 0, select: [0, -2]}",
            )
        yield name, _tap(dict(fields), f"{where}: record {name!r}", trust)


_FLAGS = ("initial", "detach", "optional")
_FIELDS = ("output", "select", "layer_name", "point", "reduce", "dtype", "device")
#: ``package.module:name``, and neither a regular expression nor an escaped colon.
_NAMES_AN_OBJECT = re.compile(r"(?!re:)[^\\:]*:(?!:)")
#: Fields that ``CaptureSpec.to_json`` writes and that nobody writes by hand.
_STORED = ("attention",)


def parse_tap(text: str) -> tuple[str, Tap]:
    """``NAME=TARGET[,FIELD=VALUE|FLAG]...`` as a name and a tap.

    Example::

        hidden=model.layers.*,output=0,select=[0,-2],initial

    Raises:
        UsageError: the text is not of this form, or a field's value is not valid.
    """
    name, equals, rest = text.partition("=")
    parts = split_outside_brackets(rest)
    if not equals or not name.strip() or not parts[0]:
        raise UsageError(
            f"--tap {text!r} is no tap",
            "write name=target,field=value,..., such as "
            "'hidden=model.layers.*,output=0,select=[0,-2],initial'",
        )
    fields: dict[str, Any] = {"target": _targets(parts[0])}
    for part in parts[1:]:
        key, equals, value = (p.strip() for p in part.partition("="))
        if key in _FLAGS and not equals:
            fields[key] = True
        elif key in (*_FIELDS, *_FLAGS) and equals:
            fields[key] = scalar(value)
        elif key in _FIELDS:
            raise UsageError(
                f"--tap {text!r}: {key} has no value", f"write {key}=value"
            )
        else:
            raise _no_field(key, f"--tap {text!r}")
    return name.strip(), _tap(fields, f"--tap {text!r}", None)


def _no_field(key: str, where: str) -> UsageError:
    near = ", ".join(nearest(key, (*_FIELDS, *_FLAGS)))
    return UsageError(
        f"{where}: {key!r} is no field of a tap",
        f"did you mean: {near}?" if near else f"fields: {', '.join(_FIELDS + _FLAGS)}",
    )


def _tap(fields: dict[str, Any], where: str, trust: Trust | None) -> Tap:
    """A tap of fields as people write them; without ``trust``, all it names is."""
    for key in fields:
        if key not in ("target", *_FIELDS, *_FLAGS, *_STORED):
            raise _no_field(key, where)
    target = fields["target"]
    targets = target if isinstance(target, list) else [target]
    fields["target"] = [_target(t, where, trust) for t in targets]
    select = fields.get("select")
    if isinstance(select, str) and re.fullmatch(r"-?\d*(:-?\d*){1,2}", select):
        bounds = [int(b) if b else None for b in select.split(":")]
        fields["select"] = {"slice": bounds + [None] * (3 - len(bounds))}
    if isinstance(fields.get("reduce"), str) and ":" in fields["reduce"]:
        fields["reduce"] = {"object": fields["reduce"]}
    if fields.get("dtype") is not None:
        fields["dtype"] = _dtype(fields["dtype"], where)
    try:
        named = [fields.get("reduce"), *fields["target"]] if trust is None else []
        told = [n["object"].partition(":")[0] for n in named if isinstance(n, Mapping)]
        return Tap.from_json(fields, trust or told)
    except Exception as error:
        raise UsageError(f"{where}: {error}") from error


def _dtype(text: Any, where: str) -> str:
    name = str(text).removeprefix("torch.")
    if not isinstance(getattr(torch, name, None), torch.dtype):
        known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        near = ", ".join(nearest(name, known))
        raise UsageError(
            f"{where}: {name!r} is no dtype",
            f"did you mean: {near}?" if near else "write float32, bfloat16, ...",
        )
    return name


def _targets(text: str) -> Any:
    """One target, or those of a list in brackets; text, also where it is a number."""
    if text.startswith("[") and text.endswith("]"):
        return split_outside_brackets(text[1:-1])
    return text


def _target(target: Any, where: str, trust: Trust | None) -> Any:
    if not isinstance(target, (str, Mapping)):
        raise UsageError(
            f"{where}: target {target!r} is of type {type(target).__name__}",
            "write a path, a glob, a class name, or a list of these",
        )
    if not isinstance(target, str) or not _NAMES_AN_OBJECT.match(target):
        return target
    if trust is None:
        try:
            Trust((target.partition(":")[0],)).load(target)
        except Exception as error:
            raise UsageError(
                f"{where}: target {target!r} cannot be imported: {error}",
                "write package.module:Class, a path, a glob or a class name",
            ) from error
    return {"object": target}
