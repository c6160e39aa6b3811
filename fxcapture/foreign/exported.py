"""Marks for an exported program that has none, where it determines the calls.

Terms
    kept signature: what ``preserve_module_call_signature`` leaves of a module: the
        nodes of its arguments and results, and their containers.

Invariants
    A mark stands behind the last operation of its call, so that it holds what the
    caller received, as marks do that were traced with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    SymIntArgument,
    TensorArgument,
)

from fxcapture import _torch, passes
from fxcapture.errors import ElementError, nearest
from fxcapture.foreign.bind import bind, calls_of
from fxcapture.foreign.classes import shell
from fxcapture.foreign.reader import Call, ForeignGraph
from fxcapture.plan.match import Match, reducers_of
from fxcapture.reductions import Reduction
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import MARK

Observation = None
from fxcapture.trace.signature import describe_forward
from fxcapture.trace.structure_text import encode

__all__ = ["mark_program"]


def mark_program(
    program: ExportedProgram, spec: CaptureSpec, *, assume_tensors: bool
) -> tuple[fx.GraphModule, Match]:
    """A marked copy of a program's graph, and the spec bound to its modules.

    Raises:
        TargetNotFoundError: a target matches no module of the program.
        AmbiguousSiteError: the program does not determine a call or its result.
    """
    gm = passes.copy_graph_module(program.graph_module)
    graph = _foreign(program, gm)
    bound = bind(spec, graph)
    _check_shared(program, graph, bound)
    marker = _Marker(program, gm, graph, spec, bound, assume_tensors)
    for path, call in calls_of(bound, graph):
        marker.mark(path, call)
    return gm, bound


def _foreign(program: ExportedProgram, gm: fx.GraphModule) -> ForeignGraph:
    root: Any = ""
    for node in gm.graph.nodes:
        for path, cls in node.meta.get("nn_module_stack", {}).values():
            if not path and cls:
                root = cls
    return ForeignGraph(
        gm,
        shown=[
            entry.fqn
            for entry in program.module_call_graph
            if entry.fqn and "@" not in entry.fqn
        ],
        root=root,
        state={
            spec.arg.name: spec.target
            for spec in program.graph_signature.input_specs
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target
        },
    )


def _check_shared(program: ExportedProgram, graph: ForeignGraph, bound: Match) -> None:
    """Refuse a module that may be called through another name as well.

    A shared module is one module, whichever of its names it is called through, and most
    exports keep no more of it than the names.
    """
    owners: dict[int, set[str]] = {}
    for name, value in program.state_dict.items():
        owners.setdefault(_storage(value), set()).add(name)
    stateful = {name.rpartition(".")[0] for name in program.state_dict}
    for path in bound.entries:
        if not path:
            continue
        for name, value in program.state_dict.items():
            if not name.startswith(f"{path}."):
                continue
            for other in owners[_storage(value)]:
                if not other.startswith(f"{path}."):
                    _refuse_shared(graph, bound, path, other.rpartition(".")[0])
        if any(p == path or p.startswith(f"{path}.") for p in stateful):
            continue
        if not graph.has_object_keys:
            for other in graph.names:
                if other != path:
                    _refuse_shared(graph, bound, path, other)


def _refuse_shared(graph: ForeignGraph, bound: Match, path: str, other: str) -> None:
    if graph.names.get(other) != graph.names.get(path) or other not in graph.calls:
        return
    for found in bound.paths.values():
        if path in found and other not in found:
            raise graph.ambiguous(
                path,
                f"{path!r} and {other!r} may be one module under two names, which has "
                "the calls of both",
            )


def _storage(value: torch.Tensor) -> int:
    return id(value) if value.is_meta else value.untyped_storage().data_ptr()


@final
class _Marker:
    """Puts marks into the graph of one program."""

    def __init__(
        self,
        program: ExportedProgram,
        gm: fx.GraphModule,
        graph: ForeignGraph,
        spec: CaptureSpec,
        bound: Match,
        assume_tensors: bool,
    ) -> None:
        self._program = program
        self._gm = gm
        self._graph = graph
        self._bound = bound
        self._assume = assume_tensors
        self._reducers = reducers_of(spec)
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self._behind: dict[fx.Node, fx.Node] = {}
        self._signatures: dict[str, list[Any]] = {}
        for entry in program.module_call_graph:
            if entry.fqn and entry.signature is not None:
                path = entry.fqn.partition("@")[0]
                self._signatures.setdefault(path, []).append(entry.signature)
        self._root = next(e.signature for e in program.module_call_graph if not e.fqn)

    def mark(self, path: str, call: Call | None) -> None:
        """Mark one call, or the program itself."""
        result, arguments = self._values(path, call)
        entries = [self._entry(path, e, arguments) for e in self._bound.entries[path]]
        seen: list[fx.Node] = []
        entry_sizes: list[Any] = []
        entry_text = _encode(tuple(entries), seen, entry_sizes)
        graph = self._gm.graph
        if call is None:
            start = next(n for n in graph.nodes if n.op != "placeholder")
            end = graph.output_node()
        else:
            start = call.first
            end = self._behind.get(call.last, call.last).next
        derived = []
        with graph.inserting_before(start):
            for node in seen:
                derived.append(_clone(graph, node))
        tensors: list[fx.Node] = []
        sizes: list[Any] = []
        text = _encode(result, tensors, sizes)
        reduced: list[fx.Node] = []
        with graph.inserting_before(end):
            for request in self._bound.requests[path]:
                if request.entry >= 0:
                    for i in entry_leaves(entry_text, request.entry):
                        reduced.append(self._reduce(request.record, derived[i]))
            for request in self._bound.requests[path]:
                if request.result:
                    for i in element_leaves(text, request.output):
                        reduced.append(self._reduce(request.record, tensors[i]))
            made = graph.call_function(
                MARK,
                tuple(
                    Observation(
                        token=None,
                        result=tensors,  # type: ignore[arg-type]
                        derived=derived + reduced,  # type: ignore[arg-type]
                        sizes=sizes,
                        entry_sizes=entry_sizes,
                        structure=text,
                        entries=entry_text,
                        path=path,
                        hooked=False,
                    )
                ),
            )
        if call is not None:
            made.meta = {
                key: value
                for key, value in call.last.meta.items()
                if key in ("nn_module_stack", "stack_trace")
            }
            self._behind[call.last] = made

    # -- values ------------------------------------------------------------------------

    def _values(
        self, path: str, call: Call | None
    ) -> tuple[Any, dict[Any, Any] | None]:
        """What a call returned, and its arguments if they are known.

        Containers hold nodes in place of tensors and symbolic integers.
        """
        if call is None:
            return self._root_values()
        signatures = self._signatures.get(call.path)
        if signatures is None:
            if self._program.dialect != "TRAINING" and not self._is_builtin(call.path):
                raise self._graph.ambiguous(
                    call.path,
                    "the program was decomposed, which moves and drops operations",
                )
            return self._graph.result(call, assume_tensor=self._assume), None
        calls = self._graph.calls[call.path]
        if len(signatures) != len(calls):
            raise self._graph.ambiguous(
                call.path,
                f"{len(signatures)} signatures were kept of it, but {len(calls)} of "
                "its calls left operations",
            )
        self._graph.region(call)
        signature = signatures[calls.index(call)]
        result = self._fill(path, signature.outputs, signature.out_spec)
        args, kwargs = self._fill(path, signature.inputs, signature.in_spec)
        names = signature.forward_arg_names or self._parameter_names(call.path)
        return result, _by_position_and_name(args, kwargs, names)

    def _parameter_names(self, path: str) -> tuple[str, ...]:
        cls = self._graph.classes.get(path)
        return describe_forward(shell(cls, ""))[0] if cls is not None else ()

    def _is_builtin(self, path: str) -> bool:
        cls = self._graph.classes.get(path)
        return cls is not None and cls.__module__.startswith("torch.nn.")

    def _root_values(self) -> tuple[Any, dict[Any, Any]]:
        signature = self._program.graph_signature
        outputs: Any = self._gm.graph.output_node().args[0]
        own = [
            value
            for value, spec in zip(outputs, signature.output_specs, strict=True)
            if spec.kind.name == "USER_OUTPUT"
        ]
        inputs: list[Any] = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    inputs.append(spec.arg.value)
                else:
                    inputs.append(self._nodes[spec.arg.name])
        assert self._root is not None
        args, kwargs = _torch.unflatten(inputs, self._root.in_spec)
        names = self._root.forward_arg_names or ()
        arguments = _by_position_and_name(args, kwargs, names)
        return _torch.unflatten(own, self._root.out_spec), arguments

    def _fill(self, path: str, arguments: list[Any], spec: Any) -> Any:
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, ConstantArgument):
                values.append(argument.value)
            elif (
                isinstance(argument, (TensorArgument, SymIntArgument))
                and argument.name in self._nodes
            ):
                values.append(self._nodes[argument.name])
            else:
                raise self._graph.ambiguous(
                    path, f"its signature names {argument}, which is no node"
                )
        return _torch.unflatten(values, spec)

    def _entry(
        self, path: str, entry: int | str, arguments: Mapping[Any, Any] | None
    ) -> Any:
        if arguments is None:
            raise self._graph.ambiguous(
                path,
                "it was inlined, and the graph does not say which values were its "
                "arguments",
            )
        if entry not in arguments:
            raise self._graph.ambiguous(
                path, f"the graph does not say that it received an input {entry!r}"
            )
        return arguments[entry]

    def _reduce(self, record: str, node: fx.Node) -> fx.Node:
        reduce = self._reducers[record]
        source = reduce.source if isinstance(reduce, Reduction) else None
        if source is None:
            return inline(self._gm.graph, reduce, node)
        assert isinstance(reduce, Reduction)
        arguments = self._root_values()[1]
        if source not in arguments:
            known = [name for name in arguments if isinstance(name, str)]
            raise ElementError(
                f"record {record!r}: reduce={reduce!r} needs the input {source!r}, "
                "which the program does not have",
                why="it takes " + (", ".join(known) or "no named arguments"),
                nearest=nearest(source, known),
                remedy="name one of these, or export the model with fxcapture.export",
            )
        value = arguments[source]
        reduce.check_input(value.meta["val"] if isinstance(value, fx.Node) else value)
        if value is None:  # a mask that the export left out
            return inline(self._gm.graph, lambda h: reduce.apply(h, None), node)
        return inline(self._gm.graph, lambda h, s: reduce.apply(h, s), node, value)


def _by_position_and_name(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> dict[Any, Any]:
    """The arguments of a call under their positions and under their names."""
    found: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs)
    for i, name in enumerate(names):
        if i < len(args):
            found[name] = args[i]
        elif name in kwargs:
            found[i] = kwargs[name]
    return found


def _encode(value: Any, tensors: list[fx.Node], sizes: list[Any]) -> str:
    """As :func:`fxcapture.trace.structure.encode`, with nodes in the lists."""
    by_value: dict[int, fx.Node] = {}

    def to_value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        # A fresh object for each place, so that a node that stands twice does too.
        held = node.meta["val"]
        held = held.view(held.shape) if isinstance(held, torch.Tensor) else held
        by_value[id(held)] = node
        kept.append(held)
        return held

    kept: list[Any] = []
    held_tensors: list[Any] = []
    held_sizes: list[Any] = []
    text = encode(_torch.map_nodes(to_value, value), held_tensors, held_sizes)
    tensors += [by_value[id(t)] for t in held_tensors]
    sizes += [by_value.get(id(s), s) for s in held_sizes]
    return text


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta = dict(node.meta)
    made.meta["val"] = node.meta["val"].clone()
    return made


def inline(
    graph: fx.Graph, function: Callable[..., torch.Tensor], *nodes: fx.Node
) -> fx.Node:
    """Add the ATen operations of ``function(*nodes)`` to a graph."""
    traced = _torch.trace_on_fake(function, *[node.meta["val"] for node in nodes])
    mapped: dict[fx.Node, Any] = {}
    made: Any = nodes[0]
    places = iter(nodes)
    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            mapped[inner] = next(places)
        elif inner.op == "output":
            made = mapped[inner.args[0]]
        else:
            mapped[inner] = graph.node_copy(inner, lambda n: mapped[n])
    return made  # type: ignore[no-any-return]
