"""The call that a command line names: a model, and inputs for it.

Inputs come from the factory, from options, or are made up by what the model says of
itself.

Invariants
    Whatever a user can get wrong here is a :class:`UsageError` that says what was
    expected, or one of the package's own errors.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from fxcapture.cli.models import make_model
from fxcapture.cli.values import UsageError, assignment

__all__ = ["Loaded", "dynamic_sizes", "example_call", "load_model"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model and a call of it.

    Attributes:
        model: In evaluation mode, unless training mode was asked for.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_model(
    name: str,
    *,
    config: Path | None = None,
    settings: Sequence[str] = (),
    inputs: Sequence[str] = (),
    keywords: Sequence[str] = (),
    batch: int = 1,
    length: int = 16,
    train: bool = False,
    meta: bool = False,
) -> Loaded:
    """The model that ``name`` stands for, and example inputs.

    Args:
        name: ``package.module:factory``, ``file.py:factory``, or the name of a class
            of transformers.
        config: JSON file for a transformers class's configuration.
        settings: ``key=value``: fields of the configuration, or the factory's keywords.
        inputs: ``name=dtype[sizes]``, or ``dtype[sizes]`` for a positional one.
        keywords: ``name=value``: further keyword arguments of the call.
        batch: Batch size of inputs that are made up.
        length: Number of tokens of inputs that are made up.
        train: Put the model into training mode.
        meta: Make a transformers model without allocating weights.

    Raises:
        UsageError: the model or its inputs cannot be made.
    """
    made = make_model(name, config, settings, meta=meta)
    model, args, kwargs = _split(made, name)
    model.train(train)
    if inputs:
        args, kwargs = (), {}
        for text in inputs:
            key, value = _parse_input(text, model)
            if key is None:
                args = (*args, value)
            else:
                kwargs[key] = value
    elif made is model:
        kwargs = _made_up_inputs(model, batch, length)
    kwargs = kwargs | dict(assignment(text, "--arg") for text in keywords)
    _check_call(model, args, kwargs)
    return Loaded(model, args, kwargs)


def _split(made: Any, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    remedy = "return the model, (model, args), (model, kwargs) or (model, args, kwargs)"
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} made a value of type {type(model).__name__}", remedy)
    if len(rest) > 2 or (len(rest) == 2 and not isinstance(rest[1], Mapping)):
        raise UsageError(f"{name} made a tuple of {len(rest) + 1} values", remedy)
    kwargs = dict(rest.pop()) if rest and isinstance(rest[-1], Mapping) else {}
    args = rest.pop() if rest else ()
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return model, args, kwargs


# --------------------------------------------------------------------------------------
# Inputs
# --------------------------------------------------------------------------------------

_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<sizes>[\d, ]*)\]")


def _parse_input(text: str, model: nn.Module) -> tuple[str | None, torch.Tensor]:
    found = _INPUT.fullmatch(text.strip())
    dtype = getattr(torch, found["dtype"], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input {text!r} is no input",
            "write name=dtype[sizes], such as input_ids=int64[2,16], or float32[2,8] "
            "for a positional one",
        )
    sizes = [int(s) for s in found["sizes"].split(",") if s.strip()]
    return found["name"], _fill(sizes, dtype, model)


def _fill(sizes: Sequence[int], dtype: torch.dtype, model: nn.Module) -> torch.Tensor:
    """Random floats, ids below the vocabulary's size, or ``True``."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if dtype is torch.bool:
        return torch.ones(*sizes, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*sizes, dtype=dtype, device=device)
    high = getattr(getattr(model, "config", None), "vocab_size", None)
    return torch.randint(high or 2, tuple(sizes), dtype=dtype, device=device)


def _made_up_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """Inputs of a transformers model, by what it says of itself."""
    main = getattr(model, "main_input_name", None)
    parameters = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {}
    config = getattr(model, "config", None)
    if main == "input_ids":
        kwargs[main] = _fill((batch, length), torch.int64, model)
    elif main == "pixel_values" and config is not None:
        size = getattr(config, "image_size", 224)
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch, getattr(config, "num_channels", 3), *sizes)
        kwargs[main] = _fill(shape, torch.float32, model)
    elif needed := _needed(parameters.values()):
        raise UsageError(
            f"{type(model).__name__}.forward needs inputs: {', '.join(needed)}",
            f"pass --input {needed[0]}=float32[2,8], with its dtype and sizes"
            f"{', and so on' * (len(needed) > 1)}, or let the factory return "
            "(model, args)",
        )
    if getattr(config, "use_cache", False):
        kwargs["use_cache"] = False
    return kwargs


def _needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _check_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Find out before the run whether the model can be called so."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(
            p.name if p.default is p.empty else f"{p.name} (optional)"
            for p in signature.parameters.values()
        )
        raise UsageError(
            f"{type(model).__name__}.forward cannot be called so: {error}",
            f"it takes {takes}; pass tensors with --input name=dtype[sizes] and other "
            "values with --arg name=value",
        ) from error


def dynamic_sizes(texts: Sequence[str], loaded: Loaded) -> Any:
    """``name=dimension,...`` as ``dynamic_shapes`` of ``torch.export``.

    Raises:
        UsageError: the call has no such input, or it has no such dimension.
    """
    if not texts:
        return None
    named = _named_inputs(loaded)
    collection: Any = torch.export.ShapesCollection  # untyped in torch
    shapes = collection()
    for text in texts:
        name, _, dims = text.partition("=")
        value = named.get(name.strip())
        if value is None or not re.fullmatch(r"\d+(,\d+)*", dims.strip()):
            raise UsageError(
                f"--dynamic {text!r} names no sizes of an input",
                f"write name=dimension,..., where name is one of: {', '.join(named)}"
                if named
                else "only inputs that are tensors under a name of their own can vary",
            )
        wanted = [int(d) for d in dims.split(",")]
        if max(wanted) >= value.dim():
            raise UsageError(
                f"--dynamic {text!r}: {name} has {value.dim()} dimensions",
                f"they are counted from 0 to {value.dim() - 1}",
            )
        for dim in wanted:
            if value.shape[dim] < 2:
                raise UsageError(
                    f"--dynamic {text!r}: size {value.shape[dim]} of the example input "
                    "cannot stand for all sizes",
                    "torch.export treats 0 and 1 as special: give an example of size "
                    "2 or more, with --input or --batch",
                )
        shapes[value] = dict.fromkeys(wanted, torch.export.Dim.DYNAMIC)
    return shapes.dynamic_shapes(loaded.model, loaded.args, loaded.kwargs)


def _named_inputs(loaded: Loaded) -> dict[str, torch.Tensor]:
    """The tensors of the call that are arguments themselves, by name."""
    signature = inspect.signature(loaded.model.forward)
    given = dict(signature.bind(*loaded.args, **loaded.kwargs).arguments)
    given |= loaded.kwargs
    return {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}


def example_call(loaded: Loaded) -> str:
    """The arguments of the call in words, as in ``input_ids=int64[2,16]``."""
    parts = [_in_words(value) for value in loaded.args]
    parts += [f"{name}={_in_words(value)}" for name, value in loaded.kwargs.items()]
    return ", ".join(parts)


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = ",".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
