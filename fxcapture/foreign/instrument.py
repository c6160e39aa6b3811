"""Captures in graphs that were made elsewhere and have no marks.

Terms
    foreign graph: a graph module of ``symbolic_trace`` or Dynamo, or an exported
        program that somebody else made.

Invariants
    Right, or an error: where a graph does not determine a value, nothing is recorded.
    The graph that comes in is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import fx
from torch.export import ExportedProgram

from fxcapture import _torch, passes
from fxcapture.errors import SpecTypeError
from fxcapture.exporting.export import make_manifest
from fxcapture.exporting.program import CapturedProgram
from fxcapture.exporting.rebuild import attach
from fxcapture.foreign.dialect import prepare
from fxcapture.foreign.dynamo import Dynamo, is_by_dynamo
from fxcapture.foreign.exported import Exported
from fxcapture.foreign.traced import Traced, take
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Plan
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.sites import SiteTable
from fxcapture.runtime.whole_run import RecordReader
from fxcapture.spec.capture_spec import CaptureSpec

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
    a class does whose ``forward`` is declared to return ``torch.Tensor``, which most of
    ``torch.nn`` are.

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
    dialect = Exported(program, spec, assume_tensors=assume)
    marked, plan = prepare(dialect)
    made, records, outputs = attach(
        program, marked, plan, keep_output=keep_output, graph_module=dialect.gm
    )
    manifest = make_manifest(spec, keep_output, records, outputs)
    return CapturedProgram(made, manifest, sites=marked.sites, spec=spec)


def _instrument_graph(
    gm: fx.GraphModule, spec: CaptureSpec, keep_output: bool, assume: bool
) -> CapturedGraph:
    kind = Dynamo if is_by_dynamo(gm) else Traced
    dialect = kind(gm, spec, assume_tensors=assume)
    marked, plan = prepare(dialect)
    # What the graph returns may be of any structure: the passes see one output.
    output = dialect.gm.graph.output_node()
    output.args = ((output.args[0],) if keep_output else (),)
    made = passes.rewrite(
        dialect.gm, marked, plan.wanted(), plan.wanted_sizes(), prune=not keep_output
    )
    names = _names(plan)
    _name_outputs(made, [names[key] for key in made.meta[passes.OUTPUTS]], keep_output)
    read = RecordReader(plan, marked.sites, names)
    return CapturedGraph(made, spec, marked.sites, read, keep_output)


def _names(plan: Plan) -> dict[TapKey, str]:
    """A name for each tap, after the first position that it feeds."""
    names: dict[TapKey, str] = {}
    for record in plan.records:
        for position, slot in enumerate(record.slots):
            for i, leaf in slot.leaves if slot is not None else ():
                part = f".{i}" if slot is not None and len(slot.leaves) > 1 else ""
                key = TapKey(slot.site, leaf=leaf)  # type: ignore[union-attr]
                names.setdefault(key, f"{record.name}_{position}{part}")
    return names


def _name_outputs(gm: fx.GraphModule, names: list[str], keep_output: bool) -> None:
    """Make a graph return ``(own, {name: tap})``, or the dictionary alone."""
    graph = gm.graph
    output = graph.output_node()
    flat: Any = output.args[0]
    own, found = flat[: len(flat) - len(names)], list(flat[len(flat) - len(names) :])
    # ``take`` has copied already.
    copies = {
        i: tap
        for i, tap in enumerate(found)
        if tap.op == "call_method" and tap.args[0].target is take
    }
    for i, tap in copies.items():
        found[i] = tap.args[0]
    if _torch.has_pytree_output(graph):
        output.args = ([*(own[0] if keep_output else ()), *found],)
        _torch.extend_pytree_output(graph, names, keep_output)
    else:
        taps = dict(zip(names, found, strict=True))
        output.args = ((own[0], taps) if keep_output else taps,)
    for tap in copies.values():
        graph.erase_node(tap)
    graph.lint()
    gm.recompile()


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
        read: RecordReader,
        keep_output: bool,
    ) -> None:
        self.graph_module = graph_module
        self.spec = spec
        self.sites = sites
        self._read = read
        self._keep_output = keep_output

    def read(self, values: Mapping[str, Any]) -> Records:
        """Records from the dictionary that the graph returned."""
        return self._read(values)

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
