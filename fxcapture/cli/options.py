"""The options that several commands share, each spelled once.

Terms
    group: a frozen dataclass whose fields are options that belong together.  A command
        takes a group as one argument; on the command line its fields are options.

Invariants
    An option that two commands have is the same in both: name, default and help.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, final, get_type_hints

import typer

__all__ = [
    "Backend",
    "Debug",
    "Format",
    "Json",
    "ModelOptions",
    "SpecOptions",
    "grouped",
]


class Format(StrEnum):
    """How ``explain`` draws."""

    TEXT = "text"
    SVG = "svg"
    DOT = "dot"


Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks and logs")]
Backend = Annotated[str, typer.Option(help="a backend of torch.compile")]

# Help is written for 80 columns: a word that is longer than its column is cut.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and which inputs."""

    model: Annotated[str, typer.Argument(help="package.module:factory or a class name")]
    config: Annotated[
        Path | None, typer.Option(help="JSON file with a transformers configuration")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value: a configuration field or factory keyword"
        ),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help=r"name=dtype\[sizes], as in x=float32\[2,8]"),
    ] = None
    keywords: Annotated[
        list[str] | None,
        typer.Option("--arg", help="name=value: another keyword argument of the call"),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="batch size of inputs made up")] = 1
    length: Annotated[int, typer.Option(min=1, help="tokens of inputs made up")] = 16
    train: Annotated[
        bool, typer.Option("--train", help="training mode; otherwise evaluation")
    ] = False


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """What to capture."""

    spec: Annotated[
        Path | None, typer.Option("--spec", help="JSON or YAML file with the spec")
    ] = None
    taps: Annotated[
        list[str] | None,
        typer.Option(
            "--tap",
            help=r"name=target,field=value..., as in h=layers.*,output=0; a field may "
            r"be select=\[0,-2] or initial",
        ),
    ] = None
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            help="package or module whose code the spec's file may name; runs it",
        ),
    ] = None


_GROUPS = (ModelOptions, SpecOptions)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its groups as parameters, which is what typer reads.

    Example::

        @app.command()
        @grouped
        def sites(call: ModelOptions, *, as_json: Json = False) -> None: ...
    """
    hints = get_type_hints(command, include_extras=True)
    members: dict[str, tuple[str, ...]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if hints[name] in _GROUPS:
            own = _parameters(hints[name])
            members[name] = tuple(p.name for p in own)
            parameters += own
        else:
            parameters.append(
                parameter.replace(
                    annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY
                )
            )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        groups = {
            name: hints[name](**{field: given.pop(field) for field in fields})
            for name, fields in members.items()
        }
        command(**groups, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    # typer looks through ``__wrapped__`` and would find the groups again.
    del run.__wrapped__
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
