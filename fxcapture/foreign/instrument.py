"""Captures in graphs that were made elsewhere and have no marks.

Terms
    foreign graph: a graph module of ``symbolic_trace`` or Dynamo, or an exported
        program that somebody else made.

Invariants
    Right, or an error: where a graph does not determine a value, nothing is recorded.
    The graph that comes in is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fxcapture import _torch, passes
from fxcapture.errors import SpecTypeError
from fxcapture.exporting import front_end as frontend
from fxcapture.exporting.program import CapturedProgram, make_manifest
from fxcapture.foreign.bind import bind, calls_of
from fxcapture.foreign.exported import mark_program
from fxcapture.foreign.reader import Call, ForeignGraph
from fxcapture.plan.match import Match, reducers_of
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import Site, SiteTable
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.tap import Tap
from fxcapture.trace.structure_text import encode, parse

__all__ = ["CapturedGraph", "instrument"]


def instrument(
    graph: ExportedProgram | fx.GraphModule,
    spec: CaptureSpec | Mapping[str, Any],
    *,
    keep_output: bool = True,
    assume_tensors: bool = False,
) -> CapturedProgram | CapturedGraph:
    """Add a capture to a graph that exists already.

    Example::

        captured = instrument(torch.fx.symbolic_trace(model), {"fc": Tap("fc")})
        output, records = captured(x)

    A call is found by its ``call_module`` node, by the signature that
    ``preserve_module_call_signature`` kept, or by the operations that it left.  An
    inlined module without a signature is taken only if it surely returns one tensor: as
    most of ``torch.nn`` does, and as a class does whose ``forward`` is declared to
    return ``torch.Tensor`` or evidently does.

    Args:
        graph: A traced graph module or an exported program; not changed.
        spec: What to capture; paths are those of the model that was traced.  A module
            that the graph does not show cannot be captured, even optionally.
        keep_output: With ``False`` the result returns the records alone.
        assume_tensors: Vouch that every inlined target returns one tensor.

    Raises:
        SpecTypeError: ``graph`` or ``spec`` is of the wrong type.
        TargetNotFoundError: a target matches no module that the graph shows.
        AmbiguousSiteError: the graph does not determine what a call returned, or
            whether there was one.
        SelectionError: a selected position does not exist.
    """
    if not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    if isinstance(graph, ExportedProgram):
        return _instrument_program(graph, spec, keep_output, assume_tensors)
    if isinstance(graph, fx.GraphModule):
        return _instrument_graph(graph, spec, keep_output, assume_tensors)
    raise SpecTypeError(
        f"graph is of type {type(graph).__name__}",
        why="captures are added to a torch.fx.GraphModule or an ExportedProgram",
        remedy="trace or export the model first, or use fxcapture.compile",
    )


def _instrument_program(
    program: ExportedProgram, spec: CaptureSpec, keep_output: bool, assume: bool
) -> CapturedProgram:
    gm, bound = mark_program(program, spec, assume_tensors=assume)
    marked = passes.collect_marks(gm, graph=0, classes=bound.classes)
    plan = resolve(spec, bound, marked.sites)
    made, records, outputs = frontend.attach(
        program, marked, plan, keep_output=keep_output, graph_module=gm
    )
    manifest = make_manifest(spec, keep_output, records, outputs)
    return CapturedProgram(made, manifest, sites=marked.sites, spec=spec)


# --------------------------------------------------------------------------------------
# Graph modules
# --------------------------------------------------------------------------------------


def _instrument_graph(
    gm: fx.GraphModule, spec: CaptureSpec, keep_output: bool, assume: bool
) -> CapturedGraph:
    graph = ForeignGraph(gm, class_name=type(gm).__name__)
    bound = bind(spec, graph)
    calls = calls_of(bound, graph)
    sites = SiteTable(
        [
            Site(
                path=path,
                structure="T",
                entries="t(" + ",".join("T" for _ in bound.entries[path]) + ")",
                graph=0,
                class_name=bound.classes[path],
            )
            for path, _ in calls
        ]
    )
    # What a call returned is known only when the graph runs, so the plan says which
    # calls and the taps pick the element.
    plan = resolve(_whole(spec), bound, sites)
    taps = _Taps(gm, graph, spec, bound, assume)
    names: dict[str, tuple[str | None, ...]] = {}
    for record in plan.records:
        names[record.name] = tuple(
            slot
            and taps.add(
                f"{record.name}_{position}", record.name, *calls[slot.site], slot.entry
            )
            for position, slot in enumerate(record.slots)
        )
    made = taps.finish(keep_output)
    paths = {record.name: record.paths for record in plan.records}
    return CapturedGraph(made, spec, sites, names, paths, keep_output)


def _whole(spec: CaptureSpec) -> CaptureSpec:
    """The same spec with whole, untreated values."""
    return CaptureSpec(
        {
            name: Tap(
                tap.target,
                output=tap.output if tap.point == "input" else None,
                select=tap.select,
                point=tap.point,
                initial=tap.initial,
                optional=tap.optional,
                attention=tap.attention,  # refused: nothing has watched the graph
            )
            for name, tap in spec.items()
        }
    )


def take(
    value: Any,
    *,
    what: str,
    output: int | str | None,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    detach: bool,
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> Any:
    """A copy of what a call returned, as a tap wants it; runs inside the graph."""
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    structure = parse(encode(value, tensors, sizes)).element(output, what)

    def treat(index: int) -> torch.Tensor:
        tensor = tensors[index]
        if reduce is not None:
            tensor = reduce(tensor)
        if detach:
            tensor = tensor.detach()
        wanted = dtype if tensor.is_floating_point() else None
        if wanted is not None or device is not None:
            tensor = tensor.to(device=device, dtype=wanted)
        return tensor.clone()

    return structure.build(treat, lambda i: sizes[i])


# It has to stand in the graph as one call, also if the graph is traced again.
fx.wrap("take")


@final
class _Reduction(nn.Module):
    """A reduction as a module, which a graph can name."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.function(value)


