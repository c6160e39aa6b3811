"""The notebook of the tutorial is up to date, well formed, and runs cell by cell."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_docs import (
    ROOT,
    check_output,
    new_module,
    quick_backend,
    run_console,
)

__all__ = ["quick_backend"]

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_the_notebook_is_what_the_tutorial_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    make_notebook = importlib.import_module("make_notebook").make_notebook

    assert NOTEBOOK.read_text() == make_notebook()


def test_the_notebook_is_well_formed() -> None:
    fields = {"cell_type", "id", "metadata", "source"}
    for cell in cells():
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == fields | more
        for target in re.findall(r"\]\(([^)#:\s]+)[^)]*\)", "".join(cell["source"])):
            if cell["cell_type"] == "markdown":
                assert (NOTEBOOK.parent / target).exists(), target
    assert len({cell["id"] for cell in cells()}) == len(cells())


@pytest.mark.usefixtures("quick_backend")
def test_the_cells_run_and_print_what_they_show() -> None:
    torch._dynamo.reset()
    namespace = new_module(NOTEBOOK)
    count = 0
    for cell in cells():
        code = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        count += 1
        if code.startswith("%%writefile "):
            name, _, text = code.removeprefix("%%writefile ").partition("\n")
            Path(name).write_text(text + "\n")
        elif code.startswith("!"):
            run_console(re.sub(r"^!", "$ ", code, flags=re.MULTILINE))
        else:
            with contextlib.redirect_stdout(io.StringIO()) as written:
                exec(compile(code, cell["id"], "exec"), namespace)
            shown = "".join("".join(o["text"]) for o in cell["outputs"])
            check_output(shown, written.getvalue())
    assert count > 12
