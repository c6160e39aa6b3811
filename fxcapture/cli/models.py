"""The model that a command line names.

Terms
    factory: what stands behind ``MODEL``: a function or class that makes the model,
        with inputs if it wants.

Invariants
    Whatever a user can get wrong here is a :class:`UsageError` that says what was
    expected, or one of the package's own errors.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxcapture.cli.values import UsageError, assignment, read_file
from fxcapture.errors import install_extra, nearest

__all__ = ["make_model"]


def make_model(
    name: str, config: Path | None, settings: Sequence[str], *, meta: bool
) -> Any:
    """What the factory called ``name`` makes.

    Args:
        name: ``package.module:factory``, ``file.py:factory``, or the name of a class
            of transformers.
        config: JSON file for a transformers class's configuration.
        settings: ``key=value``: fields of the configuration, or the factory's keywords.
        meta: Make a transformers model without allocating weights.

    Raises:
        UsageError: it cannot be made.
    """
    factory = _find_factory(name)
    values = dict(assignment(text, "--set") for text in settings)
    if _is_transformers(factory):
        return _from_config(factory, name, config, values, meta=meta)
    if config is not None:
        raise UsageError(
            f"--config is for classes of transformers, and {name} is none",
            "pass what the factory needs with --set key=value",
        )
    return _call_factory(factory, name, values)


# --------------------------------------------------------------------------------------
# Finding the factory
# --------------------------------------------------------------------------------------


def _find_factory(name: str) -> Callable[..., Any]:
    place, colon, attribute = name.partition(":")
    if not colon:
        if not name.isidentifier() or _is_module(name):
            raise _no_colon(name)
        return _transformers_class(name)
    if not place or not attribute:
        raise UsageError(f"{name!r} names no factory", "write package.module:factory")
    module = _import(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {part!r}", _what_it_has(found, part))
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UsageError(
            f"{name} is of type {type(found).__name__}",
            "name a function or a class that makes the model",
        )
    return found  # type: ignore[no-any-return]


def _what_it_has(found: Any, wanted: str) -> str:
    """Advice where ``found`` has no such name: the nearest ones, or what it defines."""
    public = [n for n in dir(found) if not n.startswith("_")]
    if near := nearest(wanted, public):
        return f"did you mean: {', '.join(near)}?"
    own = [n for n in public if callable(getattr(found, n))][:10]
    return f"name one of: {', '.join(own)}" if own else "define a factory there"


def _is_module(name: str) -> bool:
    """Whether one can import it, found without importing it."""
    _look_here_too()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _no_colon(name: str) -> UsageError:
    """What is wrong with a name that is neither a factory nor of transformers."""
    place, _, last = name.rpartition(".")
    if name.endswith(".py") or _is_module(name):
        remedy = f"write {name}:factory, with the function or class that makes it"
    elif place and _is_module(place):
        remedy = f"write {place}:{last}"
    else:
        remedy = "write package.module:factory or file.py:factory"
    return UsageError(f"{name!r} names no factory", remedy)


def _look_here_too() -> None:
    """Find modules where the user stands, as ``python -m`` would."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _import(place: str) -> Any:
    _look_here_too()
    try:
        if place.endswith(".py"):
            return _import_file(Path(place))
        return importlib.import_module(place)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _not_importable(place, error) from error
        file = Path(f"{place}.py")
        near = ", ".join(nearest(place, _modules_here()))
        raise UsageError(
            f"there is no module {place!r}",
            f"write {file}:factory"
            if file.is_file()
            else f"did you mean: {near}?"
            if near
            else "name an importable module, one below the working directory, "
            "or a file.py",
        ) from error
    except Exception as error:
        raise _not_importable(place, error) from error


def _not_importable(place: str, error: Exception) -> UsageError:
    remedy = "see where with --debug"
    if isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name}, or put its directory on PYTHONPATH"
    return UsageError(
        f"{place} cannot be imported: {type(error).__name__}: {error}", remedy
    )


def _modules_here() -> list[str]:
    found = [p.stem for p in Path.cwd().glob("*.py")]
    return found + [p.parent.name for p in Path.cwd().glob("*/__init__.py")]


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(
            f"there is no file {path}", "name one as seen from the working directory"
        )
    # Its neighbours can be imported, as where Python runs it.
    sys.path.insert(0, str(path.parent.absolute()))
    module = importlib.util.module_from_spec(spec)
    # Pickling and Dynamo look a class's module up by name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _transformers_class(name: str) -> Callable[..., Any]:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{name!r} has no colon, so it should be a class of transformers, which is "
            "not installed",
            f"write package.module:factory, or {install_extra('transformers')}",
        ) from error
    found = getattr(transformers, name, None)
    if found is None:
        names = [n for n in dir(transformers) if re.search(r"(Model|For\w+)$", n)]
        near = ", ".join(nearest(name, names))
        raise UsageError(
            f"transformers has no class {name!r}",
            (f"did you mean: {near}? " if near else "")
            + "A factory of your own is package.module:factory",
        )
    return found  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------
# Calling it
# --------------------------------------------------------------------------------------


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
        if config.is_dir():  # a checkpoint as transformers saves it
            config = config / "config.json"
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
    if "use_cache" in known:
        # One call needs no cache, and a program without it is called with less.
        stored["use_cache"] = False
    built = cls.config_class(**(stored | values))
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = cls(built)
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    if isinstance(dtype, str) and hasattr(torch, dtype):
        model = model.to(getattr(torch, dtype))
    return model  # type: ignore[no-any-return]


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
