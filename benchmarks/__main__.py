"""All benchmarks, one after the other: ``python -m benchmarks [--full] [NAME...]``.

Each runs in a process of its own; what it found goes to ``results/<name>.json`` and
``.md``, and all of it together to ``results/report.md`` and ``report.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    RESULTS,
    ROOT,
    describe_environment,
    environment,
    markdown_table,
)

#: In the order of the report; one that is not there (yet) is skipped with a word.
ORDER = (
    "overhead", "selection", "regional", "memory", "early_stop", "attention",
    "functions", "estimate", "copies", "decorator", "generation", "peers",
)  # fmt: skip


def run_one(name: str, *, quick: bool, out: Path, timeout_s: float) -> str:
    """Run one benchmark; an empty text, or why it gave nothing."""
    if not (Path(__file__).parent / f"bench_{name}.py").is_file():
        return "there is no such benchmark"
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.bench_{name}"]
    command += ["--quick"] * quick + ["--out", str(out)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it ran longer than {timeout_s:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["?"]
        return f"it failed: {lines[-1].strip()}"
    return ""


def read_results(out: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        path = out / f"{name}.json"
        if path.is_file():
            found.append(json.loads(path.read_text()))
    return found


def write_report(out: Path, names: tuple[str, ...], notes: list[str]) -> Path:
    """One Markdown and one JSON report of all results in a folder."""
    results = read_results(out, names)
    stamp = environment()
    (out / "report.json").write_text(
        json.dumps({"environment": stamp, "results": results, "notes": notes}, indent=1)
        + "\n"
    )
    lines = ["# Benchmark report", "", f"*{describe_environment(stamp)}*", ""]
    for result in results:
        lines += _section(result, out)
    if notes:
        lines += ["## Skipped", "", *[f"- {note}" for note in notes], ""]
    path = out / "report.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def _section(result: dict[str, Any], out: Path) -> list[str]:
    # The section is the benchmark's own page, one heading lower, stamp included: parts
    # of a report may have been measured at different times.
    page = (out / f"{result['name']}.md").read_text().rstrip()
    lowered = [
        f"#{line}" if line.startswith("#") else line for line in page.splitlines()
    ]
    return [*lowered, ""]


#: Benchmark, its figure, and what README says of it.
README = (
    ("overhead", "latency_selected_over_plain", "time per call, two states of nine"),
    ("overhead", "trace_captured_over_plain", "Dynamo's first trace"),
    ("regional", "latency_captured_over_plain", "time per call, 24 blocks by regions"),
    ("regional", "training_step_captured_over_plain", "training step, the same"),
    ("attention", "one_layer_over_fused", "time per call, one layer's weights of 12"),
    ("attention", "one_layer_over_eager", "the same over eager attention's weights"),
    ("early_stop", "stopped_over_cut, k=4", "records only, over a model cut there"),
    (
        "memory",
        "added_over_selected, all states, batch 4 x 1024, padded",
        "peak added by all eight states, over their bytes",
    ),
)


#: The same for docs/comparison.md; a peer that was not there has no figure.
COMPARISON = tuple(
    ("peers", f"{variant} / plain", words)
    for variant, words in (
        ("fxcapture, compiled", "fxcapture, compiled"),
        ("fxcapture, compiled, records only", "the same, `keep_output=False`"),
        ("forward hooks, compiled", "forward hooks, compiled (where they survive)"),
        ("transformers, compiled", "transformers, compiled, all states"),
        ("eager, no capture", "eager model, no capture"),
        ("forward hooks, eager", "forward hooks, eager"),
        ("transformers, eager", "transformers, eager, all states"),
        ("nnsight, eager", "nnsight, eager"),
        ("TransformerLens", "TransformerLens, eager"),
    )
)


def readme_table(out: Path) -> str:
    """The figures that README shows, made from the results files."""
    return _table(out, README, "captured over plain", "benchmarks/results/")


def comparison_table(out: Path) -> str:
    """The figures that docs/comparison.md shows."""
    return _table(out, COMPARISON, "time per call over plain compiled")


def _table(
    out: Path,
    figures: Sequence[tuple[str, str, str]],
    head: str,
    link: str | None = None,
) -> str:
    rows = []
    for name, figure, words in figures:
        path = out / f"{name}.json"
        if not path.is_file():
            continue
        value = json.loads(path.read_text())["figures"].get(figure, {}).get("value")
        if isinstance(value, dict):
            text = f"{value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
        elif value is not None:
            text = f"{value:.2f}"
        else:
            continue
        row = {head: words, "ratio": text}
        if link is not None:
            row["results"] = f"[{name}]({link}{name}.md)"
        rows.append(row)
    return markdown_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", default=list(ORDER), metavar="NAME")
    parser.add_argument("--full", action="store_true", help="more rounds; slower")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="only join the results that are there",
    )
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    notes = []
    for name in [] if asked.report_only else asked.names:
        start = time.monotonic()
        print(f"{name} ...", end=" ", flush=True)
        limit = 1800 if asked.full else 240
        why = run_one(name, quick=not asked.full, out=out, timeout_s=limit)
        print(why or f"{time.monotonic() - start:.0f} s", flush=True)
        if why:
            notes.append(f"{name}: {why}")
    print(f"report: {write_report(out, ORDER, notes)}")
    print("\n" + readme_table(out))


if __name__ == "__main__":
    main()
