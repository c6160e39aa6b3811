"""Captures for code that calls ``torch.compile`` itself: a Dynamo backend.

The graph that a backend gets has no marks, so this finds calls as
:func:`fxcapture.instrument` does, and refuses what the graph does not determine.
``fxcapture.compile`` traces the model with marks and has no such limits.

Terms
    recording: a time in which the records of compiled calls are kept.

Invariants
    The active recording is a context variable: each thread and each task has its own.
    Outside of a recording the compiled code runs and its records are dropped.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch, passes
from fxcapture.errors import CaptureError, SpecTypeError
from fxcapture.foreign.bind import bind, calls_of
from fxcapture.foreign.reader import Call, ForeignGraph
from fxcapture.passes.base import TapKey
from fxcapture.plan.match import Match, reducers_of
from fxcapture.plan.records import Records
from fxcapture.plan.resolve import resolve
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import MARK

Observation = None

__all__ = ["Recording", "backend", "dynamo_backend", "recording"]

_Compiled = Callable[..., Sequence[Any]]
_active: contextvars.ContextVar[Recording | None] = contextvars.ContextVar(
    "fxcapture_recording", default=None
)


@final
class Recording(Mapping[str, tuple[Any, ...]]):
    """The records of the calls in a ``with`` block; reads like the latest call's.

    Attributes:
        calls: The records of each call of a compiled graph, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Records] = []

    def _latest(self) -> Records:
        if not self.calls:
            raise CaptureError(
                "nothing was recorded",
                why="no graph compiled with fxcapture.backend ran in the recording",
                remedy="call the compiled model inside the with block",
            )
        return self.calls[-1]

    def paths(self, name: str) -> tuple[str, ...]:
        """The module path behind each position of the latest call's record."""
        return self._latest().paths(name)

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        return self._latest()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._latest())

    def __len__(self) -> int:
        return len(self._latest())

    def __repr__(self) -> str:
        return f"Recording({len(self.calls)} calls)"


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Keep the records of compiled calls.

    Example::

        with recording() as records:
            output = compiled(x)
        records["hidden"]

    Recordings nest; a call is kept by the innermost one.
    """
    made = Recording()
    token = _active.set(made)
    try:
        yield made
    finally:
        _active.reset(token)


def backend(
    spec: CaptureSpec | Mapping[str, Any],
    inner: str | Callable[..., Any] = "inductor",
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    assume_tensors: bool = False,
) -> Callable[[fx.GraphModule, Sequence[Any]], _Compiled]:
    """A backend for ``torch.compile(model, backend=...)`` that captures.

    Example::

        compiled = torch.compile(model, backend=backend(spec), fullgraph=True)
        with recording() as records:
            output = compiled(x)

    The whole model has to be one graph: a graph that lacks a target is refused.

    Args:
        spec: What to capture; a mapping is made into a :class:`CaptureSpec`.
        inner: The backend that compiles the instrumented graph.
        mode: As in ``torch.compile``, for the inner backend.
        options: As in ``torch.compile``, for the inner backend.
        assume_tensors: Vouch that every target returns one tensor, see
            :func:`fxcapture.instrument`.

    Returns:
        The backend.  Called with a graph, it raises ``AmbiguousSiteError`` or
        ``TargetError``, which Dynamo passes on as the cause of its own error.
    """
    if not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    checked: CaptureSpec = spec

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> _Compiled:
        compiler = _torch.resolve_backend(inner, mode, options, None)
        return _compile(gm, example_inputs, checked, compiler, assume_tensors)

    return compile_graph


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> _Compiled:
    """The backend behind the name ``"fxcapture"``, for code that takes names only.

    Example::

        torch.compile(model, backend="fxcapture", options={"spec": spec})

    Args:
        gm: The graph.
        example_inputs: Its inputs.
        options: ``spec``, and the other arguments of :func:`backend`.
        **kwargs: Further keywords of ``torch.compile`` for a backend.

    Raises:
        SpecTypeError: ``options`` has no ``spec``.
    """
    settings = dict(options or {})
    if "spec" not in settings:
        raise SpecTypeError(
            'torch.compile(backend="fxcapture") was given no spec',
            remedy='pass options={"spec": spec}, or backend=fxcapture.backend(spec)',
        )
    return backend(**settings, **kwargs)(gm, example_inputs)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    spec: CaptureSpec,
    compiler: Callable[..., Any],
    assume_tensors: bool,
) -> _Compiled:
    graph = ForeignGraph(gm, class_name=type(gm).__name__)
    bound = bind(spec, graph)
    marked_gm = _marked(gm, graph, spec, bound, assume_tensors)
    marked = passes.collect_marks(marked_gm, graph=0, classes=bound.classes)
    plan = resolve(spec, bound, marked.sites)
    made = passes.rewrite(marked_gm, marked, plan.wanted(), plan.wanted_sizes())
    places = {key: i for i, key in enumerate(made.meta[passes.OUTPUTS])}
    paths = {record.name: record.paths for record in plan.records}
    # Every site returned one tensor, so that a slot is one tap.
    where = {
        record.name: [
            None if slot is None else places[TapKey(slot.site, leaf=slot.leaves[0][1])]
            for slot in record.slots
        ]
        for record in plan.records
    }
    compiled = compiler(made, list(example_inputs))

    def run(*args: Any) -> Sequence[Any]:
        values: Sequence[Any] = compiled(*args)
        own = len(values) - len(places)
        active = _active.get()
        if active is not None:
            taps = values[own:]
            records = {
                name: tuple([None if i is None else taps[i] for i in found])
                for name, found in where.items()
            }
            active.calls.append(Records(records, paths))
        return values[:own]

    return run


def _marked(
    gm: fx.GraphModule,
    graph: ForeignGraph,
    spec: CaptureSpec,
    bound: Match,
    assume_tensors: bool,
) -> fx.GraphModule:
    """A copy of a Dynamo graph with a mark behind each matched call."""
    made = passes.copy_graph_module(gm)
    new = dict(zip(gm.graph.nodes, made.graph.nodes, strict=True))
    reducers = reducers_of(spec)
    behind: dict[fx.Node, Any] = {}
    for path, call in calls_of(bound, graph):
        result = new[_result(graph, path, call, bound, assume_tensors)]
        assert call is not None
        last: Any = behind.get(call.last, new[call.last])
        with made.graph.inserting_before(last.next):
            reduced = []
            for request in bound.requests[path]:
                value = made.graph.call_function(reducers[request.record], (result,))
                value.meta["example_value"] = _example(reducers[request.record], result)
                reduced.append(value)
            behind[call.last] = made.graph.call_function(
                MARK,
                tuple(
                    Observation(
                        token=None,
                        result=[result],  # type: ignore[list-item]
                        derived=reduced,  # type: ignore[arg-type]
                        sizes=[],
                        entry_sizes=[],
                        structure="T",
                        entries="t()",
                        path=path,
                        hooked=False,
                    )
                ),
            )
    return made


def _example(
    reducer: Callable[[torch.Tensor], torch.Tensor], node: fx.Node
) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return reducer(value) if isinstance(value, torch.Tensor) else None


def _result(
    graph: ForeignGraph,
    path: str,
    call: Call | None,
    bound: Match,
    assume_tensors: bool,
) -> fx.Node:
    if call is None:
        raise graph.ambiguous(
            path,
            "a Dynamo graph returns a flat tuple of tensors, which the code around it "
            "makes the model's output of",
            "use fxcapture.compile",
        )
    if bound.entries[path]:
        raise graph.ambiguous(
            path,
            "Dynamo inlined it, and the graph does not say which values were its "
            "arguments",
            "use fxcapture.compile",
        )
    if call.node is not None and not graph.returns_one_tensor(path):
        raise graph.ambiguous(
            path,
            f"whether {graph.names.get(path, 'its class')} returns one tensor or a "
            "container cannot be read from the graph",
            "use fxcapture.compile",
        )
    return call.node or graph.result(call, assume_tensor=assume_tensors)
