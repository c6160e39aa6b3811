"""The commands, their options and what they print.

Exit codes
    0  done
    1  done, and the answer is no: a record differs from the reference
    2  what was given cannot be used: options, the model's name, the spec
    3  the model cannot be captured as asked, or it raised

Invariants
    Results go to standard output, everything else to standard error; with ``--json``
    standard output is one JSON document.  A mistake of the user's gives no traceback
    (``--debug`` does).
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fxcapture
from fxcapture.cli_inputs import Loaded, load_model
from fxcapture.cli_options import (
    Arg,
    Backend,
    Batch,
    Config,
    Debug,
    Format,
    Input,
    Json,
    Length,
    Model,
    Set,
    SpecFile,
    Taps,
)
from fxcapture.cli_specs import load_spec
from fxcapture.cli_values import UsageError
from fxcapture.errors import CaptureError, FxCaptureError, SpecError, TargetError
from fxcapture.spec import CaptureSpec

__all__ = ["app"]

app = typer.Typer(
    name="fxcapture",
    help="Capture values from inside PyTorch models that run compiled.\n\n"
    "MODEL is package.module:factory or file.py:factory (a function or class that "
    "makes the model, or returns (model, args) or (model, args, kwargs)), or the name "
    "of a class of transformers such as LlamaForCausalLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_err = Console(stderr=True)


@contextlib.contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn errors into messages and exit codes."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    try:
        yield
    except (UsageError, SpecError, TargetError) as error:
        if debug:
            raise
        _fail(str(error), 2)
    except (CaptureError, FxCaptureError) as error:
        if debug:
            raise
        _fail(str(error), 3)
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except Exception as error:
        if debug:
            raise
        _fail(
            f"the model raised {type(error).__name__}: {error}\n"
            "  what to do: run with --debug for the traceback",
            3,
        )


def _fail(text: str, code: int) -> None:
    _err.print(f"[bold red]error[/]: {escape(text)}", highlight=False)
    raise typer.Exit(code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    out = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        numeric = rows and all(r[columns.index(column)][:1].isdigit() for r in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


def _prepare(
    model: str,
    config: Path | None,
    settings: list[str] | None,
    inputs: list[str] | None,
    keywords: list[str] | None,
    batch: int,
    length: int,
    *,
    meta: bool = False,
) -> Loaded:
    with _err.status(f"making {model}"):
        return load_model(
            model,
            config=config,
            settings=settings or (),
            inputs=inputs or (),
            keywords=keywords or (),
            batch=batch,
            length=length,
            meta=meta,
        )


def _compiled(
    loaded: Loaded, spec: CaptureSpec, backend: str, *, keep_output: bool = True
) -> Any:
    return fxcapture.compile(
        loaded.model, spec, backend=backend, keep_output=keep_output
    )


@app.command()
def sites(
    model: Model,
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    depth: Annotated[int, typer.Option(help="deepest level of modules shown")] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what can be captured: each submodule's calls, with shape and bytes."""
    from fxcapture.cli_tables import site_rows

    with _reported(debug):
        loaded = _prepare(
            model, config, settings, inputs, keywords, batch, length, meta=True
        )
        with _err.status("tracing"):
            columns, rows = site_rows(loaded, depth)
        if as_json:
            _print_json([dict(zip(columns, row, strict=True)) for row in rows])
        else:
            _print_table(
                f"{len(rows)} sites", columns, [list(map(str, r)) for r in rows]
            )


