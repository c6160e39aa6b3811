"""Write the tutorial as a notebook: ``python scripts/make_notebook.py``.

Python blocks become cells, with what the page says that they print as their output;
blocks with a title write that file; lines for a console are run by the shell.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"\]\((?!\w+:)([^)#]+\.md)")


def make_notebook() -> str:
    """The text of the notebook."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    cells: list[dict[str, Any]] = []
    end = 0
    for block in _BLOCK.finditer(page):
        _add_prose(cells, page[end : block.start()])
        end = block.end()
        language, info, code = block.groups()
        title = _TITLE.search(info)
        if language == "text":
            cells[-1]["outputs"] = [
                {"name": "stdout", "output_type": "stream", "text": _lines(code)}
            ]
        elif title:
            _add(cells, "code", f"%%writefile {title[1]}\n{code}")
        elif language == "console":
            _add(cells, "code", re.sub(r"^\$ ", "!", code, flags=re.MULTILINE))
        else:
            _add(cells, "code", code)
    _add_prose(cells, page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _add_prose(cells: list[dict[str, Any]], text: str) -> None:
    text = _LINK.sub(r"](../docs/\1", text).strip()
    if text:
        _add(cells, "markdown", text)


def _add(cells: list[dict[str, Any]], kind: str, source: str) -> None:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}"}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    cell |= {"metadata": {}, "source": _lines(source.rstrip("\n"))}
    cells.append(cell)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(make_notebook())
