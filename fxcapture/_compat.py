"""Every private name of torch that the package uses, each with why and where tested.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

__all__ = [
    "BackendCompilerFailed",
    "DynamoError",
    "copy_node_source",
    "RecompileLimitHit",
    "TensorifyRestart",
    "Unsupported",
    "UserError",
    "fake_mode_of",
    "has_forward_hooks",
    "is_compiled_in_place",
    "is_higher_order",
    "late_compilation",
    "resolve_backend",
    "unwrap_optimized",
]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs between ``forward`` and the module's caller.

    There is no public way to ask whether a module has hooks.
    """
    return bool(
        module._forward_hooks or torch.nn.modules.module._global_forward_hooks
    )


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called on it."""
    return module._compiled_call_impl is not None


def unwrap_optimized(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wrapped; others as they are.

    ``OptimizedModule`` documents no public attribute for what it wraps.
    """
    while "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls a higher-order operator (one that takes sub-graphs)."""
    return node.op == "call_function" and isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def copy_node_source(old: fx.Node, new: fx.Node) -> None:
    """Carry over where Dynamo says that a placeholder comes from.

    AOTAutograd reads the attribute and insists on it; copying a graph leaves it behind.
    """
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]


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


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode that a Dynamo graph's placeholders were traced under."""
    values = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
    return torch._guards.detect_fake_mode([v for v in values if v is not None])


@contextlib.contextmanager
def late_compilation(fake_mode: Any) -> Iterator[None]:
    """A context in which a kept Dynamo graph can be compiled outside of Dynamo."""
    context = torch._guards.TracingContext(fake_mode)
    with torch._guards.tracing(context):
        yield


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing fxcapture must not import Dynamo.
    names = {
        "BackendCompilerFailed": "BackendCompilerFailed",
        "DynamoError": "TorchDynamoException",
        "RecompileLimitHit": "FailOnRecompileLimitHit",
        "Unsupported": "Unsupported",
        "UserError": "UserError",
        "TensorifyRestart": "TensorifyScalarRestartAnalysis",
    }
    if name in names:
        from torch._dynamo import exc

        return getattr(exc, names[name])
    raise AttributeError(name)
