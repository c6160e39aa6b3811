"""The command line: ``fxcapture``, or ``python -m fxcapture``.

The commands are in ``app``; they need the ``cli`` extra, and this file says so
where it is missing.
"""

from __future__ import annotations

import sys

from fxcapture.errors import install_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line; never returns."""
    try:
        from fxcapture.cli.app import app
    except ImportError as error:
        if error.name not in ("typer", "rich", "yaml"):
            raise
        text = (
            f"the command line needs {error.name}, which is not installed\n"
            f"  what to do: {install_extra('cli')}"
        )
        print(text, file=sys.stderr)
        failure = SystemExit(text)
        failure.code = 2  # as documented: what was given cannot be used
        raise failure from error
    app()  # ends the process, with the command's exit code
