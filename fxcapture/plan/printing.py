"""Text that reads well where a value is shown: at a prompt, and in a notebook.

Terms
    shown: what an interactive prompt prints of a value that nobody assigned, which is
        its ``repr``, and in a notebook its ``_repr_html_``.
"""

from __future__ import annotations

import html

__all__ = ["Printed", "PrintedSVG", "preformatted"]


def preformatted(text: str) -> str:
    """Text as HTML that keeps its lines and columns."""
    return f'<pre style="line-height: 1.25">{html.escape(text)}</pre>'


class Printed(str):
    """Text that is shown as it is printed, with its line breaks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(self)


class PrintedSVG(Printed):
    """A picture; a notebook draws it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)
