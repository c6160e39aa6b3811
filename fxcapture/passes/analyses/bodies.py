"""What the higher-order operators of a marked graph mean for its capture.

Analyses: they change nothing.
"""

from __future__ import annotations

from torch import fx

from fxcapture import _torch
from fxcapture.passes.base import is_mark, operator_name, walk

__all__ = ["forgets_overrides", "reuses_bodies"]

# Operators whose bodies Dynamo traces without going back to what it knew before.
_TRACED_THROUGH = frozenset(
    {
        "autograd_function_apply",
        "dynamo_bypassing_wrapper",
        "flex_attention",
        "hints_wrapper",
        "inductor_compiled_code",
        "invoke_subgraph",
        "tag_activation_checkpoint",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)


def forgets_overrides(gm: fx.GraphModule) -> bool:
    """Whether Dynamo may have lost the undoing of a scope traced with the graph.

    It goes back to what it knew before when it has traced the body of a conditional, a
    loop, a scan or a map; an override that was to be deleted afterwards would stay.  An
    operator that is not known to be harmless counts as harmful.
    """
    return any(
        _torch.is_higher_order(node) and operator_name(node) not in _TRACED_THROUGH
        for _, node, _ in walk(gm)
    )


def reuses_bodies(gm: fx.GraphModule) -> bool:
    """Whether some mark stands in a body that Dynamo may have traced for another call.

    Dynamo runs the body of a nested compile region again for a call that looks alike;
    a path that was traced into it would then be that of another module.
    """
    return any(
        is_mark(node) and "invoke_subgraph" in region for _, node, region in walk(gm)
    )
