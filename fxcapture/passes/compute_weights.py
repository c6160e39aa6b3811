"""Compute attention weights beside the fused calls of a graph.

A fused kernel returns no weights.  Its arguments stand at its node; the pass adds one
node that computes the wanted part of the weights from them, right behind the call.  In
a graph of ATen operators it adds the operations themselves, since such a graph has to
run without this package.

Not idempotent: each run adds nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fxcapture.passes.analyses.collect_marks import GraphCall, graph_inputs
from fxcapture.passes.analyses.fused_calls import FusedNode, read_call
from fxcapture.passes.compute import compute, example_of, input_out_of_reach, is_aten
from fxcapture.plan.match import reducers_of
from fxcapture.plan.plan import Leaf
from fxcapture.reductions import Reduction
from fxcapture.spec.attention import Attention
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.attention import FlexCall, attention_weights
from fxcapture.trace.mark import weights

__all__ = ["WeightsWanted", "compute_weights", "weights_wanted"]


class WeightsWanted(NamedTuple):
    """The weights that a record wants.

    Attributes:
        part: Which heads and queries.
        reduce: What to make of them: a function of the weights and, where ``source`` is
            given, of that input; ``None`` for nothing.
        source: Name of an input of the run.
    """

    part: Attention
    reduce: Callable[..., torch.Tensor] | None = None
    source: str | None = None


def weights_wanted(spec: CaptureSpec) -> dict[str, WeightsWanted]:
    """The attention weights that the records of a spec want, by record."""
    wanted = {}
    reducers = reducers_of(spec)
    for name, tap in spec.items():
        if tap.attention is not None:
            reduce: Any = reducers.get(name)
            source = reduce.source if isinstance(reduce, Reduction) else None
            if source is not None:
                reduce = reduce.apply
            wanted[name] = WeightsWanted(tap.attention, reduce, source)
    return wanted


def compute_weights(
    gm: fx.GraphModule,
    calls: Sequence[GraphCall],
    wanted: Mapping[int, Iterable[Leaf]],
    attention: Mapping[str, WeightsWanted],
) -> dict[tuple[int, str], FusedNode]:
    """Add a node for each wanted leaf that no mark of the graph holds.

    Args:
        gm: A marked graph; edited.
        calls: Its calls.
        wanted: For each call, by its position, the leaves to bring out.
        attention: Record name to what it wants.

    Returns:
        For (position of the call, kind), the node that holds the weights.
    """
    kinds = {weights(name): asked for name, asked in attention.items()}
    inputs: dict[str, fx.Node | None] | None = None
    made: dict[tuple[int, str], FusedNode] = {}
    for position, call in enumerate(calls):
        for leaf in wanted.get(position, ()):
            asked = kinds.get(leaf.kind)
            place = position, leaf.kind
            if asked is None or leaf.kind in call.nodes or place in made:
                continue
            assert call.span is not None
            if inputs is None and asked.source is not None:
                inputs = graph_inputs(gm)
            source = (inputs or {}).get(asked.source or "")
            [fused] = call.span
            made[place] = _compute(fused, asked, source, leaf.kind)
    return made


def _compute(
    fused: FusedNode, asked: WeightsWanted, source: fx.Node | None, kind: str
) -> FusedNode:
    if source is not None and source.graph is not fused.node.graph:
        raise input_out_of_reach(kind, str(asked.source), "fused call")
    call = read_call(fused)
    nodes: list[fx.Node] = []
    values: Any = tuple(call)
    fx.map_arg(values, nodes.append)
    saving = (
        not is_aten(fused.node)
        and not isinstance(call, FlexCall)
        and all(
            t.device.type == "cpu" and not t.requires_grad
            for t in map(example_of, nodes)
            if isinstance(t, torch.Tensor)
        )
    )
    kind_of_call: Any = type(call)

    def attention_weights_of(found: Any) -> torch.Tensor:
        given, given_source = found
        made = attention_weights(kind_of_call(*given), asked.part, saving)
        if asked.reduce is None:
            return made
        if asked.source is None:
            return asked.reduce(made)
        return asked.reduce(made, given_source)

    node = compute(
        attention_weights_of,
        (values, source),
        before=fused.node.next,
        like=fused.node,
        kind=kind,
        what="the attention weights",
    )
    return FusedNode(fused.owner, node)
