"""Why a run was not one graph, in one line.

Dynamo's own text has a heading, then explanations, hints, links and the user's stack.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["one_line"]

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in \w+\n +(\S.*)')


def one_line(reason: str | None) -> str:
    """The heading, and the innermost line of the user's code; empty without a reason.

    Example::

        Data-dependent branching (net.py, line 36: if h.sum() > 0:)
    """
    text = (reason or "").strip()
    if not text:
        return ""
    heading = text.splitlines()[0].strip()
    places = _PLACE.findall(text.partition("from user code:")[2])
    if not places:
        return heading
    file, line, code = places[-1]
    return f"{heading} ({Path(file).name}, line {line}: {code})"
