"""What differs between kinds of foreign graphs, and one way to put marks into any.

=========================================  ==========================================
:mod:`~fxcapture.foreign.exported`         exported programs: ATen operators, kept
                                           signatures, the program's own signature
:mod:`~fxcapture.foreign.dynamo`           what Dynamo hands a backend: no arguments, no
                                           model output, one tensor for each call
:mod:`~fxcapture.foreign.traced`           ``symbolic_trace``: exact calls, and no value
                                           is known before the graph runs
=========================================  ==========================================

Terms
    value: what a call took or gave, with nodes in place of tensors.

Invariants
    A mark stands behind the last operation of its call, so that it holds what the
    caller received, as marks do that were traced with the model.
    What no record selects may stay undetermined; what one selects is right, or an
    error.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch, passes
from fxcapture.errors import AmbiguousSiteError, ElementError
from fxcapture.foreign.bind import bind, calls_of
from fxcapture.foreign.reader import Call, ForeignGraph, example
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.analyses.function_calls import FunctionCall
from fxcapture.passes.inline import inline
from fxcapture.plan.match import Match, reducers_of
from fxcapture.plan.plan import Plan
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import Site, SiteTable, Value
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.tap import Tap
from fxcapture.trace.mark import BEGIN, ENTRY, MARK, RESULT, Mark, received, reduced
from fxcapture.trace.structure_text import encode, parse
from fxcapture.trace.target import Request

__all__ = ["Dialect", "prepare"]


class Dialect(abc.ABC):
    """A kind of foreign graph.  Abstract.

    Args:
        gm: The graph; not changed.
        spec: What to capture.
        assume_tensors: The user vouches that inlined targets return one tensor.
        shown: Paths of modules that are known to exist.
        state: Placeholder to the parameter or buffer that it stands for.

    Attributes:
        gm: A copy of the graph; it receives the marks.
        graph: What it shows.
        spec: What to bring out of it.
        assume_tensors: As given.
        tells_values: Whether nodes have examples of their values.
    """

    tells_values: bool = True

    def __init__(
        self,
        gm: fx.GraphModule,
        spec: CaptureSpec,
        *,
        assume_tensors: bool,
        shown: Sequence[str] = (),
        state: Mapping[str, str] | None = None,
    ) -> None:
        self.gm = passes.copy_graph_module(gm)
        modules = gm.named_modules()  # the copy has those alone that the graph calls
        held = [p for p, m in modules if not isinstance(m, fx.GraphModule)]
        self.graph = ForeignGraph(self.gm, shown=[*shown, *held], state=state or {})
        self.spec = spec
        self.assume_tensors = assume_tensors

    @abc.abstractmethod
    def result(self, path: str, call: Call | None) -> Any:
        """What a call returned; without a call, what the graph's model returned.

        Raises:
            AmbiguousSiteError: the graph does not determine it.
        """

    @abc.abstractmethod
    def argument(self, path: str, call: Call | None, which: int | str) -> Any:
        """What a call received by this position or name.

        Raises:
            AmbiguousSiteError: the graph does not determine it.
        """

    @abc.abstractmethod
    def function_calls(self, gm: fx.GraphModule) -> Mapping[fx.Node, FunctionCall]:
        """The function calls in the graph, or in a body of it, by their last node.

        Raises:
            AmbiguousSiteError: the graph does not show them.
        """

    def check(self, bound: Match) -> None:  # noqa: B027  (most refuse nothing)
        """Refuse what the graph as a whole makes ambiguous.

        Raises:
            AmbiguousSiteError: a matched module may have further calls.
        """

    def copy(self, node: fx.Node) -> fx.Node:
        """Add a copy of an argument, which the call may write to."""
        return self.inline(torch.clone, node)  # type: ignore[no-any-return]

    def reduce(
        self, record: str, value: Any, what: str, output: int | str | None
    ) -> Any:
        """Add what a record's reduction makes of a value.

        Args:
            record: The record's name.
            value: What it is given: a node, or a container of nodes.
            what: What that is (part of), in words.
            output: The element that the record wants, where only a run can tell.
        """
        return self.inline(reducers_of(self.spec)[record], value)

    def inline(self, function: Callable[..., Any], *values: Any) -> Any:
        """Add the operations of a function of values."""
        nodes: list[fx.Node] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                nodes.append(leaf)
            return leaf

        _torch.map_nodes(note, values)

        def of_tensors(*tensors: torch.Tensor) -> Any:
            left = iter(tensors)
            return function(
                *_torch.map_nodes(
                    lambda leaf: next(left) if isinstance(leaf, fx.Node) else leaf,
                    values,
                )
            )

        return inline(self.gm.graph, of_tensors, *nodes)


def prepare(dialect: Dialect) -> tuple[MarkedSites, Plan]:
    """Mark a foreign graph; what follows is as for a graph that was traced with marks.

    Returns:
        The sites of ``dialect.gm``, and where the records come from.

    Raises:
        TargetNotFoundError: a target matches no module that the graph shows.
        AmbiguousSiteError: the graph does not determine a call or its result.
        SelectionError: a selected position does not exist.
    """
    # What an earlier capture added are outputs of this graph's own.
    dialect.gm.meta.pop(passes.OUTPUTS, None)
    bound = bind(dialect.spec, dialect.graph)
    dialect.check(bound)
    calls = calls_of(bound, dialect.graph)
    marker = _Marker(dialect, bound, calls)
    for number, (path, call) in enumerate(calls):
        marker.mark(number, path, call)
    if bound.functions:
        passes.mark_functions(
            dialect.gm,
            lambda path: bound.functions.get(path, ()),
            reducers_of(dialect.spec),
            dialect.function_calls,
            dialect.graph.keys,
        )
    marked = passes.collect_marks(dialect.gm, graph=0, classes=bound.classes)
    return marked, resolve(dialect.spec, bound, marked.sites)


@final
class _Undetermined:
    """Stands for a value that the graph does not determine and no record selects."""


def _whole(tap: Tap) -> Tap:
    """The tap of the whole value, of which it takes an element."""
    if tap.point == "input":
        return tap
    fields = {f.name: getattr(tap, f.name) for f in dataclasses.fields(tap)}
    return Tap(**(fields | {"output": None}))


@final
class _Marker:
    """Puts a mark behind each matched call."""

    def __init__(
        self,
        dialect: Dialect,
        bound: Match,
        calls: Sequence[tuple[str, Call | None]],
    ) -> None:
        self._dialect = dialect
        self._bound = bound
        self._behind: dict[fx.Node, fx.Node] = {}
        # Positions follow from the calls alone, so which of these are selected is known
        # before their values are.  Functions' calls are found behind these.
        sites = [
            Site(
                path=path,
                structure="T",
                entry=Value("t(" + ",".join("T" for _ in bound.entries[path]) + ")"),
                derived=tuple(
                    (kind(request.record), Value("T"))
                    for request in bound.requests[path]
                    for kind in (received, reduced)
                ),
                class_name=bound.classes[path],
            )
            for path, _ in calls
        ]
        whole = {
            name: _whole(tap)
            for name, tap in dialect.spec.items()
            if tap.function is None
        }
        self._selected: set[tuple[int, bool]] = set()
        if whole:
            plan = resolve(CaptureSpec(whole), bound, SiteTable(sites))
            self._selected = {(slot.site, slot.entry) for slot in plan.slots()}

    def mark(self, number: int, path: str, call: Call | None) -> None:
        """Mark one call, or the graph itself."""
        dialect, requests = self._dialect, self._bound.requests[path]
        result = self._read(number, False, dialect.result, path, call)
        arguments = [
            self._read(number, True, dialect.argument, path, call, which)
            for which in self._bound.entries[path]
        ]
        values: list[tuple[Any, str]] = []
        start, end = self._ends(call)
        if path in self._bound.functions:
            self._begin(path, call, start)
        with dialect.gm.graph.inserting_before(start):
            what = f"the input of {path or 'the model'!r}"
            copies = _torch.map_nodes(self._copied, tuple(arguments))
            values.append((copies, ENTRY))
            for request in requests:
                if request.entry >= 0:
                    part = self._reduced(request, copies[request.entry], None, what)
                    values.append((part, received(request.record)))
        with dialect.gm.graph.inserting_before(end):
            what = f"the output of {path or 'the model'!r}"
            for request in requests:
                if request.result:
                    part = self._reduced(request, result, request.output, what)
                    values.append((part, reduced(request.record)))
            values.append((result, RESULT))
            for value, kind in values:
                made = self._add_mark(value, path, kind, call)
        if call is not None:
            self._behind[call.last] = made

    def _begin(self, path: str, call: Call | None, start: fx.Node) -> None:
        """Mark where a call begins whose function calls are tapped."""
        dialect = self._dialect
        if call is not None and call.node is not None:
            raise dialect.graph.ambiguous(
                path, "it is one node of the graph, which hides what it calls"
            )
        with dialect.gm.graph.inserting_before(start):
            mark = Mark(None, [], [], "N", path, BEGIN)
            made = dialect.gm.graph.call_function(MARK, tuple(mark))
        stack = {} if call is None else dict(start.meta.get("nn_module_stack", {}))
        inner = list(stack)[list(stack).index(call.key) + 1 :] if call else []
        made.meta["nn_module_stack"] = {
            k: v for k, v in stack.items() if k not in inner
        }

    def _add_mark(self, value: Any, path: str, kind: str, call: Call | None) -> fx.Node:
        """Add one mark, in the modules that the call's last operation stands in."""
        tensors, sizes, text = self._take_apart(value)
        mark = Mark(None, tensors, sizes, text, path, kind)
        made = self._dialect.gm.graph.call_function(MARK, tuple(mark))
        for key in ("nn_module_stack", "stack_trace") if call is not None else ():
            if key in call.last.meta:  # type: ignore[union-attr]
                made.meta[key] = call.last.meta[key]  # type: ignore[union-attr]
        return made

    def _copied(self, leaf: Any) -> Any:
        return self._dialect.copy(leaf) if isinstance(leaf, fx.Node) else leaf

    def _reduced(
        self, request: Request, value: Any, output: int | str | None, what: str
    ) -> Any:
        """What a reduction makes of an element; ``None`` where there is none.

        The plan raises the error for a missing element, with the record's name in it.
        """
        tensors, sizes, text = self._take_apart(value)
        try:
            element = parse(text).element(output, what)
        except ElementError:
            return None
        if element.opaque() is not None:
            return None
        output = output if text == "T" else None

        def reduce(part: Any) -> Any:
            return self._dialect.reduce(request.record, part, what, output)

        if request.each:
            return element.build(lambda i: reduce(tensors[i]), sizes.__getitem__)
        return reduce(element.build(tensors.__getitem__, sizes.__getitem__))

    def _read(
        self, number: int, entry: bool, read: Callable[..., Any], *args: Any
    ) -> Any:
        try:
            return read(*args)
        except AmbiguousSiteError:
            if (number, entry) in self._selected:
                raise
            return _Undetermined()

    def _ends(self, call: Call | None) -> tuple[fx.Node, fx.Node]:
        """The node that a call begins with, and the one behind it and its marks."""
        graph = self._dialect.gm.graph
        if call is None:
            sources = ("placeholder", "get_attr")
            start = next(n for n in graph.nodes if n.op not in sources)
            return start, graph.output_node()
        return call.first, self._behind.get(call.last, call.last).next

    def _take_apart(self, value: Any) -> tuple[list[fx.Node], list[Any], str]:
        """Tensor leaves, integer leaves and structure of a value with nodes in it."""
        nodes: dict[int, fx.Node] = {}
        kept: list[Any] = []

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            made = example(leaf) if self._dialect.tells_values else None
            if made is None or isinstance(made, torch.Tensor):
                # An object for each place, so that a node may stand in several.
                made = torch.empty(0)
            nodes[id(made)] = leaf
            kept.append(made)
            return made

        tensors: list[Any] = []
        sizes: list[Any] = []
        text = encode(_torch.map_nodes(stand_in, value), tensors, sizes)
        return (
            [nodes[id(t)] for t in tensors],
            [nodes.get(id(s), s) for s in sizes],
            text,
        )
