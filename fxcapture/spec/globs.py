"""Paths with wildcards, and how a name that looks like one is written.

Terms
    escape: a backslash; the character behind it means itself.

Invariants
    A wildcard stays inside one segment of a path, except ``**``.  Matching takes time
    in the product of the two lengths, whatever the pattern is.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable

__all__ = ["escape", "glob", "has_wildcard", "masked", "unescape"]

#: ``::`` and ``re:`` mean something too, so colons are escaped with the wildcards.
_SPECIAL = re.compile(r"[\\*?\[:]|^\s|\s$")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_WILDCARD = re.compile(r"[*?\[]")
# An escape, or a set of characters, in which a backslash is one of them.
_ESCAPED_OR_SET = re.compile(r"\\(.)|\[!?\]?[^\]]*\]", re.DOTALL)


def escape(path: str) -> str:
    """The target that means the module at ``path`` and nothing else."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], path)


def unescape(text: str) -> str:
    """The path that a target without wildcards means."""
    return _ESCAPED.sub(r"\1", text)


def masked(text: str) -> str:
    """The text with a letter for each escaped character: what is left has a meaning."""
    return _ESCAPED.sub("x", text)


def has_wildcard(text: str) -> bool:
    """Whether a character of the text is a wildcard, and not escaped."""
    return bool(_WILDCARD.search(masked(text)))


@functools.lru_cache(maxsize=256)
def glob(pattern: str) -> Callable[[str], bool]:
    """Whether a path fits a pattern, as a function of the path."""
    pieces = [_piece(piece) for piece in pattern.split(".")]

    def fits(path: str) -> bool:
        segments = path.split(".") if path else []
        # Which numbers of segments the pieces so far can take up.
        reached = {0}
        for piece in pieces:
            if piece is None:
                reached = set(range(min(reached), len(segments) + 1))
            else:
                reached = {
                    n + 1
                    for n in reached
                    if n < len(segments) and piece.match(segments[n])
                }
            if not reached:
                return False
        return len(segments) in reached

    return fits


def _piece(piece: str) -> re.Pattern[str] | None:
    """One segment of a pattern as a regular expression; ``None`` for ``**``."""
    if piece == "**":
        return None

    def bracket(found: re.Match[str]) -> str:
        character = found[1]
        if character is None:
            return found[0]
        return f"[{character}]" if _WILDCARD.match(character) else character

    return re.compile(fnmatch.translate(_ESCAPED_OR_SET.sub(bracket, piece)))
