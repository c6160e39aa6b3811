"""How commands speak: results, progress, and errors with their exit codes.

Exit codes
    0  done
    1  done, and the answer is no: a record or the output differs from the reference
    2  what was given cannot be used: options, the model's name, the spec
    3  the model cannot be captured as asked, or it raised

Invariants
    Results go to standard output, everything else to standard error, also what a
    model or torch prints; with ``--json`` standard output is one JSON document.
    A mistake of the user's gives no traceback (``--debug`` does).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxcapture.cli.values import UsageError
from fxcapture.errors import (
    FxCaptureError,
    SpecError,
    TargetError,
    TargetNotFoundError,
)

__all__ = [
    "console",
    "needed",
    "print_json",
    "print_note",
    "print_table",
    "reported",
    "working",
    "writable",
]

#: For everything that is no result.
console = Console(stderr=True)


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn errors into messages and exit codes, and keep torch's logs away."""
    torch.manual_seed(0)
    before = logging.root.manager.disable
    if not debug:
        # Torch logs the traceback of what fails on fake tensors, and then raises it.
        logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            raise
        text, code = _explained(error)
        console.print(f"[bold red]error[/]: {escape(text)}", soft_wrap=True)
        raise typer.Exit(code) from error
    finally:
        logging.disable(before)


#: What library errors advise, and how one says it on a command line.
_IN_OPTIONS = (
    ("pass optional=True", "add optional to the tap: --tap name=target,optional"),
    ("output=None", "leaving output out"),
    ("(model.named_modules() lists them)", "(fxcapture sites lists those that run)"),
    ("CapturedModule.sites lists", "fxcapture explain shows"),
    ("fxcapture.compile", "fxcapture verify, explain or bench"),
)


def in_options(text: str) -> str:
    """An error's text with its advice in the command line's own options."""
    head, arrow, advice = text.rpartition("  what to do: ")
    for python, option in _IN_OPTIONS:
        advice = advice.replace(python, option)
    return head + arrow + advice


def _with_globs(error: TargetNotFoundError) -> str:
    """The text, with globs for matches that differ in a number if a glob was asked."""
    text = in_options(str(error))
    if "*" not in error.what:
        return text
    globs = [re.sub(r"(?<=['.])\d+(?=['.])", "*", match) for match in error.nearest]
    near = [
        glob if globs.count(glob) > 1 else match
        for glob, match in zip(globs, error.nearest, strict=True)
    ]
    return text.replace(", ".join(error.nearest), ", ".join(dict.fromkeys(near)))


def _explained(error: Exception) -> tuple[str, int]:
    text = in_options(str(error)) if isinstance(error, FxCaptureError) else str(error)
    if isinstance(error, TargetNotFoundError):
        text = _with_globs(error)
        return f"{text}\n  see also: fxcapture sites lists what the model calls", 2
    if isinstance(error, (UsageError, SpecError, TargetError)):
        return text, 2
    if isinstance(error, FxCaptureError):
        return text, 3
    return (
        f"the model raised {type(error).__name__}: {text}\n"
        "  what to do: run with --debug for the traceback"
    ), 3


@contextlib.contextmanager
def working(on: str) -> Iterator[None]:
    """Show that something is going on; what it prints is no result."""
    with console.status(on), contextlib.redirect_stdout(sys.stderr):
        yield


def writable(path: Path | None) -> None:
    """Find out before the work whether its result can be written.

    Raises:
        UsageError: ``path`` is a directory, or stands in none that exists.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a directory")
    if not path.parent.is_dir():
        raise UsageError(
            f"{path} cannot be written: there is no directory {path.parent}",
            "make it first, or name another file",
        )


def needed(module: str, install: str) -> None:
    """Find out before the work whether something optional is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"this needs {module}, which is not installed", install)


def print_json(value: Any) -> None:
    """The result, for programs."""
    print(json.dumps(value, indent=2, default=str))


def print_note(text: str) -> None:
    """Something worth knowing that is no result."""
    console.print(escape(text), soft_wrap=True, highlight=False)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """The result, for people."""
    out = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        numeric = rows and all(row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)
