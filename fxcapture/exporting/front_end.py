"""The export front end: a model, exported with marks; an exported program with taps.

Terms
    marked program: an ``ExportedProgram`` whose graph holds marks.
    own outputs: what the exported model returns, without capture.
    added outputs: the taps.  A program with taps returns ``(own, {name: tap, ...})``,
        or the dictionary alone where the caller does not want the model's output.

Invariants
    The overrides stand in the model's instances while the export lasts, in both modes,
    and are gone after it, also if it failed.  So is whatever else the trace left in an
    attribute of a module.
    The program that comes in is not changed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
)

from fxcapture import _torch, passes
from fxcapture.errors import CaptureError, FxCaptureError, GraphError, TraceError
from fxcapture.exporting.manifest import OutputInfo, RecordLayout
from fxcapture.exporting.output_names import OutputNamer
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.base import TapKey
from fxcapture.passes.compute_weights import weights_wanted
from fxcapture.plan.inputs import Place, find_places, read_inputs
from fxcapture.plan.match import reducers_of
from fxcapture.plan.plan import Plan
from fxcapture.reductions import Reducers
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import allow_marks, emit_mark
from fxcapture.trace.observe import Target
from fxcapture.trace.scope import Saved, enter, undo, way_to
from fxcapture.trace.signature import describe_forward

__all__ = ["attach", "overridden", "trace", "with_plain_output"]

# torch.export runs the model's own Python code, so two exports of one model at a time
# would see each other's overrides.
_exporting = threading.RLock()


_OUR_SIDE_EFFECT = (
    r".*side effects happened.*: \["
    r"\"L\['self'\]\._modules\['_export_root'\]\.forward\.__closure__\[\d+\]"
    r"\.cell_contents\"\]$"
)


@contextlib.contextmanager
def overridden(
    model: nn.Module,
    targets: Sequence[Target],
    reducers: Reducers,
    places: Mapping[str, Place],
    added: Mapping[str, Any],
    marked: Collection[str],
) -> Iterator[None]:
    """A time in which the targets emit marks.

    Args:
        model: The model.
        targets: What to mark.
        reducers: Record name to its reduction.
        places: Where the model's call has the inputs of reductions.
        added: Those that are keywords of the call but not of the model.
        marked: Those that a pass has to find in the graph.
    """
    signature = _with_keywords(inspect.signature(model.forward), added)
    slot = model.__dict__
    # Targets call their reducers when the model runs, so those are found by then.
    late: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(reducers)
    with _exporting:
        before = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
        saved = Saved([], [])
        try:
            enter(
                model,
                way_to(model, targets, by_dynamo=False),
                emit_mark,
                late,
                into=saved,
            )
            if places:
                saved.others.append(
                    (slot, "forward", "forward" in slot, slot.get("forward"))
                )
                slot["forward"], made = read_inputs(
                    model.forward, reducers, places, added, marked
                )
                late.update(made)
            own = slot.get("forward")
            if own is not None and inspect.isfunction(own):
                # torch.export names the program's inputs after the root's parameters.
                own.__signature__ = signature  # type: ignore[attr-defined]
            yield
        finally:
            undo(saved)
            # A model that stores a value in an attribute would keep a tensor without
            # data, since export ran it on such tensors.
            for live, kept in before:
                live.update(kept)
                for key in live.keys() - kept.keys():
                    del live[key]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Sequence[Target],
    spec: CaptureSpec,
    *,
    capture_inputs: Mapping[str, Any],
    dynamic_shapes: Any,
    strict: bool,
) -> ExportedProgram:
    """Export a model with marks behind the targets' calls.

    Raises:
        ElementError: a reduction names an input that there is not.
        SpecError: ``capture_inputs`` has the name of an argument.
        SpecTypeError: an input is no tensor that its reduction can use.
        TraceError: the model cannot be exported.
    """
    places = find_places(spec, model, args, kwargs, capture_inputs)
    if capture_inputs:
        dynamic_shapes = _shapes_with(dynamic_shapes, model, capture_inputs)
    if strict:
        allow_marks()
    late = {w.source for w in weights_wanted(spec).values() if w.source}
    with (
        overridden(model, targets, reducers_of(spec), places, capture_inputs, late),
        warnings.catch_warnings(),
    ):
        # Where ``read_inputs`` puts them, which is empty again after the call; anything
        # else that the model writes to is still warned of.
        warnings.filterwarnings("ignore", _OUR_SIDE_EFFECT)
        try:
            return torch.export.export(
                model,
                args,
                {**kwargs, **capture_inputs},
                dynamic_shapes=dynamic_shapes,
                strict=strict,
            )
        except FxCaptureError:
            raise
        except Exception as error:
            # torch.export lets all kinds of errors through, its own and the model's.
            raise TraceError(
                f"{type(model).__name__} cannot be exported as one graph",
                why=f"{type(error).__name__}: {error}".strip().replace("\n", "\n    "),
                remedy="remove what stops the export (see the reason), or use "
                "fxcapture.compile, which also runs a model in pieces",
            ) from error


def _with_keywords(
    signature: inspect.Signature, names: Mapping[str, Any]
) -> inspect.Signature:
    """The signature with further keywords."""
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    return signature.replace(parameters=[*named, *added, *parameters[len(named) :]])


def _shapes_with(
    shapes: Any, model: nn.Module, capture_inputs: Mapping[str, Any]
) -> Any:
    """Dynamic shapes with an entry for each further input; static by default."""
    if shapes is None:
        return None
    if not isinstance(shapes, Mapping):
        # By position, which says nothing of keywords.
        shapes = dict(zip(describe_forward(model).names, shapes, strict=False))
    return {**shapes, **{n: shapes.get(n) for n in capture_inputs}}


def attach(
    program: ExportedProgram,
    marked: MarkedSites,
    plan: Plan,
    *,
    keep_output: bool,
    graph_module: fx.GraphModule | None = None,
    attention: Mapping[str, passes.WeightsWanted] | None = None,
) -> tuple[ExportedProgram, tuple[RecordLayout, ...], tuple[OutputInfo, ...]]:
    """A copy of a marked program that returns what the plan wants.

    Args:
        program: The marked program; not changed.
        marked: Its sites.
        plan: What to bring out.
        keep_output: Whether to return the model's own output too.
        graph_module: The marked graph, if it is not the program's own.
        attention: Record name to the attention weights it wants.

    Raises:
        UnreachableValueError: a wanted value cannot leave a sub-graph.
        GraphError: a pass broke the graph (our bug).
    """
    old = program.graph_signature
    source = program.graph_module if graph_module is None else graph_module
    own_specs = copy.deepcopy(old.output_specs)
    if not keep_output:
        source = passes.copy_graph_module(source)
        own_specs = _drop_user_outputs(source, own_specs)
    made = passes.rewrite(
        source,
        marked,
        plan.wanted(),
        plan.wanted_sizes(),
        attention=attention,
        prune=not keep_output,
    )
    keys: tuple[TapKey, ...] = made.meta.pop(passes.OUTPUTS)
    before = {node: node.name for node in made.graph.nodes}
    layouts, infos, specs = OutputNamer(made, keys, plan, marked).run(len(own_specs))
    renamed = {old: node.name for node, old in before.items() if old != node.name}
    _refresh_names(made, own_specs)
    input_specs = list(old.input_specs)
    if not keep_output:
        input_specs = _drop_unused_inputs(made, input_specs)
    made.recompile()
    signature = ExportGraphSignature(
        input_specs=input_specs, output_specs=[*own_specs, *specs]
    )
    return (
        _rebuilt(program, made, signature, infos, renamed, keep_output),
        layouts,
        infos,
    )


def _rebuilt(
    program: ExportedProgram,
    made: fx.GraphModule,
    signature: ExportGraphSignature,
    added: Sequence[OutputInfo],
    renamed: Mapping[str, str],
    keep_output: bool,
) -> ExportedProgram:
    calls = _copy_calls(program)
    for entry in calls:
        for argument in (
            entry.signature.inputs + entry.signature.outputs
            if (entry.signature)
            else ()
        ):
            argument.name = renamed.get(argument.name, argument.name)
        if not keep_output and entry.fqn:
            entry.signature = None  # it may name nodes that are gone
    names = [info.name for info in added]
    root = next(entry for entry in calls if entry.fqn == "")
    if root.signature is None:
        raise GraphError("the exported program has no signature for its root")
    root.signature.out_spec = _torch.output_spec_with(
        root.signature.out_spec if keep_output else None, names
    )
    used = {spec.target for spec in signature.input_specs}
    try:
        return ExportedProgram(
            root=made,
            graph=made.graph,
            graph_signature=signature,
            state_dict={
                name: value
                for name, value in program.state_dict.items()
                if keep_output or name in used
            },
            range_constraints=copy.deepcopy(program.range_constraints),
            module_call_graph=calls,
            example_inputs=program.example_inputs,
            constants={
                name: value
                for name, value in program.constants.items()
                if keep_output or name in used
            },
            verifiers=program.verifiers,
        )
    except Exception as error:
        raise GraphError(
            "the instrumented program is not valid", why=str(error)
        ) from error


def arrange(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, passed as the program was exported with.

    It takes by position what was passed by position then, and the rest by name.

    Raises:
        CaptureError: there are more by position than the program has a place for.
    """
    root = next(e.signature for e in program.module_call_graph if not e.fqn)
    if root is None:
        return args, kwargs
    positional, by_name = root.in_spec.children()
    names, named = root.forward_arg_names or (), list(by_name.context)
    given, rest = list(args), dict(kwargs)
    for name in names[len(args) : positional.num_children]:
        if name not in rest:
            break
        given.append(rest.pop(name))
    # Too many of a program that takes none by name is torch's own error.
    if len(given) > positional.num_children and named:
        if positional.num_children or len(given) != 1 or rest or len(named) != 1:
            raise CaptureError(
                f"the program takes {positional.num_children} arguments by position, "
                f"and the call passes {len(args)}",
                why="it was exported with the others by name, which does not tell "
                "their order",
                remedy="pass by name: " + ", ".join(f"{n}=..." for n in named),
            )
        return (), {named[0]: given[0]}
    return tuple(given), rest


