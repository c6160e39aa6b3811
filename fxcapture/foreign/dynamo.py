"""The dialect of Dynamo's graphs, as a backend gets them.

Such a graph is flat: it takes the parameters and the tensors of the arguments, returns
a tuple of tensors, and the code around it makes the model's call of these.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.foreign.dialect import Dialect
from fxcapture.foreign.reader import Call, example
from fxcapture.foreign.results import returned
from fxcapture.passes.analyses.function_calls import FunctionCall, dynamo_calls

__all__ = ["Dynamo", "is_by_dynamo"]

_REMEDY = "use fxcapture.compile"


def is_by_dynamo(gm: fx.GraphModule) -> bool:
    """Whether a graph is one that Dynamo hands to backends."""
    return not _torch.has_pytree_output(gm.graph) and any(
        "example_value" in node.meta for node in gm.graph.nodes
    )


@final
class Dynamo(Dialect):
    """A graph of Dynamo's: each call gives one tensor, arguments are not known."""

    def result(self, path: str, call: Call | None) -> fx.Node:
        """One tensor, or an error."""
        if call is None:
            raise self.graph.ambiguous(
                path,
                "a Dynamo graph returns a flat tuple of tensors, which the code around "
                "it makes the model's output of",
                _REMEDY,
            )
        if call.node is None:
            return returned(self.graph, call, assume_tensor=self.assume_tensors)
        if not isinstance(example(call.node), torch.Tensor):
            raise self.graph.ambiguous(
                path,
                f"whether {self.graph.names.get(path, 'its class')} returns one tensor "
                "or a container cannot be read from the graph",
                _REMEDY,
            )
        return call.node

    def function_calls(self, gm: fx.GraphModule) -> dict[fx.Node, FunctionCall]:
        """Each is a node that has the name that the code calls it by."""
        return dynamo_calls(gm)

    def argument(self, path: str, call: Call | None, which: int | str) -> Any:
        """An error, always."""
        raise self.graph.ambiguous(
            path,
            "a Dynamo graph takes parameters and flat tensors, which the code around "
            "it makes of the model's arguments"
            if call is None
            else "Dynamo inlined it, and the graph does not say which values were its "
            "arguments",
            _REMEDY,
        )