@final
class _Taps:
    """Adds taps to a copy of a graph module."""

    def __init__(
        self,
        gm: fx.GraphModule,
        graph: ForeignGraph,
        spec: CaptureSpec,
        bound: Match,
        assume: bool,
    ) -> None:
        self._graph = graph
        self._spec = spec
        self._bound = bound
        self._assume = assume
        self._reducers = reducers_of(spec)
        self._made = passes.copy_graph_module(gm)
        self._new = dict(zip(gm.graph.nodes, self._made.graph.nodes, strict=True))
        self._taps: dict[str, fx.Node] = {}
        self._own = self._made.graph.output_node().args[0]

    def add(
        self, name: str, record: str, path: str, call: Call | None, entry: bool
    ) -> str:
        """One tap; its name among the outputs."""
        tap = self._spec[record]
        value, where = self._entry(tap, path, call) if entry else self._result(call)
        options: dict[str, Any] = {
            "what": f"the {'input' if entry else 'output'} of {path or 'the model'!r}",
            "output": None if entry else tap.output,
            "reduce": self._reducer(record, where),
            "detach": tap.detach,
            "dtype": tap.dtype,
            "device": tap.device,
        }
        with self._made.graph.inserting_before(where):
            node = self._made.graph.call_function(take, (value,), options)
        self._taps[name] = node
        return name

    def _reducer(self, record: str, where: fx.Node) -> fx.Node | None:
        """A node that gives a record's reduction: a graph holds no functions."""
        if record not in self._reducers:
            return None
        name = f"_fxcapture_reduce_{len(self._taps)}"
        self._made.add_submodule(name, _Reduction(self._reducers[record]))
        with self._made.graph.inserting_before(where):
            return self._made.graph.get_attr(name)

    def _result(self, call: Call | None) -> tuple[Any, fx.Node]:
        """What a call returned, and the node before which it stands."""
        if call is None:
            return self._root(), self._made.graph.output_node()
        node = call.node
        if node is None:
            node = self._graph.result(call, assume_tensor=self._assume)
        return self._new[node], self._new[call.last].next

    def _root(self) -> Any:
        """What the graph's model returned."""
        graph = self._made.graph
        if _torch.has_pytree_output(graph):
            return _torch.own_pytree_output(graph, list(self._own))  # type: ignore[arg-type]
        if self._is_by_dynamo():
            raise self._graph.ambiguous(
                "",
                "a Dynamo graph returns a flat tuple of tensors, which the code around "
                "it makes the model's output of",
            )
        return self._own

    def _is_by_dynamo(self) -> bool:
        return any("example_value" in node.meta for node in self._made.graph.nodes)

    def _own_input(self, wanted: int | str) -> tuple[fx.Node, fx.Node]:
        """What the graph's model received, and the node before which it stands."""
        graph = self._made.graph
        if self._is_by_dynamo():
            raise self._graph.ambiguous(
                "",
                "a Dynamo graph takes parameters and flat tensors, which the code "
                "around it makes of the model's arguments",
            )
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        names = [str(n.target) for n in inputs]
        if _torch.has_pytree_output(graph):
            given = list(inspect.signature(self._graph.gm.forward).parameters)
            if names != given:
                raise self._graph.ambiguous(
                    "", "it takes containers, of which the graph has the parts alone"
                )
        for i, (node, name) in enumerate(zip(inputs, names, strict=True)):
            if wanted in (i, name) and not name.startswith("*"):
                return node, inputs[-1].next
        raise self._graph.ambiguous("", f"it has no input {wanted!r}")

    def _entry(self, tap: Tap, path: str, call: Call | None) -> tuple[Any, fx.Node]:
        """What a call received, and the node before which it stands."""
        wanted = 0 if tap.point == "output" or tap.output is None else tap.output
        if call is None:
            return self._own_input(wanted)
        if call.node is None:
            raise self._graph.ambiguous(
                path,
                "it was inlined, and the graph does not say which values were its "
                "arguments",
            )
        node = self._new[call.node]
        module = self._graph.gm.get_submodule(str(call.node.target))
        if _torch.has_forward_pre_hooks(module):
            raise self._graph.ambiguous(
                path, "its forward pre-hooks may change what it was called with"
            )
        arguments = _bound_arguments(module, node)
        if isinstance(wanted, int):
            names = list(arguments)
            if not 0 <= wanted < len(names):
                raise self._graph.ambiguous(path, f"it received no input {wanted}")
            wanted = names[wanted]
        if wanted not in arguments:
            raise self._graph.ambiguous(path, f"it received no input {wanted!r}")
        return arguments[wanted], node

    def finish(self, keep_output: bool) -> fx.GraphModule:
        """Make the taps outputs."""
        graph = self._made.graph
        output = graph.output_node()
        if _torch.has_pytree_output(graph):
            own = list(self._own) if keep_output else []  # type: ignore[arg-type]
            output.args = ([*own, *self._taps.values()],)
            _torch.extend_pytree_output(graph, list(self._taps), keep_output)
        else:
            output.args = ((self._own, self._taps) if keep_output else self._taps,)
        if not keep_output:
            passes.prune_unneeded(self._made)
        graph.lint()
        self._made.recompile()
        return self._made


