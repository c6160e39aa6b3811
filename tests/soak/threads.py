"""Threads that call one program, some with inputs that raise, while others compile."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable

import torch

from fxcapture.runtime.call import call_in_flight, eager_call_in_flight
from tests.soak.programs import MODES, SELECTIONS, Program, draw_input

#: Of the eight, those that do not call but compile something else.
THREADS, COMPILERS = 8, 2
PATIENCE_S = 120.0


def run(mode: str, seconds: float) -> collections.Counter[str]:
    """Let eight threads work; what happened, by how often.

    The keys ``right`` and ``raised as it should`` are good; every other is a fault, but
    for ``compiled`` and ``failed to compile``, which are the other threads' work.
    """
    program = MODES[mode]()
    with torch.no_grad():
        for positions in SELECTIONS if program.selects else (None,):
            program.fault(positions)
    found: collections.Counter[str] = collections.Counter()
    lock, end = threading.Lock(), time.monotonic() + seconds

    def work(step: Callable[[random.Random], str], number: int) -> None:
        drawn, mine = random.Random(number), collections.Counter[str]()
        with torch.no_grad():
            while time.monotonic() < end:
                mine[step(drawn)] += 1
        if call_in_flight.get() or eager_call_in_flight.get():
            mine["a call still in flight"] += 1
        with lock:
            found.update(mine)

    steps = [lambda drawn: _call(program, drawn)] * (THREADS - COMPILERS)
    steps += [_compile] * COMPILERS
    threads = [
        threading.Thread(target=work, args=(step, i), daemon=True)
        for i, step in enumerate(steps)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + PATIENCE_S)
    found["deadlocks"] += sum(thread.is_alive() for thread in threads)
    found["left behind"] += len(program.left_behind())
    return found


def _call(program: Program, drawn: random.Random) -> str:
    bad = drawn.choice(["first", "last"]) if drawn.random() < 0.1 else ""
    try:
        if bad:
            program.call(*draw_input(bad), None)
            return "no error"
        positions = drawn.choice(SELECTIONS) if program.selects else None
        return program.fault(positions) or "right"
    except IndexError as error:
        return "raised as it should" if bad else f"false error: {error}"
    except Exception as error:
        return f"false error: {type(error).__name__}: {error}"[:200]


def _compile(drawn: random.Random) -> str:
    fails = drawn.random() < 0.5

    def function(x: torch.Tensor) -> torch.Tensor:
        if fails:
            torch._dynamo.graph_break()
        return x.sin() + 1

    compiled = torch.compile(
        function, backend="eager", fullgraph=True, isolate_recompiles=True
    )
    try:
        compiled(torch.ones(drawn.randint(1, 8)))
    except torch._dynamo.exc.Unsupported:
        return "failed to compile" if fails else "a compilation that failed"
    return "compiled"


def faults(found: collections.Counter[str]) -> dict[str, int]:
    """What was not as it should be."""
    good = ("right", "raised as it should", "compiled", "failed to compile")
    return {what: n for what, n in found.items() if n and what not in good}
