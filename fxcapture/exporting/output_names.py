"""Stable names for the outputs that a capture adds to an exported program.

Invariants
    A name is ``{record}_{position}``, followed by the element's name where a position
    is a container.  It is the node's name too, since ONNX and other consumers call
    outputs by these.
    Each name is an output of its own: a value that two records hold is given out twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import fx
from torch.export.graph_signature import (
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)

from fxcapture import _torch
from fxcapture.exporting.manifest import OutputInfo, RecordLayout, SlotLayout
from fxcapture.passes.analyses.collect_marks import MarkedSites
from fxcapture.passes.base import TapKey
from fxcapture.plan.plan import Plan, Slot
from fxcapture.trace.structure import Structure

__all__ = ["OutputNamer"]


@final
class OutputNamer:
    """Gives every slot outputs of its own, named after the record."""

    def __init__(
        self,
        gm: fx.GraphModule,
        keys: Sequence[TapKey],
        plan: Plan,
        marked: MarkedSites,
    ) -> None:
        self._gm = gm
        self._plan = plan
        self._sites = marked.sites
        outputs: Any = gm.graph.output_node().args[0]
        self._node_of = dict(
            zip(keys, outputs[len(outputs) - len(keys) :], strict=True)
        )
        self._used: set[fx.Node] = set()
        self._nodes: list[fx.Node] = []
        self._names: set[str] = set()
        self._detached: list[bool] = []

    def run(
        self, num_own: int
    ) -> tuple[tuple[RecordLayout, ...], tuple[OutputInfo, ...], list[OutputSpec]]:
        """Name the outputs in the order of the records.

        Args:
            num_own: Number of outputs in front of the taps.
        """
        layouts = []
        for record in self._plan.records:
            layouts.append(
                RecordLayout(
                    name=record.name,
                    paths=record.paths,
                    slots=tuple(
                        slot and self._slot(slot, f"{record.name}_{position}")
                        for position, slot in enumerate(record.slots)
                    ),
                )
            )
        output = self._gm.graph.output_node()
        own: Any = output.args[0]
        output.args = ((*own[:num_own], *self._nodes),)
        return (
            tuple(layouts),
            tuple(map(_info, self._nodes, self._detached)),
            list(map(_output_spec, self._nodes)),
        )

    def _slot(self, slot: Slot, base: str) -> SlotLayout:
        site = self._sites[slot.site]
        value = site.value(slot.kind)
        known = () if value is None else value.sizes
        parts = dict(_leaf_names(slot.structure))
        tensors = tuple(
            (i, self._output(TapKey(slot.site, leaf=leaf), base + parts["tensor", i]))
            for i, leaf in slot.leaves
        )
        sizes: list[tuple[int, int | str]] = []
        for i in slot.sizes:
            size = known[i]
            if size is None:
                key = TapKey(slot.site, size=(slot.kind, i))
                sizes.append((i, self._output(key, base + parts["int", i])))
            else:
                sizes.append((i, size))
        return SlotLayout(structure=slot.structure, tensors=tensors, sizes=tuple(sizes))

    def _output(self, key: TapKey, wanted: str) -> str:
        node = self._node_of[key]
        if node in self._used or node.op == "placeholder":
            node = self._again(node)
        self._used.add(node)
        name = wanted = re.sub(r"\W", "_", wanted)
        number = 1
        while name in self._names or not _torch.rename_node(node, name):
            name = f"{wanted}_{number}"
            number += 1
        self._names.add(name)
        self._nodes.append(node)
        self._detached.append(key.leaf is not None and key.leaf.detach)
        return name

    def _again(self, node: fx.Node) -> fx.Node:
        """One more output with the same value, for a second record."""
        graph = self._gm.graph
        with graph.inserting_before(graph.output_node()):
            if isinstance(node.meta.get("val"), torch.Tensor):
                made = graph.call_function(torch.ops.aten.clone.default, (node,))
            else:
                made = graph.call_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        return made


def _leaf_names(
    structure: Structure, path: str = ""
) -> Iterator[tuple[tuple[str, int], str]]:
    """(kind, index) of each leaf with what its name adds to the position's."""
    if structure.kind in ("tensor", "int"):
        yield (structure.kind, structure.index), path
    names = structure.keys or getattr(structure.cls, "_fields", ())
    for i, child in enumerate(structure.children):
        yield from _leaf_names(child, f"{path}_{names[i] if names else i}")


def _info(node: fx.Node, detach: bool) -> OutputInfo:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return OutputInfo(name=node.name, dtype="int", shape=())
    return OutputInfo(
        name=node.name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(s if isinstance(s, int) else str(s) for s in value.shape),
        detach=detach,
    )


def _output_spec(node: fx.Node) -> OutputSpec:
    tensor = isinstance(node.meta.get("val"), torch.Tensor)
    arg = TensorArgument(node.name) if tensor else SymIntArgument(node.name)
    return OutputSpec(kind=OutputKind.USER_OUTPUT, arg=arg, target=None)
