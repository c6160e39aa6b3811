"""The options that several commands share, as annotated types."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Arg",
    "Backend",
    "Batch",
    "Config",
    "Debug",
    "Format",
    "Input",
    "Json",
    "Length",
    "Model",
    "Set",
    "SpecFile",
    "Taps",
]


class Format(StrEnum):
    """How ``explain`` draws."""

    TEXT = "text"
    SVG = "svg"
    DOT = "dot"


Model = Annotated[str, typer.Argument(help="package.module:factory or a class name")]
Config = Annotated[
    Path | None, typer.Option(help="JSON file with a transformers configuration")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value: a configuration field or factory keyword"),
]
Input = Annotated[
    list[str] | None,
    typer.Option("--input", help=r"name=dtype\[sizes], e.g. input_ids=int64\[2,16]"),
]
Arg = Annotated[
    list[str] | None,
    typer.Option("--arg", help="name=value: another keyword argument of the call"),
]
Batch = Annotated[int, typer.Option(min=1, help="batch size of inputs made up")]
Length = Annotated[int, typer.Option(min=1, help="tokens of inputs made up")]
SpecFile = Annotated[
    Path | None, typer.Option("--spec", help="JSON or YAML file with the spec")
]
Taps = Annotated[
    list[str] | None,
    typer.Option(
        "--tap",
        help=r"name=target,field=value,..., as in "
        r"'h=layers.*,output=0,select=\[0,-2],initial'",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]
Backend = Annotated[str, typer.Option(help="a backend of torch.compile")]
