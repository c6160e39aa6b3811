"""Marked graphs for the tests of the passes, and a short way to print a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from fxcapture import passes
from fxcapture.passes import MarkedSites


class Double(nn.Module):
    def forward(self, h):
        return h * 2


class Overwrite(nn.Module):
    def forward(self, h):
        return h.add_(1)


class Chain(nn.Module):
    """``twice``, then a write to what it returned, then ``twice`` again."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.over = Double(), Overwrite()

    def forward(self, h):
        return self.twice(self.over(self.twice(h)))


class InCheckpoint(nn.Module):
    """Both modules inside the body of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Chain()

    def forward(self, h):
        return checkpoint(self.inside, h, use_reentrant=False) - 1


class Traced(NamedTuple):
    """What the pipeline is given for one call."""

    graph_module: fx.GraphModule
    marked: MarkedSites
    wanted: Mapping[int, Any]
    wanted_sizes: Mapping[int, Any]


def trace(model: nn.Module, spec: Any, *inputs: torch.Tensor) -> Traced:
    """The marked Dynamo graph of a call, before any pass has run on it."""
    found: list[Traced] = []
    rewrite = passes.rewrite

    def spy(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
        found.append(Traced(passes.copy_graph_module(gm), *args))
        return rewrite(gm, *args, **kwargs)

    with mock.patch.object(passes, "rewrite", spy):
        fxc.compile(model, spec, backend="eager", fullgraph=True)(*inputs)
    return found[0]


def readable(gm: fx.GraphModule) -> str:
    """The graph, one node a line, in a form that is short enough to pin.

    Nodes are named after what they call, since Dynamo names them after local variables.
    """
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    lines = []
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else node.target.__name__
        name, number = "x" if node.op == "placeholder" else target, 0
        while f"{name}_{number}" in taken or (not number and name in taken):
            number += 1
        names[node] = f"{name}_{number}" if number else name
        taken.add(names[node])
        args = str(fx.node.map_arg(node.args, lambda n: _Name(names[n])))
        args = re.sub(r"'t\(.*?\)'|'T'", "...", args).replace(",)", ")")
        if node.op == "placeholder":
            lines.append(f"{names[node]} = input")
        elif node.op == "output":
            lines.append(f"return {args}")
        else:
            lines.append(f"{names[node]} = {target}{args}")
    return "\n".join(lines)


class _Name(str):
    """A string that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def pinned(text: str) -> str:
    """An expected graph without its indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())
