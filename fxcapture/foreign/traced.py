"""The dialect of graphs whose values nothing is known of: symbolically traced ones.

A module that the tracer did not look into is one node, so that what it received and
returned is exact; of what structure that is shows when the graph runs.  So each value
is one :func:`take`, which then picks what the tap wants and treats it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture import _torch
from fxcapture.errors import AmbiguousSiteError
from fxcapture.foreign.dialect import Dialect
from fxcapture.foreign.reader import Call
from fxcapture.foreign.results import returned
from fxcapture.passes.analyses.function_calls import FunctionCall
from fxcapture.plan.match import entry_name, reducers_of, request_of
from fxcapture.plan.plan import Leaf
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.tap import Tap
from fxcapture.trace.mark import RESULT
from fxcapture.trace.structure_text import encode, parse
from fxcapture.trace.templates import reduced_element

__all__ = ["Traced", "take"]

#: Stands in a spec for :func:`take` of each tensor of a container.
_EACH = "last"


def _whole(value: Any) -> Any:
    """Stands in a spec for :func:`take` of a container as a whole."""
    return value


def take(value: Any, how: _Treatment, what: str, output: int | str | None) -> Any:
    """A copy of a value, as a tap wants it; runs inside the graph."""
    return how(value, what, output)


# It has to stand in the graph as one call, also if the graph is traced again.
fx.wrap("take")


@final
class _Treatment(nn.Module):
    """What one tap does to a value; a module, since a graph can name nothing else."""

    def __init__(self, tap: Tap, reduce: Callable[..., Any] | None) -> None:
        super().__init__()
        self.reduce = reduce
        self.each = _takes_each(tap)
        self.leaf = Leaf(
            kind=RESULT,
            index=0,
            detach=tap.detach,
            dtype=tap.dtype,
            device=tap.device,
        )

    def forward(self, value: Any, what: str, output: int | str | None) -> Any:
        tensors: list[torch.Tensor] = []
        sizes: list[int] = []
        structure = parse(encode(value, tensors, sizes)).element(output, what)
        value = structure.build(tensors.__getitem__, sizes.__getitem__)
        if self.reduce is not None:
            value = reduced_element(self.reduce, value, None, self.each)
        made: list[torch.Tensor] = []
        structure = parse(encode(value, made, sizes := []))
        return structure.build(lambda i: self.leaf.snapshot(made[i]), sizes.__getitem__)


def _takes_each(tap: Tap) -> bool:
    """Whether a tap gives its reduction the tensors of a container one by one."""
    return tap.reduce is None or request_of("", tap, (entry_name(tap) or 0,)).each


@final
class Traced(Dialect):
    """A graph whose values are known only when it runs."""

    tells_values = False

    def __init__(
        self, gm: fx.GraphModule, spec: CaptureSpec, *, assume_tensors: bool
    ) -> None:
        for tap in spec.values():
            if tap.function is not None:
                raise AmbiguousSiteError(
                    f"the graph does not determine the calls of {tap.written}",
                    why="which values of a symbolically traced graph are tensors shows "
                    "when it runs",
                    remedy="use fxcapture.compile, or instrument an exported program",
                )
        # All that a tap does to a value is a reduction here: what ``take`` makes of it.
        # Attention weights are refused: nothing has watched the graph.
        kept = ("output", "select", "point", "initial", "optional", "attention")
        taken = {
            name: Tap(
                tap.target,
                reduce=_EACH if _takes_each(tap) else _whole,
                **{k: getattr(tap, k) for k in kept},
            )
            for name, tap in spec.items()
        }
        super().__init__(gm, CaptureSpec(taken), assume_tensors=assume_tensors)
        reducers = reducers_of(spec)
        self._treatments = {
            name: self._hold(_Treatment(tap, reducers.get(name)))
            for name, tap in spec.items()
        }

    def _hold(self, treatment: _Treatment) -> fx.Node:
        """Put a treatment into the graph; the node that gives it."""
        number = 0
        while hasattr(self.gm, name := f"_fxcapture_tap_{number}"):
            number += 1
        self.gm.add_submodule(name, treatment)
        first = next(n for n in self.gm.graph.nodes if n.op != "placeholder")
        with self.gm.graph.inserting_before(first):
            return self.gm.graph.get_attr(name)

    def result(self, path: str, call: Call | None) -> Any:
        """The call's node, or the one value that an inlined module left."""
        if call is not None:
            if call.node is not None:
                return call.node
            return returned(self.graph, call, assume_tensor=self.assume_tensors)
        own: Any = self.gm.graph.output_node().args[0]
        if _torch.has_pytree_output(self.gm.graph):
            return _torch.own_pytree_output(self.gm.graph, list(own))
        return _plain(own)

    def function_calls(self, gm: fx.GraphModule) -> dict[fx.Node, FunctionCall]:
        """None: whether a node is a tensor shows when the graph runs."""
        return {}

    def argument(self, path: str, call: Call | None, which: int | str) -> Any:
        """What the call's node passes."""
        if call is None:
            return self._own_input(which)
        if call.node is None:
            raise self.graph.ambiguous(
                path,
                "it was inlined, and the graph does not say which values were its "
                "arguments",
            )
        module = self.gm.get_submodule(str(call.node.target))
        if _torch.has_forward_pre_hooks(module):
            raise self.graph.ambiguous(
                path, "its forward pre-hooks may change what it was called with"
            )
        arguments = _bound_arguments(module, call.node)
        if isinstance(which, int) and 0 <= which < len(arguments):
            return _plain(list(arguments.values())[which])
        if which not in arguments:
            raise self.graph.ambiguous(path, f"it received no input {which!r}")
        return _plain(arguments[str(which)])

    def _own_input(self, which: int | str) -> fx.Node:
        """What the graph's model received."""
        inputs: list[fx.Node] = list(self.gm.graph.find_nodes(op="placeholder"))
        names = [str(n.target) for n in inputs]
        if _torch.has_pytree_output(self.gm.graph) and names != list(
            inspect.signature(self.gm.forward).parameters
        ):
            raise self.graph.ambiguous(
                "", "it takes containers, of which the graph has the parts alone"
            )
        for i, (node, name) in enumerate(zip(inputs, names, strict=True)):
            if which in (i, name) and not name.startswith("*"):
                return node
        raise self.graph.ambiguous("", f"it has no input {which!r}")

    def copy(self, node: fx.Node) -> fx.Node:
        """The node itself: ``take`` copies."""
        return node

    def reduce(
        self, record: str, value: Any, what: str, output: int | str | None
    ) -> Any:
        """Add what ``take`` makes of a value."""
        how = self._treatments[record]
        return self.gm.graph.call_function(take, (value, how, what, output))


def _bound_arguments(module: nn.Module, node: fx.Node) -> dict[str, Any]:
    """Parameter names of ``forward`` to what a ``call_module`` node passes."""
    bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _plain(value: Any) -> Any:
    """A value without torch.fx's own classes of containers."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if type(value) is tuple:
        return tuple(_plain(part) for part in value)
    return value
