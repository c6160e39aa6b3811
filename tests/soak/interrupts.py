"""``KeyboardInterrupt`` from a signal, at random moments; then the next call.

First calls are interrupted in processes of their own, since torch does not survive
every interrupt of its compiler: it may leave a mode on its stack, or a setting changed.
A setting is put back; where plain torch cannot export or compile the undecorated model
either, the process ends, and the next one goes on with what is missing.  Both are
counted.

Run as ``python -m tests.soak.interrupts SEED MODE=COUNT...`` it prints one JSON object
per mode.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fxcapture.runtime.call import call_in_flight, eager_call_in_flight
from tests.soak.programs import MODES, Model, Program, draw_input

ROOT = Path(__file__).parents[2]
TORCH_BROKEN = "plain torch was broken too"
SETTINGS = "settings of torch put back"


def run(mode: str, count: int, *, cold: bool, seed: int = 0) -> dict[str, int]:
    """Interrupt ``count`` times; what happened, by how often.

    Args:
        mode: The mode.
        count: Number of interrupts.
        cold: Interrupt the making and the first call of a program, else later calls.
        seed: Of the moments.

    Returns:
        ``interrupted``, ``in time`` (it had ended before), ``next call right``, what
        was torch's; every other key is a fault.
    """
    drawn = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with torch.no_grad():
            program, took = _made(mode)
            while found["interrupted"] < count and found["in time"] < 20 * count:
                made: Program | None = program
                if cold:
                    # Freed programs leave Dynamo little; ten of them, nothing.
                    if found["interrupted"] % 10 == 0:
                        torch._dynamo.reset()
                    made = _interrupted_making(mode, drawn.uniform(0, took), found)
                else:
                    _interrupted_call(program, drawn.uniform(0.0001, 0.002), found)
                if _next_call_is_right(made, mode, found):
                    continue
                if found[TORCH_BROKEN]:
                    break
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
) -> Program | None:
    program = None
    settings = torch._dynamo.config.shallow_copy_dict()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s + 1e-6)
        program = MODES[mode]()
        program.call(*draw_input(), None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        found["in time"] += 1
    except BaseException as error:
        if not _is_by_interrupt(error):
            raise
        found["interrupted"] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for name, value in torch._dynamo.config.shallow_copy_dict().items():
        if value != settings[name]:
            setattr(torch._dynamo.config, name, settings[name])
            found[SETTINGS] += 1
    return program


def _is_by_interrupt(error: BaseException | None) -> bool:
    """An interrupt, or what torch raised while it cleaned up after one."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _is_by_interrupt(error.__cause__) or _is_by_interrupt(error.__context__)


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


def _next_call_is_right(
    program: Program | None, mode: str, found: collections.Counter[str]
) -> bool:
    try:
        program = program or MODES[mode]()
        fault = program.fault()
        if not fault and program.left_behind():
            fault = "left behind after the next call"
    except Exception as error:
        fault = f"next call: {type(error).__name__}: {error}"[:300]
    if not fault and (call_in_flight.get() or eager_call_in_flight.get()):
        fault = "a call still in flight after the next one"
    if fault and not _plain_torch_works():
        fault = TORCH_BROKEN
    found[fault or "next call right"] += 1
    return not fault


def _plain_torch_works() -> bool:
    model, inputs = Model().eval(), draw_input()
    try:
        want = model(*inputs)
        exported = torch.export.export(model, inputs).module()(*inputs)
        compiled = torch.compile(model, backend="eager")(*inputs)
    except Exception:
        return False
    return torch.allclose(exported, want) and torch.allclose(compiled, want)


def run_cold(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Interrupt first calls in other processes: mode to what happened there."""
    found: dict[str, collections.Counter[str]] = {
        mode: collections.Counter() for mode in counts
    }
    for seed in range(100):
        missing = {
            mode: count - found[mode]["interrupted"]
            for mode, count in counts.items()
            if found[mode]["interrupted"] < count
        }
        if not missing:
            break
        asked = [f"{mode}={count}" for mode, count in missing.items()]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__, str(seed), *asked],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        for line in done.stdout.splitlines():
            row = json.loads(line)
            found[row.pop("mode")].update(row)
    return {mode: dict(counter) for mode, counter in found.items()}


def faults(found: dict[str, int]) -> dict[str, int]:
    """What was not as it should be."""
    good = ("interrupted", "in time", "next call right", SETTINGS, TORCH_BROKEN)
    return {what: n for what, n in found.items() if n and what not in good}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[2:]:
        name, _, count = asked.rpartition("=")
        happened = run(name, int(count), cold=True, seed=int(sys.argv[1]))
        print(json.dumps({"mode": name, **happened}))
        if TORCH_BROKEN in happened:
            break
