"""What every benchmark shares: the environment stamp, paired timing, report files.

Terms
    variant: one of the programs that a benchmark compares, under a name.
    round: one call of every variant, in an order drawn anew, so that a slow moment of
        the machine hits all of them alike.
    ratio: median over rounds of (time of a variant / time of the base) in that round.
    child: a benchmark's function run in a process of its own, for what one process
        cannot repeat: first compilations and peaks of memory.

Invariants
    A result without its environment is never written.  Times are in seconds inside this
    module and in milliseconds in reports; the unit is in the name.

Use it::

    def run(quick: bool) -> Report:
        times = interleaved({"plain": f, "captured": g}, rounds=20 if quick else 60)
        report = Report("overhead", "Captured over plain")
        report.table("Latency", latency_rows(times, base="plain"))
        report.figure("captured_over_plain", ratio(times, "captured", "plain"))
        return report

    if __name__ == "__main__":
        main(run)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
_PACKAGES = (
    "fxcapture", "torch", "transformers", "numpy",
    "nnsight", "torchlens", "transformer-lens",
)  # fmt: skip


# --------------------------------------------------------------------------------------
# Environment
# --------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What a number depends on besides the code: hardware, versions, threads, load."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    made: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }
    if hasattr(os, "getloadavg"):
        made["load"] = round(os.getloadavg()[0], 1)
    if torch.cuda.is_available():
        made["gpu"] = torch.cuda.get_device_name()
    return made


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _memory_gib() -> float | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return round(pages * size / 2**30, 1)
    return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def describe_environment(stamp: Mapping[str, Any]) -> str:
    """The stamp in one paragraph of Markdown."""
    versions = ", ".join(f"{k} {v}" for k, v in stamp["versions"].items())
    hardware = f"{stamp['cpu']}, {stamp['cores']} cores, {stamp['memory_gib']} GiB"
    if "gpu" in stamp:
        hardware += f", {stamp['gpu']}"
    return (
        f"{hardware}; {stamp['threads']} threads; {stamp['os']}; Python "
        f"{stamp['python']}; {versions}; commit {stamp['commit']}; {stamp['date']}; "
        f"load {stamp.get('load', '?')}"
    )


# --------------------------------------------------------------------------------------
# Timing
# --------------------------------------------------------------------------------------

#: Variant to its times in seconds, one per round.
Times = dict[str, list[float]]


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 40,
    warmup: int = 3,
    budget_s: float | None = None,
    seed: int = 0,
) -> Times:
    """Time the variants in rounds, the order within each round drawn anew.

    Args:
        variants: Name to a call without arguments.
        rounds: Number of rounds.
        warmup: Calls of each variant that are not timed (compilation happens there).
        budget_s: Stop after the round in which this many seconds are used up, with at
            least three rounds.
        seed: Of the order.

    Returns:
        Seconds per round and variant; the lists have one length, index is the round.
    """
    for call in variants.values():
        for _ in range(warmup):
            call()
    order = list(variants)
    draw = random.Random(seed)
    times: Times = {name: [] for name in variants}
    started = time.perf_counter()
    with _no_collection():
        for i in range(rounds):
            draw.shuffle(order)
            for name in order:
                call = variants[name]
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
            spent = time.perf_counter() - started
            if budget_s is not None and i >= 2 and spent > budget_s:
                break
    return times


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector would run within one variant or the other."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two variants over the rounds they shared.

    Attributes:
        median: Median over the rounds.
        low: Lower end of a 95 % bootstrap interval of the median.
        high: Its upper end.
        rounds: Number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(times: Times, variant: str, base: str, *, resamples: int = 1000) -> Ratio:
    """``variant`` over ``base``, paired by round."""
    pairs = [v / b for v, b in zip(times[variant], times[base], strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(resamples)
    )
    return Ratio(
        statistics.median(pairs),
        medians[int(0.025 * resamples)],
        medians[int(0.975 * resamples) - 1],
        len(pairs),
    )


def latency_rows(times: Times, base: str) -> list[dict[str, Any]]:
    """A table: variant, median and quartiles in ms, ratio to the base."""
    rows = []
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        rows.append(
            {
                "variant": name,
                "median_ms": statistics.median(values) * 1e3,
                "quartiles_ms": f"{low * 1e3:.2f} to {high * 1e3:.2f}",
                f"over {base}": str(ratio(times, name, base)) if name != base else "1",
            }
        )
    return rows


# --------------------------------------------------------------------------------------
# Children
# --------------------------------------------------------------------------------------


def child(
    module: str, function: str, *, timeout_s: float = 600.0, **arguments: Any
) -> Any:
    """Result of ``module.function(**arguments)``, run in a process of its own.

    Arguments and result travel as JSON.  Inductor's and AOTAutograd's caches are off in
    the child, so that every compilation is a first one.

    Raises:
        RuntimeError: the child failed; the text has the end of what it wrote.
    """
    environ = os.environ | {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    payload = json.dumps(
        {
            "module": module,
            "function": function,
            "arguments": arguments,
            "threads": torch.get_num_threads(),
        }
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.harness", payload],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_ANSWER):
            return json.loads(line.removeprefix(_ANSWER))
    raise RuntimeError(
        f"{module}.{function} failed in its process (exit {done.returncode}):\n"
        + done.stderr[-2000:]
    )


_ANSWER = "fxcapture-benchmark-answer:"


def _child_main(payload: str) -> None:
    asked = json.loads(payload)
    torch.set_num_threads(asked["threads"])
    found = getattr(importlib.import_module(asked["module"]), asked["function"])
    print(_ANSWER + json.dumps(found(**asked["arguments"])), flush=True)


# --------------------------------------------------------------------------------------
# Reports
# --------------------------------------------------------------------------------------

#: Draws on a matplotlib figure.
Draw = Callable[[Any], None]


class Report:
    """What one benchmark found; written as JSON, Markdown and plots.

    Args:
        name: Stem of the files.
        title: Heading.
        about: What is measured and how, in a sentence or two.
    """

    def __init__(self, name: str, title: str, about: str = "") -> None:
        self.name = name
        self.title = title
        self.about = about
        self.command = f"python -m benchmarks.bench_{name}"
        self.tables: list[tuple[str, list[dict[str, Any]]]] = []
        self.figures: dict[str, Any] = {}
        self.notes: list[str] = []
        self._plots: list[tuple[str, str, Draw]] = []
        self.environment = environment()

    def table(self, heading: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table; every row has the same keys, which head the columns."""
        self.tables.append((heading, [dict(row) for row in rows]))

    def figure(self, name: str, value: Any, expected: str = "") -> None:
        """Add one figure that documentation may quote, such as a :class:`Ratio`.

        Args:
            name: Its name, with the unit in it.
            value: A number, or a dataclass of numbers.
            expected: What it was expected to be, in words.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        self.figures[name] = {"value": value}
        if expected:
            self.figures[name]["expected"] = expected

    def note(self, text: str) -> None:
        """Add a sentence: a peer that was skipped and why, a caveat."""
        self.notes.append(text)

    def plot(self, stem: str, title: str, draw: Draw) -> None:
        """Add a plot; drawn when the report is written, if matplotlib is there."""
        self._plots.append((stem, title, draw))

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "about": self.about,
            "command": self.command,
            "environment": self.environment,
            "figures": self.figures,
            "tables": [{"heading": h, "rows": r} for h, r in self.tables],
            "notes": self.notes,
        }

    def as_markdown(self, level: int = 1, *, stamp: bool = True) -> str:
        """The report as Markdown."""
        lines = ["#" * level + f" {self.title}", ""]
        if self.about:
            lines += [self.about, ""]
        for heading, rows in self.tables:
            lines += [f"**{heading}**", "", markdown_table(rows), ""]
        if self.figures:
            rows = [
                {
                    "figure": name,
                    "value": _figure_text(entry["value"]),
                    "expected": entry.get("expected", ""),
                }
                for name, entry in self.figures.items()
            ]
            lines += [markdown_table(rows), ""]
        for stem, title, _ in self._plots:
            lines += [f"![{title}]({stem}.svg)", ""]
        lines += [f"- {note}" for note in self.notes]
        if stamp:
            lines += ["", f"*{describe_environment(self.environment)}*"]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path = RESULTS) -> Path:
        """Write ``<name>.json``, ``<name>.md`` and the plots; the Markdown's path."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_json(), indent=1, default=str)
        (folder / f"{self.name}.json").write_text(text + "\n")
        self._write_plots(folder)
        path = folder / f"{self.name}.md"
        path.write_text(self.as_markdown())
        return path

    def _write_plots(self, folder: Path) -> None:
        try:
            import matplotlib
        except ImportError:
            if self._plots:
                self.note("plots were skipped: matplotlib is not installed")
                self._plots = []
            return
        matplotlib.use("Agg")
        # One salt, so that the same numbers give the same file.
        matplotlib.rcParams["svg.hashsalt"] = "fxcapture"
        from matplotlib import pyplot

        for stem, title, draw in self._plots:
            figure = pyplot.figure(figsize=(7, 3.6), layout="constrained")
            figure.suptitle(title, fontsize=11)
            draw(figure)
            figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})
            pyplot.close(figure)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; numbers are right-aligned and rounded."""
    if not rows:
        return "(nothing)"
    keys = list(rows[0])
    numeric = {k for k in keys if all(isinstance(r[k], (int, float)) for r in rows)}
    cells = [[_cell(row[k]) for k in keys] for row in rows]
    ruler = ["---:" if k in numeric else "---" for k in keys]
    lines = [[k.replace("_", " ") for k in keys], ruler, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _figure_text(value: Any) -> str:
    if isinstance(value, Mapping) and {"median", "low", "high"} <= set(value):
        return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
    return _cell(value)


def bars(labels: Sequence[str], values: Sequence[float], xlabel: str) -> Draw:
    """A plot of horizontal bars, the first on top, each with its value."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.barh(labels, values, color="#4c72b0", height=0.6)
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.15)
        for i, value in enumerate(values):
            axes.text(value, i, " " + _cell(float(value)), va="center", fontsize=8)

    return draw


def main(run: Callable[[bool], Report]) -> None:
    """Command line of one benchmark: ``[--quick] [--out FOLDER] [--threads N]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    report = run(asked.quick)
    report.write(asked.out)
    print(report.as_markdown())


if __name__ == "__main__":
    _child_main(sys.argv[1])
