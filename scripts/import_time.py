"""Import time of fxcapture against torch's own; more than 1.3 times is an error.

Each import happens in a process of its own, the two alternating; medians are compared.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT = 1.3
ROUNDS = 7
CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def seconds(name: str) -> float:
    command = [sys.executable, "-W", "ignore", "-c", CODE.format(name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    seconds("fxcapture")  # the files are in the page cache from here on
    pairs = [(seconds("torch"), seconds("fxcapture")) for _ in range(ROUNDS)]
    torch_s, ours_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(ours / torch for torch, ours in pairs)
    print(f"import: torch {torch_s:.2f} s, fxcapture {ours_s:.2f} s, ratio {ratio:.2f}")
    if ratio > LIMIT:
        sys.exit(f"importing fxcapture takes more than {LIMIT} times torch's import")


if __name__ == "__main__":
    main()
