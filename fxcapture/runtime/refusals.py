"""Calls of a captured model that are refused, and why."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fxcapture.errors import EagerSiteError, SpecTypeError, TraceError, nearest
from fxcapture.runtime.call import Call

__all__ = ["not_traceable", "refuse_arguments", "refuse_eager"]


def refuse_arguments(
    model: nn.Module, args: Any, kwargs: Any, error: TraceError
) -> None:
    """Raise if Dynamo could not trace because the model does not take the arguments."""
    if model._forward_pre_hooks:
        return  # they may make other arguments of these
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as cause:
        unknown = next((k for k in kwargs if k not in signature.parameters), "")
        raise SpecTypeError(
            f"{type(model).__name__} does not take these arguments",
            why=f"{cause}: forward{signature}",
            nearest=nearest(unknown, signature.parameters) if unknown else (),
            remedy="pass what the model takes; a captured model adds select= and "
            "capture_inputs= alone",
        ) from error


def refuse_eager(call: Call) -> None:
    """Raise if a call took a value from outside every graph."""
    eager = [site for site in call.sites if site.graph is None]
    if eager:
        raise EagerSiteError(
            f"the value of {eager[0].describe()} comes from outside every graph"
            + (f", and {len(eager) - 1} more" if len(eager) > 1 else ""),
            why=call.break_reason or "Dynamo ran the module's caller eagerly",
            remedy='remove the graph break, or pass on_eager="allow"',
        )


def not_traceable(model: nn.Module, reason: str) -> TraceError:
    """Dynamo cannot trace the model as one graph, and has to."""
    return TraceError(
        f"{type(model).__name__} cannot be traced as one graph",
        why=reason.strip().replace("\n", "\n    "),
        remedy="drop fullgraph=True (values stay right, the pieces are compiled one by "
        "one), or remove what breaks the graph",
    )
