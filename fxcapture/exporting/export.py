"""From a model and a spec to an exported program that returns records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fxcapture
from fxcapture import _torch, passes
from fxcapture.errors import SpecError, SpecTypeError
from fxcapture.exporting.front_end import trace
from fxcapture.exporting.manifest import Manifest, OutputInfo, RecordLayout
from fxcapture.exporting.program import CapturedProgram
from fxcapture.exporting.rebuild import attach
from fxcapture.inspect.arguments import example_arguments
from fxcapture.passes.compute_weights import weights_wanted
from fxcapture.plan.match import match
from fxcapture.plan.resolve import resolve
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.fused_layers import fused_attention
from fxcapture.trace.method_entry import as_module

__all__ = ["export", "make_manifest"]

_log = logging.getLogger("fxcapture")


def export(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    spec: CaptureSpec | Mapping[str, Any],
    capture_inputs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = False,
    keep_output: bool = True,
) -> CapturedProgram:
    """Export a model as a program that returns its output and the records.

    Example::

        spec = {"hidden": Tap("layers.*", select=[0, -2])}
        program = export(model, (ids,), spec=spec)
        output, records = program(ids)
        program.save("model.pt2")

    Args:
        model: The model; not changed.
        args: Example arguments, as for ``torch.export.export``, or the only one if it
            is a tensor.
        kwargs: Example keyword arguments.
        spec: What to capture; a mapping is made into a :class:`CaptureSpec`.
        capture_inputs: Name to example tensor: inputs of the spec's reductions that
            are no arguments of the model.  The program takes them as keywords.
        dynamic_shapes: As for ``torch.export.export``; those of ``capture_inputs`` by
            name, and static where nothing is said.
        strict: Trace with Dynamo instead of by running the model's Python code.
        keep_output: With ``False`` the program returns the records alone and ends at
            the last operation that one needs; parameters behind it are left out.

    A record that can hold nothing but ``None`` is told of in the log ``fxcapture``, and
    stands in the program's ``nothing``.

    Raises:
        SpecTypeError: ``model``, ``spec`` or ``args`` is of the wrong type.
        TargetError: the spec does not fit the model, or what the run called.
        ElementError: a reduction names an input that there is not.
        SpecError: ``capture_inputs`` has the name of an argument of the model.
        TraceError: the model cannot be exported.
        UnreachableValueError: a value cannot leave the sub-graph it is computed in.
    """
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise SpecTypeError(
            f"model is of type {type(model).__name__}",
            why="sites are calls of submodules, so the model must be a torch.nn.Module",
            remedy="for a graph that exists already use fxcapture.instrument",
        )
    positional, named = example_arguments(args, kwargs)
    if not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    model = _torch.unwrap_optimized(model)
    bound = match(spec, model)
    with fused_attention(not bound.inside_fused):
        traced = trace(
            model,
            positional,
            named,
            bound,
            spec,
            capture_inputs=capture_inputs or {},
            dynamic_shapes=dynamic_shapes,
            strict=strict,
        )
    marked = passes.collect_marks(traced.graph_module, graph=0, classes=bound.classes)
    plan = resolve(spec, bound, marked.sites)
    program, records, outputs = attach(
        traced,
        marked,
        plan,
        keep_output=keep_output,
        attention=weights_wanted(spec),
    )
    manifest = make_manifest(spec, keep_output, records, outputs)
    made = CapturedProgram(program, manifest, sites=marked.sites, spec=spec)
    for nothing in made.nothing.values():
        # Not an error and no warning that can be made one: the model may mean it.
        _log.warning("%s", nothing)
    return made


def make_manifest(
    spec: CaptureSpec,
    keep_output: bool,
    records: tuple[RecordLayout, ...],
    outputs: tuple[OutputInfo, ...],
) -> Manifest:
    """The manifest of a program that this process makes."""
    try:
        # In the form in which the manifest gives it back.
        text: str | None = json.dumps(json.loads(spec.to_json()))
    except SpecError:
        text = None
    return Manifest(
        spec=text,
        spec_text=repr(spec),
        keep_output=keep_output,
        records=records,
        outputs=outputs,
        versions=(
            ("fxcapture", fxcapture.__version__),
            ("torch", str(torch.__version__)),
        ),
    )
