"""The page and the picture for whoever carries this on say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.draw_architecture import PICTURE, arrows, draw, imports, levels, packages

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_is_that_of_the_imports() -> None:
    assert draw() == PICTURE.read_text(), "run python scripts/draw_architecture.py"


def test_the_page_has_a_row_for_each_package_and_for_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)

    assert sorted(rows) == packages()


def test_a_package_is_drawn_above_all_that_it_imports() -> None:
    graph = imports()
    height = {name: i for i, row in enumerate(levels(graph)) for name in row}

    assert all(height[a] > height[b] for a, found in graph.items() for b in found)


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}

    assert arrows(graph) == [("a", "b"), ("b", "c")]
    assert levels(graph) == [["c"], ["b"], ["a"]]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE))))
def test_the_page_points_to_tests_that_exist(name: str) -> None:
    path, _, function = name.partition("::")

    assert (ROOT / path).exists()
    assert not function or f"def {function}(" in (ROOT / path).read_text()


def mentioned() -> set[str]:
    """Dotted names of modules on the page, such as ``plan.sites.site_of``."""
    known = "|".join(packages())
    return set(re.findall(rf"`((?:{known})(?:\.\w+)+)`", PAGE))


@pytest.mark.parametrize("name", sorted(mentioned()))
def test_the_page_names_what_the_code_has(name: str) -> None:
    parts = name.split(".")
    found = ROOT / "fxcapture"
    while parts and (found / parts[0]).is_dir():
        found /= parts.pop(0)
    module = found / f"{parts[0]}.py"
    rest = parts[1:] if module.exists() else parts
    text = (module if module.exists() else found / "__init__.py").read_text()

    assert all(re.search(rf"^\s*(def|class) {part}\b", text, re.M) for part in rest)
