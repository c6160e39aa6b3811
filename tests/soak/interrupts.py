"""``KeyboardInterrupt`` from a signal, at random moments; then the next call."""

from __future__ import annotations

import collections
import random
import signal
import time
from typing import Any

import torch

from fxcapture.runtime.call import call_in_flight, eager_call_in_flight
from tests.soak.programs import MODES, Program, draw_input


def run(mode: str, count: int, *, cold: bool, seed: int = 0) -> dict[str, int]:
    """Interrupt ``count`` times; what happened, by how often.

    Args:
        mode: The mode.
        count: Number of interrupts.
        cold: Interrupt the making and the first call of a program, else later calls.
        seed: Of the moments.

    Returns:
        ``interrupted``, ``in time`` (it had ended before), ``next call right``; every
        other key is a fault.
    """
    drawn = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with torch.no_grad():
            program, took = _made(mode)
            while found["interrupted"] < count and found["in time"] < 20 * count:
                if cold:
                    # Freed programs leave Dynamo little; ten of them, nothing.
                    if found["interrupted"] % 10 == 0:
                        torch._dynamo.reset()
                    program = _interrupted_making(mode, drawn.uniform(0, took), found)
                else:
                    _interrupted_call(program, drawn.uniform(0.0001, 0.002), found)
                if not _next_call_is_right(program, found):
                    program, _ = _made(mode)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return dict(found)


def _interrupt(*signal_and_frame: Any) -> None:
    raise KeyboardInterrupt


def _made(mode: str) -> tuple[Program, float]:
    program = MODES[mode]()  # the first in a process takes longer
    program.fault()
    begin = time.monotonic()
    program = MODES[mode]()
    program.fault()
    return program, time.monotonic() - begin


def _interrupted_making(
    mode: str, after_s: float, found: collections.Counter[str]
) -> Program:
    program = None
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s + 1e-6)
        program = MODES[mode]()
        program.call(*draw_input(), None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        found["in time"] += 1
    except KeyboardInterrupt:
        found["interrupted"] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return MODES[mode]() if program is None else program


def _interrupted_call(
    program: Program, after_s: float, found: collections.Counter[str]
) -> None:
    inputs = draw_input()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        for _ in range(100):
            program.call(*inputs, None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        found["in time"] += 1
    except KeyboardInterrupt:
        found["interrupted"] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _next_call_is_right(program: Program, found: collections.Counter[str]) -> bool:
    try:
        fault = program.fault()
    except Exception as error:
        fault = f"next call: {type(error).__name__}: {error}"[:300]
    if not fault and program.left_behind():
        fault = "left behind after the next call"
    if not fault and (call_in_flight.get() or eager_call_in_flight.get()):
        fault = "a call still in flight after the next one"
    found[fault or "next call right"] += 1
    return not fault


def faults(found: dict[str, int]) -> dict[str, int]:
    """What was not as it should be."""
    good = ("interrupted", "in time", "next call right")
    return {what: n for what, n in found.items() if n and what not in good}
