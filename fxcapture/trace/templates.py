"""Structures as nested tuples of constants, which Dynamo can hold and take apart.

A :class:`~fxcapture.trace.structure.Structure` is an object of ours, which a trace
cannot hold as a constant; a template says the same in tuples, strings and classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxcapture import _torch
from fxcapture.errors import ElementError
from fxcapture.trace.structure import Structure, build_container
from fxcapture.trace.structure_text import encode, parse

__all__ = ["copied", "element_template", "fill", "reduced_element", "template"]

Template = tuple[Any, ...]


def template(structure: Structure) -> Template:
    """A structure as nested tuples of constants."""
    if structure.kind in ("tensor", "int"):
        return structure.kind, structure.index
    if structure.kind == "const":
        return "const", structure.value
    parts = tuple(map(template, structure.children))
    if structure.cls in (tuple, list):
        return "tuple" if structure.cls is tuple else "list", parts
    if structure.cls is dict:
        return "dict", structure.keys, parts
    return structure.kind + " class", structure.cls, structure.keys, parts


def fill(
    form: Template,
    tensor: Callable[[int], torch.Tensor],
    size: Callable[[int], int],
) -> Any:
    """A value of a template's shape; can be traced.

    Args:
        form: The template.
        tensor: Leaf index to tensor.
        size: Leaf index to int.
    """
    kind = form[0]
    if kind == "tensor":
        return tensor(form[1])
    if kind == "int":
        return size(form[1])
    if kind == "const":
        return form[1]
    parts = [fill(part, tensor, size) for part in form[-1]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "dict":
        return dict(zip(form[1], parts, strict=True))
    return build_container(kind.removesuffix(" class"), form[1], form[2], parts)


def copied(value: Any) -> Any:
    """A value whose tensors are copies; an object that is no container stays itself."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    form = element_template(encode(value, tensors, sizes), None)
    if form is None:
        return value
    copies = [t.clone() for t in tensors]
    return fill(form, lambda i: copies[i], lambda i: sizes[i])


def reduced_element(
    reduce: Callable[..., Any], value: Any, output: int | str | None, each: bool
) -> Any:
    """What a reduction makes of an element of a value; ``None`` where there is none.

    Args:
        reduce: The reduction.
        value: What a module returned or received.
        output: The element, as in a tap.
        each: Give it the tensors of a container one by one, and not the container.
    """
    if isinstance(value, torch.Tensor):
        # Taken whole whatever ``output`` says; the plan raises where that is wrong.
        return reduce(value)
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    form = element_template(encode(value, tensors, sizes), output)
    if form is None:
        return None
    if not each:
        return reduce(fill(form, lambda i: tensors[i], lambda i: sizes[i]))
    return fill(form, lambda i: reduce(tensors[i]), lambda i: sizes[i])


@_torch.constant
def element_template(text: str, output: int | str | None) -> Any:
    """The template of an element; ``None`` where it does not exist or is opaque.

    The plan raises the error for a missing element, with the record's name in it.
    """
    try:
        element = parse(text).element(output, "the output")
    except ElementError:
        return None
    return None if element.opaque() is not None else template(element)
