"""Decide whether a captured value has to be copied, and say why.

An analysis; it changes nothing.  It works on the storages of the fake tensors that the
tracer left in the metadata: two nodes share memory where their fake tensors do.

Terms
    memory: the storages that a node's value lives in, as class representatives.  Fake
        tensors do not tell all: a dropout in eval mode returns its argument, its fake
        one does not.  So every operator that is not known to allocate its result joins
        the memory of its arguments and results into one class.
    write: a node that may change the memory of some of its arguments, see
        :mod:`fxcapture.passes.analyses.effects`.

Invariants
    A value is left uncopied only where all of this is known: nothing in the graph
    writes to its memory behind the mark; it is not (part of) an input, parameter,
    buffer, constant or another output, to which the caller of the graph may write; and
    it fills its memory, so that keeping it keeps nothing else alive.  Anything unknown
    is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import fx

from fxcapture import _torch
from fxcapture.passes.analyses.effects import allocates, node_name, written_args
from fxcapture.passes.base import bodies, is_mark

__all__ = ["Aliases"]

_Memory = frozenset[int]


@final
class Aliases:
    """What shares memory with what in one graph, and who writes to it.

    Args:
        gm: The outermost graph; it must not change while the analysis is used, except
            for nodes whose values are copies.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._parent: dict[int, int] = {}
        self._memory: dict[fx.Node, _Memory | None] = {}
        self._creator: dict[int, fx.Node] = {}
        self._order: dict[fx.Node, int] = {}
        self._taken: dict[int, str] = {}
        self._owner = gm
        for i, node in enumerate(gm.graph.nodes):
            self._order[node] = i
            self._add(node)
        self._outside = {
            m: node.name
            for node in gm.graph.nodes
            if node.op in ("placeholder", "get_attr")
            for m in self._of(node) or ()
        }
        self._results = {
            m for n in gm.graph.output_node().all_input_nodes for m in self._of(n) or ()
        }
        self._writes = list(self._find_writes())

    def reason_to_copy(self, value: fx.Node, mark: fx.Node, user: str) -> str:
        """Why ``value`` has to be copied at ``mark``; empty where it need not be.

        A value that need not be copied is taken: the next one in the same memory is.

        Args:
            value: A node of the outermost graph, before ``mark``.
            mark: Where the value is to be as it is now.
            user: Who takes it, in words.
        """
        if value.graph is not self._owner.graph:
            return "inside the body of a higher-order operator"
        memory = self._of(value)
        if not memory:
            return "its memory is unknown"
        for m in memory:
            if m in self._outside:
                return f"shares memory with the input {self._outside[m]}"
            if m in self._results:
                return "shares memory with an output of the graph"
            if m in self._taken:
                return f"shares memory with {self._taken[m]}"
        writer = self.may_be_written(value, mark)
        if writer is not None:
            return f"may be written by {writer.name} ({node_name(writer)}) later"
        if not self._fills(value):
            return "a view of a larger tensor, which would be kept alive"
        self._taken.update(dict.fromkeys(memory, user))
        return ""

    def may_be_written(self, value: fx.Node, after: fx.Node) -> fx.Node | None:
        """The first node behind ``after`` that may write to the memory of a value."""
        memory = self._of(value)
        for node, written in self._writes:
            if self._order[node] > self._order[after] and (
                memory is None or written is None or written & memory
            ):
                return node
        return None

    # -- memory ------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        if is_mark(node) or node.op == "output":
            self._memory[node] = frozenset()
            return
        found = _storages(_example(node))
        self._memory[node] = found
        for m in found or ():
            self._creator.setdefault(m, node)
        if self._may_return_operand(node):
            operands = [self._memory.get(n) for n in node.all_input_nodes]
            self._join([found, *operands])

    def _of(self, node: fx.Node) -> _Memory | None:
        raw = self._memory.get(node)
        return None if raw is None else frozenset(map(self._root, raw))

    def _root(self, m: int) -> int:
        while m in self._parent:
            m = self._parent[m]
        return m

    def _join(self, groups: Iterable[_Memory | None]) -> None:
        roots = {self._root(m) for group in groups for m in group or ()}
        first = min(roots, default=0)
        for m in roots - {first}:
            self._parent[m] = first

    def _may_return_operand(self, node: fx.Node) -> bool:
        """Whether a result may be memory of an argument's."""
        if not _torch.is_higher_order(node):
            called = node.op in ("call_function", "call_method", "call_module")
            return called and not allocates(node)
        found = [body for _, body in bodies(self._owner, node)]
        if not found:
            return True
        for body in found:
            inputs: set[int] = set()
            for inner in body.graph.nodes:
                if inner.op in ("placeholder", "get_attr"):
                    inputs |= _storages(_example(inner)) or set()
            for result in body.graph.output_node().all_input_nodes:
                memory = _storages(_example(result))
                if memory is None or memory & inputs:
                    return True
        return False

    def _fills(self, value: fx.Node) -> bool:
        """Whether a tensor is as large as the memory it lives in."""
        example = _example(value)
        raw = self._memory[value]
        if not isinstance(example, torch.Tensor) or not raw or len(raw) > 1:
            return False
        first = self._creator[next(iter(raw))]
        if first is value:
            return _torch.is_dense(example)
        whole = _example(first)
        if not isinstance(whole, torch.Tensor) or whole.dtype != example.dtype:
            return False
        return _torch.is_dense(example) and _torch.surely_equal(
            whole.numel(), example.numel()
        )

    # -- writes ------------------------------------------------------------------------

    def _find_writes(self) -> Iterator[tuple[fx.Node, _Memory | None]]:
        """Nodes that write, and the memory they write to; ``None`` for any memory."""
        for node in self._owner.graph.nodes:
            written = written_args(self._owner, node)
            if not written:
                continue
            memories = [self._of(n) for n in written]
            if any(m is None for m in memories):
                yield node, None
            else:
                yield node, frozenset().union(*memories)  # type: ignore[arg-type]


def _example(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _storages(example: Any) -> _Memory | None:
    """Identities of the storages of every tensor in a value; ``None`` if unknown."""
    if example is None:
        return None
    if isinstance(example, torch.Tensor):
        found = _torch.storage_id(example)
        return None if found is None else frozenset({found})
    if isinstance(example, (tuple, list)):
        parts = [_storages(e) for e in example]
        if any(p is None for p in parts):
            return None
        return frozenset().union(*parts)  # type: ignore[arg-type]
    if isinstance(example, dict):
        return _storages(list(example.values()))
    if isinstance(example, (int, float, bool, str, torch.SymInt, torch.SymFloat,
                            torch.SymBool, torch.dtype, torch.device)):  # fmt: skip
        return frozenset()
    return None
