"""Mark the function calls inside of modules, where they stand in a graph.

What stands between the two marks of a module's call is what ran while it ran.  Of that,
the module's own are the nodes that stand where the first mark does in the tree of
modules; the others are of the modules inside of it.  A node keeps the name of what the
code calls, so no watching is needed while the model is traced.

From there on a function's call is a call like a module's: the marks are the same.

Terms
    span: a call of a module whose function calls are tapped, while the pass goes
        through its nodes.

Invariants
    What the compiler made of its own is no call: it is tested for where it has the name
    of one.
    Not idempotent: each run adds marks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx

from fxcapture.errors import AmbiguousSiteError
from fxcapture.passes.analyses.collect_marks import graph_inputs, mark_of
from fxcapture.passes.analyses.direct_calls import stands_in
from fxcapture.passes.analyses.function_calls import (
    FunctionCall,
    dynamo_calls,
    example_of,
)
from fxcapture.passes.base import MADE, PassResult, bodies, is_mark
from fxcapture.passes.compute import compute, input_out_of_reach
from fxcapture.reductions import Reducers, Reduction
from fxcapture.spec.function import numbered, site_path
from fxcapture.trace.functions import argument_of
from fxcapture.trace.listen import named
from fxcapture.trace.mark import (
    BEGIN,
    CALLS,
    ENTRY,
    NAMED,
    RESULT,
    emit_mark,
    received,
    reduced,
)
from fxcapture.trace.structure_text import encode
from fxcapture.trace.target import FunctionTarget
from fxcapture.trace.templates import reduced_element

__all__ = ["mark_functions"]

#: The calls in a graph, by their last node.
CallsIn = Callable[[fx.GraphModule], Mapping[fx.Node, FunctionCall]]
#: By a module's path: see ``forwards_inside``.
CodeOf = Callable[[str], Any]
#: By a module's path, as marks bear it: the functions to mark inside of it.
Functions = Callable[[str], Sequence[FunctionTarget]]


@final
@dataclasses.dataclass(slots=True)
class _Span:
    """A call of a module, while the pass goes through its nodes."""

    path: str
    token: Any
    stack: list[Any]
    targets: dict[str, FunctionTarget]
    names: list[str] = dataclasses.field(default_factory=list)
    code: Any = None

    def holds_directly(self, node: fx.Node) -> bool:
        """Whether a node of its place is not one of a direct call inside of it."""
        return self.code is None or not stands_in(node, self.code)


def mark_functions(
    gm: fx.GraphModule,
    functions: Functions,
    reducers: Reducers,
    calls_in: CallsIn = dynamo_calls,
    stack_of: Callable[[fx.Node], Sequence[Any]] | None = None,
    code_of: CodeOf | None = None,
) -> PassResult:
    """Add the marks of every function call that is tapped.

    Args:
        gm: A marked graph, with the beginnings of the modules' calls; edited.
        functions: The functions to mark, by their module's path.
        reducers: Record name to its reduction.
        calls_in: Finds the calls in the kind of graph that it is.
        stack_of: Where a node stands in the tree of modules.
        code_of: By a module's path, the code of ``forward`` inside of it, which tells
            direct calls.

    Raises:
        AmbiguousSiteError: the graph does not determine what a tapped call returned or
            received.
    """
    inputs = graph_inputs(gm)
    marker = _Marker(functions, reducers, inputs, calls_in, stack_of or _stack, code_of)
    return PassResult(gm, marker.go_through(gm))


@final
class _Marker:
    def __init__(
        self,
        functions: Functions,
        reducers: Reducers,
        inputs: Mapping[str, fx.Node | None],
        calls_in: CallsIn,
        stack_of: Callable[[fx.Node], Sequence[Any]],
        code_of: CodeOf | None,
    ) -> None:
        self._functions = functions
        self._reducers = reducers
        self._inputs = inputs
        self._calls_in = calls_in
        self._stack_of = stack_of
        self._code_of = code_of
        self._spans: list[_Span] = []

    def go_through(self, gm: fx.GraphModule) -> bool:
        modified = False
        calls = self._calls_in(gm)
        for node in list(gm.graph.nodes):
            for _, body in bodies(gm, node):
                modified |= self.go_through(body)
            if is_mark(node):
                modified |= self._at_mark(node)
            elif node in calls and self._is_own(node):
                modified |= self._mark(calls[node])
            elif node in calls and self._spans:
                self._note_inner(node, calls[node].name)
        return modified

    def _note_inner(self, node: fx.Node, name: str) -> None:
        """Note a call of a module inside of the span's, which is that one's own."""
        span = self._spans[-1]
        stack = node.meta.get("nn_module_stack")
        if name in span.targets and stack:
            path = next(reversed(stack.values()))[0]
            inner = site_path(str(path).rpartition(".")[2], name)
            if inner not in span.names:
                span.names.append(inner)

    def _is_own(self, node: fx.Node) -> bool:
        spans = self._spans
        if not spans or list(self._stack_of(node)) != spans[-1].stack:
            return False
        return spans[-1].holds_directly(node)

    def _at_mark(self, node: fx.Node) -> bool:
        mark = mark_of(node)
        if mark.kind == BEGIN:
            targets = {t.name: t for t in self._functions(mark.path)}
            if targets:
                stack = list(self._stack_of(node))
                span = _Span(mark.path, mark.token, stack, targets)
                if self._code_of is not None:
                    span.code = self._code_of(mark.path)
                self._spans.append(span)
            return False
        if not self._spans:
            return False
        span = self._spans[-1]
        if mark.kind == NAMED:
            if self._is_own(node):
                value = mark.tensors[0]
                self._mark(
                    FunctionCall(mark.path, node, node, value, named, (value,), {})
                )
            return True
        if mark.path != span.path:
            return False
        self._spans.pop()
        names = " ".join(span.names)
        _add_mark(node, span.token, [], [], encode(names, [], []), span.path, CALLS)
        return True

    def _mark(self, call: FunctionCall) -> bool:
        """Mark one call, if it is tapped."""
        span = self._spans[-1]
        index = span.names.count(call.name)
        span.names.append(call.name)
        target = span.targets.get(call.name)
        if target is None or not target.wants(index):
            return False
        path = numbered(site_path(span.path, call.name), index)
        if call.value is None or (target.entries and call.called is None):
            raise _undetermined(span.path, call)
        taken = tuple(
            call.value
            if call.called is named
            else argument_of(call.called, e, call.args, dict(call.kwargs))
            for e in target.entries
        )
        if taken:
            tensors, sizes, structure = _taken_apart(taken)
            _add_mark(call.first, span.token, tensors, sizes, structure, path, ENTRY)
        node, behind = call.first, call.last.next
        whole = _with_elements(call.value, example_of(call.value), behind)
        for record, output, entry, result, each in target.requests:
            for wanted, part, kind in (
                (entry >= 0, taken[entry] if entry >= 0 else None, received(record)),
                (result, whole, reduced(record)),
            ):
                if wanted:
                    made = self._reduced(
                        record,
                        part,
                        output if result else None,
                        each,
                        node,
                        behind,
                        kind,
                    )
                    _add_mark(behind, span.token, [made], [], "T", path, kind)
        tensors, sizes, structure = _taken_apart(whole)
        _add_mark(behind, span.token, tensors, sizes, structure, path, RESULT)
        return True

    def _reduced(
        self,
        record: str,
        value: Any,
        output: int | str | None,
        each: bool,
        node: fx.Node,
        before: fx.Node,
        kind: str,
    ) -> fx.Node:
        reduce: Any = self._reducers[record]
        source = reduce.source if isinstance(reduce, Reduction) else None
        given = self._inputs.get(source or "")
        if given is not None and given.graph is not node.graph:
            raise input_out_of_reach(kind, str(source), "call")

        def reduced_value(values: Any) -> Any:
            function = reduce
            if source is not None:
                function = functools.partial(reduce.apply, source=values[1])
            return reduced_element(function, values[0], output, each)

        return compute(
            reduced_value,
            (value, given),
            before=before,
            like=node,
            kind=kind,
            what="the value",
        )


def _undetermined(path: str, call: FunctionCall) -> AmbiguousSiteError:
    what = "returned" if call.value is None else "received"
    return AmbiguousSiteError(
        f"the graph does not determine what the call of '{call.name}' in "
        f"{path or 'the model'!r} {what}",
        why="the compiler took it apart into several operations",
        remedy="use fxcapture.compile or fxcapture.export, which see the call itself",
    )


def _stack(node: fx.Node) -> list[Any]:
    """Where a node stands in the tree of modules."""
    return list(node.meta.get("nn_module_stack") or ())


def _with_elements(value: fx.Node, example: Any, before: fx.Node) -> Any:
    """A value with a node for each of its tensors, in its own containers."""
    if not isinstance(example, (list, tuple)):
        return value
    parts = []
    for i, part in enumerate(example):
        with before.graph.inserting_before(before):
            made = before.graph.call_function(operator.getitem, (value, i))
        made.meta = {**value.meta, "example_value": part, MADE: True}
        if "val" in value.meta:
            made.meta["val"] = part
        parts.append(_with_elements(made, part, before))
    cls = type(example)
    return cls(parts) if cls in (list, tuple) else _like(example, parts)


def _like(example: Any, parts: list[Any]) -> Any:
    cls: Any = type(example)
    return cls._make(parts) if hasattr(cls, "_make") else cls(parts)


def _taken_apart(value: Any) -> tuple[list[fx.Node], list[Any], str]:
    """The tensors and sizes of a value with nodes in it, and its structure."""
    leaves = list(_leaves(value))
    structure = encode(_examples(value), [], [])
    tensors = [n for n in leaves if isinstance(n, fx.Node) and _is_tensor(n)]
    sizes = [
        n
        for n in leaves
        if (isinstance(n, fx.Node) and not _is_tensor(n)) or type(n) is int
    ]
    return tensors, sizes, structure


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example_of(node), torch.Tensor)


def _examples(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return example_of(value)
    if isinstance(value, dict):
        return {k: _examples(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_examples(v) for v in value]
        if isinstance(value, list):
            return parts
        return tuple(parts) if type(value) is tuple else _like(value, parts)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _add_mark(
    before: fx.Node,
    token: Any,
    tensors: Sequence[fx.Node],
    sizes: Sequence[Any],
    structure: str,
    path: str,
    kind: str,
) -> None:
    graph = before.graph
    with graph.inserting_before(before):
        fields = (token, list(tensors), list(sizes), structure, path, kind)
        node = graph.call_function(emit_mark, fields)
    for key in ("nn_module_stack", "stack_trace"):
        if key in before.meta:
            node.meta[key] = before.meta[key]