def with_plain_output(program: ExportedProgram) -> ExportedProgram:
    """A copy of a program that returns builtin containers only; weights are shared."""
    made = passes.copy_graph_module(program.graph_module)
    calls = _copy_calls(program)
    for entry in calls:
        if entry.fqn == "" and entry.signature is not None:
            entry.signature.out_spec = _torch.plain_spec(entry.signature.out_spec)
    return ExportedProgram(
        root=made,
        graph=made.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def restore_names(program: ExportedProgram, names: Sequence[str]) -> None:
    """Call the last outputs of a program by these names, in place.

    A transformation makes new nodes with names of its own.
    """
    specs = program.graph_signature.output_specs
    outputs: Any = program.graph.output_node().args[0]
    for node, name in zip(outputs[len(outputs) - len(names) :], names, strict=True):
        _torch.rename_node(node, name)
    _refresh_names(program.graph_module, specs)
    program.graph_module.recompile()


def own_output_names(program: ExportedProgram, num_added: int) -> list[str]:
    """A name for each output in front of the taps, from its place in the output."""
    own = _torch.output_paths(program.module_call_graph[0].signature.out_spec)  # type: ignore[union-attr]
    own = own[: len(own) - num_added]
    return [re.sub(r"\W+", "_", path).strip("_") or "output" for path in own]


def _drop_user_outputs(
    gm: fx.GraphModule, specs: Sequence[OutputSpec]
) -> list[OutputSpec]:
    """Keep only the outputs by which a program writes to buffers."""
    output = gm.graph.output_node()
    kept = [
        (value, spec)
        for value, spec in zip(output.args[0], specs, strict=True)  # type: ignore[arg-type]
        if spec.kind is not OutputKind.USER_OUTPUT
    ]
    output.args = (tuple(value for value, _ in kept),)
    return [spec for _, spec in kept]


def _copy_calls(program: ExportedProgram) -> list[ModuleCallEntry]:
    """The module call graph, free to be edited; pytree specs are shared."""
    return [
        ModuleCallEntry(
            fqn=entry.fqn,
            signature=entry.signature
            and dataclasses.replace(
                entry.signature,
                inputs=copy.deepcopy(entry.signature.inputs),
                outputs=copy.deepcopy(entry.signature.outputs),
            ),
        )
        for entry in program.module_call_graph
    ]


_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def _drop_unused_inputs(gm: fx.GraphModule, specs: Sequence[Any]) -> list[Any]:
    """Drop parameters and buffers that nothing reads any more; user inputs stay."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    kept = []
    for node, spec in zip(nodes, specs, strict=True):
        if spec.kind in _STATE and not node.users:
            gm.graph.erase_node(node)
        else:
            kept.append(spec)
    return kept


def _refresh_names(gm: fx.GraphModule, specs: Sequence[OutputSpec]) -> None:
    """Point the own outputs' entries at their nodes, which may have been renamed."""
    outputs: Any = gm.graph.output_node().args[0]
    for i, spec in enumerate(specs):
        if isinstance(outputs[i], fx.Node) and spec.arg.name != outputs[i].name:
            specs[i].arg = type(spec.arg)(name=outputs[i].name)  # type: ignore[call-arg]
