"""``make soak``: what the tests marked ``soak`` counted goes to a results file.

A test adds its counts with ``record_property(table, row)``.  With ``--soak-results``
they are written as ``soak.json`` and ``soak.md``, also if tests have failed, with the
settings of the run.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Report


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long a run is; each from an environment variable.

    Attributes:
        seconds: Of the threads, in each mode.
        interrupts: In each mode, warm.
        cold: In each mode, while a program is made.
        models: Made, called and dropped in each mode.
    """

    seconds: float
    interrupts: int
    cold: int
    models: int


def lengths() -> Lengths:
    """Those of this run."""

    def number(name: str, usual: str) -> str:
        return os.environ.get(f"FXCAPTURE_SOAK_{name}", usual)

    return Lengths(
        seconds=float(number("SECONDS", "60")),
        interrupts=int(number("INTERRUPTS", "1000")),
        cold=int(number("COLD", "100")),
        models=int(number("MODELS", "40")),
    )


class _Results:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid.rpartition("::")[2])
        if report.when != "call":
            return
        for table, row in report.user_properties:
            self._tables.setdefault(table, []).append(row)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self._tables:
            return
        asked = lengths()
        made = Report(
            "soak",
            "Nothing lost",
            f"Eight threads for {asked.seconds:g} s in each mode; {asked.interrupts:,} "
            f"interrupts of warm calls and {asked.cold:,} of first ones; "
            f"{asked.models} models made, called and dropped.",
        )
        for table, rows in self._tables.items():
            made.table(table, sorted(rows, key=lambda row: str(row["mode"])))
        made.figure("tests_failed", len(self._failed), "0")
        for name in self._failed:
            made.note(f"failed: {name}")
        for name, value in dataclasses.asdict(asked).items():
            made.figure(f"setting: {name}", value)
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            made.note("stopped before its end: what has no row was not run")
        made.command = "make soak"
        made.write(self._folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-results", type=Path, help="folder of the results file")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--soak-results", default=None)
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(folder), "soak-results")
