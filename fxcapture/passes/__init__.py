"""Graph passes, one per file, and the order in which they run.

=====================  ===============================================================
``collect_marks``      read the sites of a marked graph (an analysis)
``mark_functions``     mark the function calls that are tapped
``insert_taps``        copy each wanted value at its mark
``compute_weights``    compute attention weights beside fused calls (part of the former)
``flag_branches``      tell which branch of a conditional ran
``forgets_overrides``  whether Dynamo has lost the undoing of overrides (an analysis)
``reuses_bodies``      whether one body serves several calls (an analysis)
``leave_transforms``   unwrap taps that stand inside vmap, grad or jvp
``lift_taps``          bring taps out of higher-order operators' bodies
``extend_outputs``     make taps outputs of the graph
``erase_marks``        remove marks and what was computed for them alone
``drop_inputs``        drop inputs that nothing uses: tokens, parameters of lost layers
``locate_tokens``      which input names each mark's module (an analysis)
``share_mask_conversion``  make a mask's additive form once for all layers (Inductor)
``prune_unneeded``     end the graph where its outputs end (records only)
``copy_asynchronously``  let copies to the host run beside what follows (CUDA)
``verify_graph``       check what must hold afterwards
=====================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxcapture.passes.analyses.bodies import (
    forgets_overrides,
    reuses_bodies,
)
from fxcapture.passes.analyses.collect_marks import (
    MarkedSites,
    collect_marks,
    mark_sites,
)
from fxcapture.passes.analyses.tokens import locate_tokens
from fxcapture.passes.base import copy_graph_module, walk
from fxcapture.passes.compute_weights import WeightsWanted
from fxcapture.passes.copy_asynchronously import WAITS, copy_asynchronously
from fxcapture.passes.drop_inputs import KEPT_INPUTS, drop_inputs, tensor_inputs
from fxcapture.passes.erase_marks import erase_marks
from fxcapture.passes.extend_outputs import OUTPUTS, extend_outputs
from fxcapture.passes.flag_branches import flag_branches
from fxcapture.passes.insert_taps import insert_taps
from fxcapture.passes.leave_transforms import leave_transforms
from fxcapture.passes.lift_taps import lift_taps
from fxcapture.passes.mark_functions import mark_functions
from fxcapture.passes.prune_unneeded import prune_unneeded
from fxcapture.passes.share_mask_conversion import share_mask_conversion
from fxcapture.passes.verify_graph import verify_graph
from fxcapture.plan.plan import Leaf

__all__ = [
    "KEPT_INPUTS",
    "OUTPUTS",
    "WAITS",
    "MarkedSites",
    "WeightsWanted",
    "collect_marks",
    "copy_asynchronously",
    "copy_graph_module",
    "drop_inputs",
    "erase_marks",
    "extend_outputs",
    "flag_branches",
    "forgets_overrides",
    "insert_taps",
    "leave_transforms",
    "lift_taps",
    "locate_tokens",
    "mark_functions",
    "mark_sites",
    "prune_unneeded",
    "reuses_bodies",
    "rewrite",
    "share_mask_conversion",
    "tensor_inputs",
    "verify_graph",
    "walk",
    "without_marks",
]


def rewrite(
    gm: fx.GraphModule,
    marked: MarkedSites,
    wanted: Mapping[int, Mapping[Leaf, None]],
    wanted_sizes: Mapping[int, Mapping[tuple[str, int], None]],
    *,
    attention: Mapping[str, WeightsWanted] | None = None,
    prune: bool = False,
    share_masks: bool = False,
    asynchronous: bool = False,
) -> fx.GraphModule:
    """A copy of a marked graph whose extra outputs are the wanted values.

    ``meta[OUTPUTS]`` of the result names the outputs behind the model's own.

    Args:
        gm: The marked graph; not changed.
        marked: Its sites.
        wanted: Site index to the tensor leaves to bring out.
        wanted_sizes: Site index to the integer leaves to bring out.
        attention: Record name to the attention weights it wants.
        prune: End the graph at the last operation that an output needs.
        share_masks: Convert boolean attention masks once for all layers.
        asynchronous: Whoever runs the graph waits for the devices in ``meta[WAITS]``.

    Raises:
        UnreachableValueError: a wanted value cannot leave a body.
        GraphError: a pass broke the graph (our bug).
    """
    made = copy_graph_module(gm)
    insert_taps(made, marked, wanted, wanted_sizes, attention)
    flag_branches(made, marked)
    leave_transforms(made)
    lift_taps(made, marked.sites)
    extend_outputs(made)
    erase_marks(made)
    if prune:
        prune_unneeded(made)
    if share_masks:
        share_mask_conversion(made)
    if asynchronous:
        copy_asynchronously(made)
    for owner in {id(o): o for o, _, _ in walk(made)}.values():
        owner.recompile()
    verify_graph(made)
    return made


def without_marks(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a marked graph as it would be without capture."""
    return rewrite(gm, collect_marks(gm, classes={}), {}, {})
