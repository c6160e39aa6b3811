"""The files around the package: CI, hooks, templates and the changelog fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.__main__ import README, comparison_table, readme_table

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_ci_calls_targets_that_exist_and_covers_what_contributors_run() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    commands = [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]
    called = {command.split()[1] for command in commands}

    assert {command.split()[0] for command in commands} == {"make"}
    assert called <= TARGETS
    assert {"check", "test", "docs", "coverage", "nightly"} <= called


def test_ci_tests_the_oldest_python_and_the_pinned_torch() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    pinned = re.search(
        r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    oldest = re.search(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text()
    )

    assert pinned is not None
    assert oldest is not None
    assert oldest[1] in jobs["test"]["strategy"]["matrix"]["python"]
    assert pinned[1] in jobs["nightly"]["strategy"]["matrix"]["torch"]


def test_every_target_of_make_is_phony() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)

    assert phony is not None
    assert set(phony[1].split()) == TARGETS


def test_long_runs_have_a_target_of_their_own_and_are_left_out_of_the_others() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    recipes = dict(re.findall(r"^([\w-]+): setup\n((?:\t.*\n)+)", text, re.MULTILINE))

    for name in ("test", "coverage"):
        assert '-m "not nightly and not soak"' in recipes[name]
    assert "-m nightly" in recipes["nightly"]
    assert "-m soak" in recipes["soak"]
    assert "--soak-results benchmarks/results" in recipes["soak"]


def test_hooks_run_tools_that_the_set_up_installs() -> None:
    [repo] = read(ROOT / ".pre-commit-config.yaml")["repos"]
    dev = (ROOT / "pyproject.toml").read_text()

    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        folder, _, tool = hook["entry"].split()[0].rpartition("/")
        assert folder == ".venv/bin"
        assert f'"{tool}>=' in dev
    assert '"pre-commit>=' in dev


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in sorted((GITHUB / "ISSUE_TEMPLATE").iterdir())
        if p.name != "config.yml"
    ],
    ids=lambda p: p.name,
)
def test_issue_templates_are_forms(path: Path) -> None:
    form = read(path)
    fields = [f for f in form["body"] if f["type"] != "markdown"]

    assert form.keys() >= {"name", "description", "body"}
    assert len({f["id"] for f in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
    assert any(f.get("validations", {}).get("required") for f in fields)


def test_the_pull_request_template_names_targets_that_exist() -> None:
    text = (GITHUB / "pull_request_template.md").read_text()

    assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS


def test_the_changelog_begins_with_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)

    assert headings[0] == "Unreleased"
    for heading in headings[1:]:
        assert re.match(r"\d+\.\d+\.\d+", heading)


def test_the_table_in_readme_is_made_from_the_results() -> None:
    table = readme_table(ROOT / "benchmarks" / "results")

    assert table.count("\n") == len(README) + 1
    assert table in (ROOT / "README.md").read_text()


def test_the_table_in_the_comparison_is_made_from_the_results() -> None:
    table = comparison_table(ROOT / "benchmarks" / "results")

    assert "fxcapture, compiled" in table
    assert table in (ROOT / "docs" / "comparison.md").read_text()
