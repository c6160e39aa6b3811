"""The model that a command line names, and inputs for it.

Terms
    factory: what stands behind ``MODEL``: a function or class that makes the model.  It
        may also return the inputs: ``(model, args)``, ``(model, kwargs)`` or ``(model,
        args, kwargs)``.

Invariants
    Whatever a user can get wrong here is a :class:`UsageError` that says what was
    expected, or one of the package's own errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from fxcapture.cli_values import UsageError, assignment, read_file
from fxcapture.errors import nearest

__all__ = ["Loaded", "load_model"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model and a call of it.

    Attributes:
        model: In evaluation mode, unless it came from a factory in training mode.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# --------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------


def load_model(
    name: str,
    *,
    config: Path | None = None,
    settings: Sequence[str] = (),
    inputs: Sequence[str] = (),
    keywords: Sequence[str] = (),
    batch: int = 1,
    length: int = 16,
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
        meta: Make a transformers model without allocating weights.

    Raises:
        UsageError: the model or its inputs cannot be made.
    """
    factory = _find_factory(name)
    values = dict(assignment(text, "--set") for text in settings)
    if _is_transformers(factory):
        made = _from_config(factory, name, config, values, meta=meta)
    else:
        if config is not None:
            raise UsageError(
                f"--config is for classes of transformers, and {name} is none",
                "pass what the factory needs with --set key=value",
            )
        made = _call_factory(factory, name, values)
    model, args, kwargs = _split(made, name)
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
    return Loaded(model, args, kwargs)


def _find_factory(name: str) -> Callable[..., Any]:
    place, colon, attribute = name.partition(":")
    if not colon:
        return _transformers_class(name)
    if not place or not attribute:
        raise UsageError(f"{name!r} names no factory", "write package.module:factory")
    module = _import(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_")]
            near = ", ".join(nearest(part, public))
            raise UsageError(
                f"{place} has no {part!r}", f"did you mean: {near}?" if near else ""
            )
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UsageError(
            f"{name} is a {type(found).__name__}",
            "name a function or a class that makes the model",
        )
    return found  # type: ignore[no-any-return]


def _import(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise UsageError(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        # Pickling and Dynamo look a class's module up by name.
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:
        # Where the user stands, as ``python -m`` would have it.
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and not place.startswith(error.name):
            raise
        raise UsageError(
            f"there is no module {place!r}",
            "name an importable module, one below the working directory, or a file.py",
        ) from error


def _transformers_class(name: str) -> Callable[..., Any]:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{name!r} has no colon, so it should be a class of transformers, which is "
            "not installed",
            "write package.module:factory, or pip install 'fxcapture[transformers]'",
        ) from error
    found = getattr(transformers, name, None)
    if found is None:
        names = [n for n in dir(transformers) if re.search(r"(Model|For\w+)$", n)]
        near = ", ".join(nearest(name, names))
        raise UsageError(
            f"transformers has no class {name!r}",
            f"did you mean: {near}? A factory of your own is package.module:factory",
        )
    return found  # type: ignore[no-any-return]


def _is_transformers(factory: Any) -> bool:
    return inspect.isclass(factory) and (
        hasattr(factory, "config_class") or hasattr(factory, "from_config")
    )


def _from_config(
    cls: Any, name: str, config: Path | None, values: dict[str, Any], *, meta: bool
) -> nn.Module:
    if getattr(cls, "config_class", None) is None:
        raise UsageError(
            f"{name} is for every architecture, so it has no configuration of its own",
            "name the architecture's class, such as LlamaForCausalLM",
        )
    stored: dict[str, Any] = {}
    if config is not None:
        stored = read_file(config)
        if not isinstance(stored, dict):
            raise UsageError(f"{config} holds no configuration")
        kind = stored.get("model_type")
        if kind is not None and kind != cls.config_class.model_type:
            raise UsageError(
                f"{config} is for {kind!r} models, {name} is a "
                f"{cls.config_class.model_type!r} model",
                'name the class that the file\'s "architectures" names',
            )
    known = cls.config_class().to_dict()
    for key in values:
        if key not in known:
            near = ", ".join(nearest(key, known))
            raise UsageError(
                f"--set {key}: {cls.config_class.__name__} has no such field",
                f"did you mean: {near}?" if near else "",
            )
    built = cls.config_class(**(stored | values))
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = cls(built)
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    if isinstance(dtype, str) and hasattr(torch, dtype):
        model = model.to(getattr(torch, dtype))
    return model.eval()  # type: ignore[no-any-return]


def _call_factory(
    factory: Callable[..., Any], name: str, values: dict[str, Any]
) -> Any:
    try:
        inspect.signature(factory).bind(**values)
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be called: {error}",
            "pass its keywords with --set key=value",
        ) from error
    except ValueError:  # no signature to read
        pass
    return factory(**values)


def _split(made: Any, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    parts = made if isinstance(made, tuple) else (made,)
    model, rest = parts[0], list(parts[1:])
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} made a {type(model).__name__}",
            "return the model, (model, args), (model, kwargs) or (model, args, kwargs)",
        )
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
    elif any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY,
             p.POSITIONAL_OR_KEYWORD) for p in parameters.values()):  # fmt: skip
        raise UsageError(
            f"{type(model).__name__}.forward needs inputs: {', '.join(parameters)}",
            "pass --input name=dtype[sizes], or let the factory return (model, args)",
        )
    if "use_cache" in parameters or hasattr(config, "use_cache"):
        kwargs["use_cache"] = False
    return kwargs
