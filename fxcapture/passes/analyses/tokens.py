"""Find which input of the graph each mark's token is.

An analysis.  A mark inside a body has a token that is an input of the body; it is
followed outwards through the operator's operands.
"""

from __future__ import annotations

from torch import fx

from fxcapture.errors import GraphError
from fxcapture.passes.analyses.collect_marks import mark_of
from fxcapture.passes.base import bodies, is_mark

__all__ = ["locate_tokens"]


def locate_tokens(gm: fx.GraphModule) -> tuple[int | None, ...]:
    """For each call, in call order, the position of the input that is its token.

    ``None`` for a call without one.

    Raises:
        GraphError: a token is no input of the graph.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found = _locate(gm, {node: node for node in inputs})
    return tuple(None if node is None else inputs.index(node) for node in found)


def _locate(gm: fx.GraphModule, outer: dict[fx.Node, fx.Node]) -> list[fx.Node | None]:
    """Tokens of a graph's marks as inputs of the outermost graph."""
    found: list[fx.Node | None] = []
    for node in gm.graph.nodes:
        for name, body in bodies(gm, node):
            operands = _operands(node, name)
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            inner = {
                place: outer[operand]
                for place, operand in zip(inputs, operands, strict=False)
                if isinstance(operand, fx.Node) and operand in outer
            }
            found += _locate(body, inner)
        if is_mark(node) and mark_of(node).ends:
            token = mark_of(node).token
            if token is None:
                found.append(None)
            elif token in outer:
                found.append(outer[token])  # type: ignore[index]
            else:
                raise GraphError(f"the token of {node.name!r} is no input of the graph")
    return found


def _operands(node: fx.Node, body: str) -> list[object]:
    """What an operator passes to its body, in the order of the body's inputs."""
    args = list(node.args)
    sequences = [a for a in args if isinstance(a, (tuple, list))]
    if sequences:  # cond, while_loop, scan: the operands stand in a sequence
        return [operand for sequence in sequences for operand in sequence]
    last = max(
        i
        for i, a in enumerate(args)
        if isinstance(a, fx.Node) and a.op == "get_attr" and a.target == body
    )
    rest = args[last + 1 :]
    # invoke_subgraph passes the name of its body between the body and the operands.
    return [a for a in rest if not isinstance(a, str)]