@app.command()
def estimate(
    model: Model,
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    spec: SpecFile = None,
    taps: Taps = None,
    plot: Annotated[
        Path | None, typer.Option(help="write the memory timeline to this .svg file")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a capture costs, without running or allocating the model."""
    from fxcapture.cli_tables import estimate_data, estimate_tables

    with _reported(debug):
        chosen = load_spec(spec, taps or ())
        loaded = _prepare(
            model, config, settings, inputs, keywords, batch, length, meta=True
        )
        with _err.status("tracing on fake tensors"):
            from fxcapture.memory import estimate as run

            made = run(loaded.model, chosen, loaded.args, loaded.kwargs)
        if plot is not None:
            from fxcapture.drawing import draw_timeline

            plot.write_text(draw_timeline(made))
            _err.print(f"wrote {plot}")
        if as_json:
            _print_json(estimate_data(made))
            return
        for title, columns, rows in estimate_tables(made):
            _print_table(title, columns, rows)


@app.command()
def verify(
    model: Model,
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    spec: SpecFile = None,
    taps: Taps = None,
    backend: Backend = "inductor",
    tolerance: Annotated[
        float, typer.Option(help="largest difference allowed, relative to the record")
    ] = 1e-4,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a compiled capture with the eager reference; exit code 1 if unlike."""
    with _reported(debug):
        chosen = load_spec(spec, taps or ())
        loaded = _prepare(model, config, settings, inputs, keywords, batch, length)
        with _err.status(f"compiling with {backend}"), torch.no_grad():
            captured = _compiled(loaded, chosen, backend)
            found = fxcapture.verify(captured, *loaded.args, **loaded.kwargs)
        rows = []
        for name, difference in found.differences.items():
            allowed = tolerance * max(found.scales[name], 1e-30)
            rows.append((name, difference, found.scales[name], difference <= allowed))
        good = all(row[3] for row in rows)
        if as_json:
            keys = ("record", "difference", "scale", "within_tolerance")
            _print_json(
                {
                    "records": [dict(zip(keys, row, strict=True)) for row in rows],
                    "output_difference": found.output_difference,
                    "tolerance": tolerance,
                    "good": good,
                }
            )
        else:
            _print_table(
                "differences from the eager reference",
                ["record", "largest difference", "largest value", "verdict"],
                [[n, f"{d:.3g}", f"{s:.3g}", "good" if g else "DIFFERS"]
                 for n, d, s, g in rows]
                + [["(output)", f"{found.output_difference or 0:.3g}", "", ""]],
            )  # fmt: skip
        if not good:
            raise typer.Exit(1)


@app.command()
def explain(
    model: Model,
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    spec: SpecFile = None,
    taps: Taps = None,
    backend: Backend = "eager",
    form: Annotated[Format, typer.Option("--format", help="how to draw")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option(help="write to this file")] = None,
    debug: Debug = False,
) -> None:
    """Show which call feeds which position of each record, and where it runs."""
    from fxcapture.drawing import draw

    with _reported(debug):
        chosen = load_spec(spec, taps or ())
        loaded = _prepare(model, config, settings, inputs, keywords, batch, length)
        with _err.status(f"compiling with {backend}"), torch.no_grad():
            captured = _compiled(loaded, chosen, backend)
            captured(*loaded.args, **loaded.kwargs)
        text = draw(captured, form.value)
        if out is None:
            print(text)
        else:
            out.write_text(text)
            _err.print(f"wrote {out}")


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="file to write")],
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    spec: SpecFile = None,
    taps: Taps = None,
    package: Annotated[
        bool, typer.Option("--package", help="compile it with AOTInductor")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="write ONNX instead")] = False,
    records_only: Annotated[
        bool, typer.Option(help="end the program where the records are complete")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export the model with capture in it, to .pt2, an AOTInductor package or ONNX."""
    with _reported(debug):
        if package and onnx:
            raise UsageError("--package and --onnx exclude each other")
        chosen = load_spec(spec, taps or ())
        loaded = _prepare(model, config, settings, inputs, keywords, batch, length)
        from fxcapture.captured_program import export as run

        with _err.status("exporting"), torch.no_grad():
            program = run(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                spec=chosen,
                keep_output=not records_only,
            )
        with _err.status(f"writing {out}"):
            if package:
                program.package(out)
            elif onnx:
                program.onnx(out)
            else:
                program.save(out)
        rows = [
            [o.name, o.dtype, "x".join(map(str, o.shape))]
            for o in program.manifest.outputs
        ]
        if as_json:
            keys = ("name", "dtype", "shape")
            _print_json(
                {
                    "file": str(out),
                    "outputs": [dict(zip(keys, row, strict=True)) for row in rows],
                }
            )
        else:
            _print_table(f"added outputs of {out}", ["name", "dtype", "shape"], rows)


@app.command()
def bench(
    model: Model,
    config: Config = None,
    settings: Set = None,
    inputs: Input = None,
    keywords: Arg = None,
    batch: Batch = 1,
    length: Length = 16,
    spec: SpecFile = None,
    taps: Taps = None,
    backend: Backend = "inductor",
    rounds: Annotated[int, typer.Option(min=3, help="timed calls of each")] = 30,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the compiled model with and without capture, in interleaved rounds."""
    from fxcapture.cli_tables import bench_data

    with _reported(debug):
        chosen = load_spec(spec, taps or ())
        loaded = _prepare(model, config, settings, inputs, keywords, batch, length)
        made = bench_data(loaded, chosen, backend, rounds, _err)
        if as_json:
            _print_json(made)
            return
        _print_table(
            f"{made['model']}, {backend}, {rounds} interleaved rounds",
            ["variant", "median ms", "over plain", "first call s"],
            [
                [v["variant"], f"{v['median_ms']:.3f}", f"{v['over_plain']:.3f}",
                 f"{v['first_call_s']:.1f}"]
                for v in made["variants"]
            ],
        )  # fmt: skip
        print(
            f"records hold {made['kept_bytes']:,} bytes, "
            f"all positions would hold {made['full_bytes']:,}"
        )


@app.command()
def demo(debug: Debug = False) -> None:
    """Compile a real encoder and a small decoder with capture, check and measure."""
    with _reported(debug):
        from fxcapture.demo import main

        main()


def _version(asked: bool) -> None:
    if asked:
        print(f"fxcapture {fxcapture.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of no command in particular."""
