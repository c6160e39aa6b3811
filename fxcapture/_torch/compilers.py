"""Calling a Dynamo backend as torch.compile itself would.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch

__all__ = [
    "Compiled", "late_compilation", "resolve_backend", "reuses_outputs",
    "without_disable",
]  # fmt: skip


@final
class Compiled:
    """A function that ``torch.compile`` compiles, as soon as it does.

    While any thread of the process exports, ``torch.compile`` gives back what it got,
    which would then never be compiled.

    Args:
        function: The function; called as it is until torch compiles.
        settings: Keywords of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        self._function = function
        self._settings = settings
        self._compiled = function
        self.is_compiled()

    def is_compiled(self) -> bool:
        """Whether it is; torch is asked again if not."""
        if self._compiled is self._function and not torch.compiler.is_exporting():
            self._compiled = torch.compile(self._function, **self._settings)
        return self._compiled is not self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        self.is_compiled()
        return self._compiled(*args, **kwargs)


def resolve_backend(
    backend: str | Callable[..., Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """What ``torch.compile`` itself would call with a graph for these keywords.

    ``torch.compile`` binds ``mode`` and ``options`` to the backend in two private
    wrappers; a backend that calls another one has to do the same.
    """
    if backend == "inductor":
        if mode is None and options is None:
            mode = "default"
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)  # type: ignore[no-any-return, no-untyped-call]
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)  # type: ignore[no-any-return, no-untyped-call]


def reuses_outputs(backend: Any, inner: Any) -> Callable[[torch.Tensor], bool] | None:
    """Which outputs of a compiled graph its next run may write over; ``None``: none.

    CUDA graphs replay into the same memory.  A backend of one's own says that it does
    so with an attribute ``reuses_outputs``.
    """
    if getattr(backend, "reuses_outputs", False):
        return lambda tensor: True
    graphs = backend == "cudagraphs"
    if isinstance(inner, torch._TorchCompileInductorWrapper):
        from torch._inductor import config

        graphs = inner.config.get("triton.cudagraphs", config.triton.cudagraphs)
    return (lambda tensor: tensor.is_cuda) if graphs else None


def without_disable(call: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compiler.disable`` wrapped; others as they are.

    Backends wrap what they return, and Dynamo again, which first takes that away; so
    do we who stand between the two.
    """
    while getattr(call, "_torchdynamo_disable", False):
        call = call._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def late_compilation(fake_mode: Any) -> Iterator[None]:
    """A context in which a kept Dynamo graph can be compiled outside of Dynamo.

    Compilers trace with fx, which torch tells by a flag of the process.  Without the
    flag that says it is part of a compilation, compiled calls of other threads would be
    refused as being traced themselves.
    """
    context = torch._guards.TracingContext(fake_mode)
    with torch.compiler._compile_session_context(), torch._guards.tracing(context):
        yield
