"""Containers as torch.utils._pytree describes them.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "flatten_arguments",
    "map_nodes",
    "output_paths",
    "output_spec_with",
    "plain_spec",
    "register_pytree",
    "unflatten",
]


def output_spec_with(own: Any, names: Sequence[str]) -> Any:
    """The pytree spec of ``(own, {name: leaf, ...})``, or of the dict if no ``own``.

    torch.export describes outputs with torch.utils._pytree, which is private.
    """
    from torch.utils import _pytree

    extra = _pytree.tree_structure(dict.fromkeys(names, 0))
    return extra if own is None else _pytree.treespec_tuple((own, extra))


def output_paths(spec: Any) -> list[str]:
    """Where each leaf of a program's output stands, such as ``"logits"`` or ``"1_0"``.

    ``spec`` describes ``(own, added)``; the paths of ``own`` leave the first step out.
    """
    from torch.utils import _pytree

    filled = _pytree.tree_unflatten([0] * spec.num_leaves, spec)
    found = _pytree.tree_flatten_with_path(filled)[0]
    return ["_".join(map(_key_text, path[1:])) for path, _ in found]


def _key_text(key: Any) -> str:
    return str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)))


def plain_spec(spec: Any) -> Any:
    """A pytree spec without classes that only the model's code registers.

    A dictionary class becomes ``dict``, any other class (named tuples too) ``tuple``.
    """
    from torch.utils import _pytree

    children = [plain_spec(c) for c in spec.children()]
    if spec.is_leaf():
        return spec
    if spec.type in (tuple, list, dict):
        kind, context = spec.type, spec.context
    elif _is_key_list(spec.context, len(children)):
        kind, context = dict, list(spec.context)
    else:
        kind, context = tuple, None
    return _pytree.TreeSpec(kind, context, children)


def _is_key_list(context: Any, length: int) -> bool:
    return (
        isinstance(context, (list, tuple))
        and len(context) == length
        and all(isinstance(key, str) for key in context)
    )


def unflatten(values: list[Any], spec: Any) -> Any:
    """A container of ``values``; torch.export describes containers by private specs."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(values, spec)


def map_nodes(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its leaves, containers kept."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, value)


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a call, and how to get ``(args, kwargs)`` back with others."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        made = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            made[place] = tensor
        return _pytree.tree_unflatten(made, spec)

    return [leaves[i] for i in places], rebuild


def register_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make a class a pytree, so that transforms can return it.

    ``torch.utils._pytree`` is what torch.func, vmap and make_fx flatten with; torch has
    no public registry.
    """
    from torch.utils import _pytree

    if cls not in _pytree.SUPPORTED_NODES:
        name = f"fxcapture.{cls.__name__}"
        _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)
