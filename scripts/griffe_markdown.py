"""Docstrings for the API pages: what they borrow from reStructuredText, as Markdown.

Docstrings are written to be read in an editor.  Four things in them mean nothing to
Markdown, and mkdocs would print them as they stand: roles, ``::`` before a literal
block, tables drawn with ``=``, and headed blocks such as *Terms*.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")
_LITERAL = re.compile(r"^([ ]*)([^\n]*)::\n\n((?:\1[ ]+[^\n]*\n|\n)+)", re.MULTILINE)
_TABLE = re.compile(r"^(=+(?: +=+)+)\n(.*?)\n\1\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)
_HEADED = re.compile(
    r"^(Terms|Invariants|Exit codes)\n((?:[ ]+[^\n]*\n|\n)+)", re.MULTILINE
)


def to_markdown(text: str) -> str:
    """A docstring with these four things rewritten."""
    text = _LITERAL.sub(_fenced, text + "\n")
    text = _TABLE.sub(_piped, text)
    text = _HEADED.sub(_headed, text)
    return _ROLE.sub(r"`\1`", text).rstrip("\n")


def _fenced(found: re.Match[str]) -> str:
    indent, lead, body = found.groups()
    language = "" if not lead else "python"
    code = textwrap.indent(
        f"```{language}\n{textwrap.dedent(body).strip()}\n```", indent
    )
    # A colon at the end of an "Example" would open a section of its own.
    lead = f"**{lead}**" if lead == "Example" else lead and f"{lead}:"
    return f"{indent}{lead}\n\n{code}\n\n"


def _piped(found: re.Match[str]) -> str:
    ruler, head, body = found.groups()
    starts = [m.start() for m in re.finditer(r"=+", ruler)]

    def cells(line: str) -> list[str]:
        ends = [*starts[1:], len(line) + 1]
        return [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]

    rows = [cells(head)]
    for line in body.splitlines():
        row = cells(line)
        if row[0]:
            rows.append(row)
        else:  # goes on with the row above
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], row, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(starts), *lines[1:]])


def _headed(found: re.Match[str]) -> str:
    head, body = found.groups()
    body = textwrap.dedent(body).strip("\n")
    if head == "Invariants":
        return f"**{head}.** {body}\n\n"
    # One item to each line that is not indented further.
    return (
        f"**{head}**\n\n" + re.sub(r"^(?=\S)", "- ", body, flags=re.MULTILINE) + "\n\n"
    )


class Markdown(griffe.Extension):
    """Rewrites every docstring that griffe reads."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
