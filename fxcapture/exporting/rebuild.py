"""An exported program, rebuilt with other outputs.

Terms
    marked program: an ``ExportedProgram`` whose graph holds marks.
    own outputs: what the exported model returns, without capture.
    added outputs: the taps.  A program with taps returns ``(own, {name: tap, ...})``,
        or the dictionary alone where the caller does not want the model's output.

Invariants
    The program that comes in is not changed, but by ``restore_names``.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
)

from fxcapture import _torch, passes
from fxcapture.errors import CaptureError, GraphError
from fxcapture.exporting.manifest import OutputInfo, RecordLayout
from fxcapture.exporting.output_names import OutputNamer
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Plan

__all__ = [
    "arrange",
    "attach",
    "own_output_names",
    "restore_names",
    "with_plain_output",
]


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
