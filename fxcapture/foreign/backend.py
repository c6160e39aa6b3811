"""Captures for code that calls ``torch.compile`` itself: a Dynamo backend.

The graph that a backend gets has no marks, so this finds calls as
:func:`fxcapture.instrument` does, and refuses what the graph does not determine.
``fxcapture.compile`` traces the model with marks and has no such limits.

Terms
    recording: a time in which the records of compiled calls are kept.

Invariants
    The active recording is a context variable: each thread and each task has its own.
    Outside of a recording the compiled code runs and its records are dropped.  That is
    said once for each backend, when a graph does so again and none was recorded: once
    may be a warm-up.
    A record does not change when the compiled code runs again, whatever memory that
    writes its outputs to.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch, passes
from fxcapture.errors import CaptureError, SpecTypeError
from fxcapture.foreign.dialect import prepare
from fxcapture.foreign.dynamo import Dynamo
from fxcapture.plan.records import Records
from fxcapture.runtime.compiled_graph import kept_outputs, places_of
from fxcapture.runtime.whole_run import RecordReader
from fxcapture.spec.capture_spec import CaptureSpec

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


@final
class _Uses:
    """Whether anybody looks at what the graphs of a backend record."""

    def __init__(self) -> None:
        self.recorded = False
        self._dropped_by: set[Any] = set()

    def drop(self, graph: Any) -> None:
        """A graph ran outside of a recording."""
        if graph not in self._dropped_by:
            self._dropped_by.add(graph)
            return
        self.recorded = True  # said once
        warnings.warn(
            "a model compiled with fxcapture.backend runs outside of a recording and "
            "its records are dropped\n"
            "  what to do: open one around whatever calls the model, `with "
            "fxcapture.recording() as run: model.generate(...)`, and read run.calls",
            stacklevel=3,
        )


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Keep the records of compiled calls.

    Example::

        with recording() as records:
            output = compiled(x)
        records["hidden"]

    Recordings nest; a call is kept by the innermost one.  One that ends without a call
    warns, and says what may have called the model uncompiled.
    """
    made = Recording()
    token = _active.set(made)
    try:
        yield made
    finally:
        _active.reset(token)
    if not made.calls:
        warnings.warn(
            "a recording is over, and no graph compiled with fxcapture.backend ran in "
            "it: a method of torch.compile(model), such as generate, calls the model "
            "uncompiled\n"
            "  what to do: compile in place, `model.compile(backend=...)`, or use "
            "`fxcapture.compile(model, spec).recording()`; in another thread, open the "
            "recording there",
            stacklevel=3,
        )


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
        inner: The backend that compiles the instrumented graph.  One that writes the
            outputs of each call into the same memory has an attribute
            ``reuses_outputs = True``.
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
    uses = _Uses()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> _Compiled:
        compiler = _torch.resolve_backend(inner, mode, options, None)
        dialect = Dynamo(gm, checked, assume_tensors=assume_tensors)
        reused = _torch.reuses_outputs(inner, compiler)
        return _compile(dialect, example_inputs, compiler, reused, uses)

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
    dialect: Dynamo,
    example_inputs: Sequence[Any],
    compiler: Callable[..., Any],
    reused: Callable[[torch.Tensor], bool] | None,
    uses: _Uses,
) -> _Compiled:
    marked, plan = prepare(dialect)
    made = passes.rewrite(dialect.gm, marked, plan.wanted(), plan.wanted_sizes())
    places = places_of(made)
    read = RecordReader(plan, marked.sites, places)
    compiled = compiler(made, list(example_inputs))

    def run(*args: Any) -> Sequence[Any]:
        values: Sequence[Any] = compiled(*args)
        own = len(values) - len(places)
        active = _active.get()
        if active is not None:
            uses.recorded = True
            active.calls.append(read(kept_outputs(values[own:], reused)))
        elif not uses.recorded:
            uses.drop(run)
        return values[:own]

    return run