def _bound_arguments(module: nn.Module, node: fx.Node) -> dict[str, Any]:
    """Parameter names of ``forward`` to what a ``call_module`` node passes."""
    bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@final
class CapturedGraph:
    """A graph module that returns its output and the records.

    Attributes:
        graph_module: The instrumented graph; it returns ``(output, {name: value})``, or
            the dictionary alone under ``keep_output=False``.
        spec: What it captures.
        sites: The calls that feed the records.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        spec: CaptureSpec,
        sites: SiteTable,
        names: Mapping[str, Sequence[str | None]],
        paths: Mapping[str, tuple[str, ...]],
        keep_output: bool,
    ) -> None:
        self.graph_module = graph_module
        self.spec = spec
        self.sites = sites
        self._names = names
        self._paths = paths
        self._keep_output = keep_output

    def read(self, values: Mapping[str, Any]) -> Records:
        """Records from the dictionary that the graph returned."""
        return Records(
            {
                record: tuple(None if n is None else values[n] for n in names)
                for record, names in self._names.items()
            },
            self._paths,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Captured:
        """Run the graph; records are copies, with gradients unless detached.

        Raises:
            ElementError: an output lacks the requested element.
        """
        raw = self.graph_module(*args, **kwargs)
        output, values = raw if self._keep_output else (None, raw)
        return Captured(output, self.read(values))

    def __repr__(self) -> str:
        return f"CapturedGraph({self.spec!r})"
