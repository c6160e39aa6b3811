"""The export front end: a model, exported with marks; an exported program with taps.

Terms
    marked program: an ``ExportedProgram`` whose graph holds marks.
    own outputs: what the exported model returns, without capture.
    added outputs: the taps.  A program with taps returns ``(own, {name: tap, ...})``,
        or the dictionary alone where the caller does not want the model's output.

Invariants
    The overrides stand in the model's instances while the export lasts, in both modes,
    and are gone after it, also if it failed.
    The program that comes in is not changed.
    The names of added outputs are ``{record}_{position}``, followed by the element's
    name where a position is a container.  They are node names too, since ONNX and other
    consumers call outputs by these.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)

from fxcapture import _compat, passes
from fxcapture.errors import FxCaptureError, GraphError, TraceError
from fxcapture.manifest import OutputInfo, RecordLayout, SlotLayout
from fxcapture.mark import Reducers, Target, emit_mark, enter, leave
from fxcapture.passes.base import TapKey
from fxcapture.passes.collect_marks import MarkedSites
from fxcapture.plan import Plan, Slot
from fxcapture.structure import Structure

__all__ = ["attach", "overridden", "trace", "with_plain_output"]

# torch.export runs the model's own Python code, so two exports of one model at a time
# would see each other's overrides.
_exporting = threading.RLock()


@contextlib.contextmanager
def overridden(
    model: nn.Module, targets: Sequence[Target], reducers: Reducers
) -> Iterator[None]:
    """A time in which the targets emit marks."""
    signature = inspect.signature(model.forward)
    with _exporting:
        saved = enter(model, targets, emit_mark, reducers)
        try:
            own = model.__dict__.get("forward")
            if own is not None and inspect.isfunction(own):
                # torch.export names the program's inputs after the root's parameters.
                own.__signature__ = signature  # type: ignore[attr-defined]
            yield
        finally:
            leave(saved)


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Sequence[Target],
    reducers: Reducers,
    *,
    dynamic_shapes: Any,
    strict: bool,
) -> ExportedProgram:
    """Export a model with marks behind the targets' calls.

    Raises:
        TraceError: the model cannot be exported.
    """
    with overridden(model, targets, reducers):
        try:
            return torch.export.export(
                model,
                args,
                dict(kwargs),
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


def attach(
    program: ExportedProgram,
    marked: MarkedSites,
    plan: Plan,
    *,
    keep_output: bool,
) -> tuple[ExportedProgram, tuple[RecordLayout, ...], tuple[OutputInfo, ...]]:
    """A copy of a marked program that returns what the plan wants.

    Args:
        program: The marked program; not changed.
        marked: Its sites.
        plan: What to bring out.
        keep_output: Whether to return the model's own output too.

    Raises:
        UnreachableValueError: a wanted value cannot leave a sub-graph.
        GraphError: a pass broke the graph (our bug).
    """
    old = program.graph_signature
    source = program.graph_module
    own_specs = list(old.output_specs)
    if not keep_output:
        source = passes.copy_graph_module(source)
        own_specs = _drop_user_outputs(source, own_specs)
    made = passes.rewrite(
        source,
        marked,
        plan.wanted(),
        plan.wanted_sizes(),
        prune=not keep_output,
    )
    keys: tuple[TapKey, ...] = made.meta.pop(passes.OUTPUTS)
    layouts, infos, specs = _Namer(made, keys, plan, marked).run(len(own_specs))
    _refresh_names(made, own_specs)
    input_specs = list(old.input_specs)
    if not keep_output:
        input_specs = _drop_unused_inputs(made, input_specs)
    made.recompile()
    signature = ExportGraphSignature(
        input_specs=input_specs, output_specs=[*own_specs, *specs]
    )
    return (
        _rebuilt(program, made, signature, [i.name for i in infos], keep_output),
        layouts,
        infos,
    )


def _rebuilt(
    program: ExportedProgram,
    made: fx.GraphModule,
    signature: ExportGraphSignature,
    names: Sequence[str],
    keep_output: bool,
) -> ExportedProgram:
    calls = _copy_calls(program)
    root = next(entry for entry in calls if entry.fqn == "")
    if root.signature is None:
        raise GraphError("the exported program has no signature for its root")
    root.signature.out_spec = _compat.output_spec_with(
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


def with_plain_output(program: ExportedProgram) -> ExportedProgram:
    """A copy of a program that returns builtin containers only; weights are shared."""
    made = passes.copy_graph_module(program.graph_module)
    calls = _copy_calls(program)
    for entry in calls:
        if entry.fqn == "" and entry.signature is not None:
            entry.signature.out_spec = _compat.plain_spec(entry.signature.out_spec)
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
        _compat.rename_node(node, name)
    _refresh_names(program.graph_module, specs)
    program.graph_module.recompile()


def own_output_names(program: ExportedProgram, num_added: int) -> list[str]:
    """A name for each output in front of the taps, from its place in the output."""
    own = _compat.output_paths(program.module_call_graph[0].signature.out_spec)  # type: ignore[union-attr]
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


class _Namer:
    """Gives every slot outputs of its own, named after the record."""

    def __init__(
        self,
        gm: fx.GraphModule,
        keys: Sequence[TapKey],
        plan: Plan,
        marked: MarkedSites,
    ) -> None:
        self._gm = gm
        self._plan = plan
        self._sites = marked.sites
        outputs: Any = gm.graph.output_node().args[0]
        self._node_of = dict(
            zip(keys, outputs[len(outputs) - len(keys) :], strict=True)
        )
        self._used: set[fx.Node] = set()
        self._nodes: list[fx.Node] = []
        self._names: set[str] = set()

    def run(
        self, num_own: int
    ) -> tuple[tuple[RecordLayout, ...], tuple[OutputInfo, ...], list[OutputSpec]]:
        """Name the outputs in the order of the records.

        Args:
            num_own: Number of outputs in front of the taps.
        """
        layouts = []
        for record in self._plan.records:
            layouts.append(
                RecordLayout(
                    name=record.name,
                    paths=record.paths,
                    slots=tuple(
                        slot and self._slot(slot, f"{record.name}_{position}")
                        for position, slot in enumerate(record.slots)
                    ),
                )
            )
        output = self._gm.graph.output_node()
        own: Any = output.args[0]
        output.args = ((*own[:num_own], *self._nodes),)
        return (
            tuple(layouts),
            tuple(map(_info, self._nodes)),
            list(map(_output_spec, self._nodes)),
        )

    def _slot(self, slot: Slot, base: str) -> SlotLayout:
        site = self._sites[slot.site]
        known = site.entry_sizes if slot.entry else site.sizes
        parts = dict(_leaf_names(slot.structure))
        tensors = tuple(
            (i, self._output(TapKey(slot.site, leaf=leaf), base + parts["tensor", i]))
            for i, leaf in slot.leaves
        )
        sizes: list[tuple[int, int | str]] = []
        for i in slot.sizes:
            size = known[i]
            if size is None:
                key = TapKey(slot.site, size=(slot.entry, i))
                sizes.append((i, self._output(key, base + parts["int", i])))
            else:
                sizes.append((i, size))
        return SlotLayout(structure=slot.structure, tensors=tensors, sizes=tuple(sizes))

    def _output(self, key: TapKey, wanted: str) -> str:
        node = self._node_of[key]
        if node in self._used:
            node = self._again(node)
        self._used.add(node)
        name = wanted = re.sub(r"\W", "_", wanted)
        number = 1
        while name in self._names or not _compat.rename_node(node, name):
            name = f"{wanted}_{number}"
            number += 1
        self._names.add(name)
        self._nodes.append(node)
        return name

    def _again(self, node: fx.Node) -> fx.Node:
        """One more output with the same value, for a second record."""
        graph = self._gm.graph
        with graph.inserting_before(graph.output_node()):
            if isinstance(node.meta.get("val"), torch.Tensor):
                made = graph.call_function(torch.ops.aten.clone.default, (node,))
            else:
                made = graph.call_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        return made


def _leaf_names(
    structure: Structure, path: str = ""
) -> Iterator[tuple[tuple[str, int], str]]:
    """(kind, index) of each leaf with what its name adds to the position's."""
    if structure.kind in ("tensor", "int"):
        yield (structure.kind, structure.index), path
    names = structure.keys or getattr(structure.cls, "_fields", ())
    for i, child in enumerate(structure.children):
        yield from _leaf_names(child, f"{path}_{names[i] if names else i}")


def _info(node: fx.Node) -> OutputInfo:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return OutputInfo(name=node.name, dtype="int", shape=())
    return OutputInfo(
        name=node.name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(s if isinstance(s, int) else str(s) for s in value.shape),
    )


def _output_spec(node: fx.Node) -> OutputSpec:
    tensor = isinstance(node.meta.get("val"), torch.Tensor)
    arg = TensorArgument(node.name) if tensor else SymIntArgument(node.name)
    return OutputSpec(kind=OutputKind.USER_OUTPUT, arg=arg, target=None)
