"""Threads, interrupts, models that are dropped; short here, long in ``make soak``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak import interrupts, memory, threads
from tests.soak.conftest import lengths
from tests.soak.programs import MODES

ROOT = Path(__file__).parents[2]
IN_THREADS, BY_INTERRUPTS = "Eight threads", "Interrupts"
MEMORY = "Models made, called and dropped"
# An interrupt in a finaliser cannot be raised: Python prints it, pytest warns.
unraisable = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize("mode", MODES)
def test_threads_lose_nothing(mode: str) -> None:
    found = threads.run(mode, 0.5)
    assert threads.faults(found) == {}
    assert found["right"] > 0


@unraisable
@pytest.mark.parametrize("mode", MODES)
def test_a_call_after_an_interrupted_one_is_right(mode: str) -> None:
    found = interrupts.run(mode, 60, cold=False)
    assert interrupts.faults(found) == {}
    assert found["interrupted"] == 60


def test_a_call_after_an_interrupted_first_one_is_right() -> None:
    modes = ["whole", "pieces", "regions", "exported"]
    for found in interrupts.run_cold(dict.fromkeys(modes, 3)).values():
        assert interrupts.faults(found) == {}
        assert found["interrupted"] == 3


@pytest.mark.parametrize("mode", memory.MODES)
def test_models_are_freed_in_every_mode(mode: str) -> None:
    found = memory.run(mode, 0, plain=False, warm=2)
    assert found["alive"] == 0


# --------------------------------------------------------------------------- long


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_threads_lose_nothing_for_long(mode: str, record_property: Any) -> None:
    found = threads.run(mode, lengths().seconds)
    wrong = threads.faults(found)
    done = {"right": found["right"], "raised": found["raised as it should"]}
    done["compiled by others"] = found["compiled"] + found["failed to compile"]
    record_property(IN_THREADS, {"mode": mode, **done, "faults": sum(wrong.values())})
    assert wrong == {}


@pytest.mark.soak
@unraisable
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("mode", MODES)
def test_a_call_after_many_interrupted_ones_is_right(
    mode: str, cold: bool, record_property: Any
) -> None:
    if cold:
        found = interrupts.run_cold({mode: lengths().cold})[mode]
    else:
        found = interrupts.run(mode, lengths().interrupts, cold=False)
    wrong = interrupts.faults(found)
    record_property(
        BY_INTERRUPTS,
        {
            "mode": f"{mode}, {'first calls' if cold else 'later calls'}",
            "interrupts": found.get("interrupted", 0),
            "next call right": found.get("next call right", 0),
            "torch broken": found.get(interrupts.TORCH_BROKEN, 0),
            "faults": sum(wrong.values()),
        },
    )
    assert wrong == {}


def measured(mode: str, which: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.memory"]
    done = subprocess.run(
        [*command, mode, which, str(lengths().models)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.soak
@pytest.mark.parametrize("mode", memory.MODES)
def test_dropped_models_leave_what_plain_ones_do(
    mode: str, record_property: Any
) -> None:
    captured, plain = measured(mode, "captured"), measured(mode, "plain")
    record_property(
        MEMORY,
        {
            "mode": mode,
            "alive": int(captured["alive"]),
            "KiB kept per model": captured["bytes_per_model"] / 1024,
            "plain": plain["bytes_per_model"] / 1024,
        },
    )
    assert captured["alive"] == 0
    assert captured["bytes_per_model"] <= 1.2 * plain["bytes_per_model"] + 2048
