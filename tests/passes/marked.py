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
    """The graph, one node a line, in a form that is short enough to pin."""
    lines = []
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else node.target.__name__
        args = re.sub(r"'t\(.*?\)'|'T'", "...", str(node.args))
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "output":
            lines.append(f"return {args}")
        else:
            lines.append(f"{node.name} = {target}{args}")
    return "\n".join(lines)


def pinned(text: str) -> str:
    """An expected graph without its indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())
