"""An oracle that shares no code with the package: eager hooks that copy at once.

It answers, for a model, a spec and a way to drive the model, what the records must be.
Modules are found, elements taken and positions counted by code written a second time
here, on purpose: a fault in the package's own resolver must not hide itself.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import fxcapture as fxc

Hits = dict[str, list[Any]]
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A value with its tensors replaced, its containers made anew."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        parts = [mapped(v, function) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return tuple(parts) if type(value) is tuple else type(value)(parts)
    if isinstance(value, list):
        return [mapped(v, function) for v in value]
    if isinstance(value, dict):
        made = copy.copy(value)
        for key in value:
            made[key] = mapped(value[key], function)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            part = mapped(getattr(value, field.name), function)
            object.__setattr__(made, field.name, part)
        return made
    return value


def snapshot(value: Any) -> Any:
    """A copy of a value that no later write can reach; gradients still flow."""
    return mapped(value, torch.Tensor.clone)


def element(value: Any, name: int | str | None) -> Any:
    """What ``output=name`` means for a value."""
    if name is None or isinstance(value, torch.Size):
        return value
    if isinstance(value, (tuple, list)):
        return value[name] if isinstance(name, int) else getattr(value, name)
    if isinstance(value, Mapping):
        return value[name]
    if dataclasses.is_dataclass(value):
        return getattr(value, str(name))
    return value


def visible_paths(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every path, without and with the names that wrappers put in."""
    parents = {"": None} | dict(model.named_modules(remove_duplicate=False))
    for real, module in model.named_modules(remove_duplicate=False):
        segments, at = [], ""
        for name in real.split(".") if real else []:
            parent = parents[at] if at else model
            at = f"{at}.{name}" if at else name
            parallel = name == "module" and isinstance(parent, nn.DataParallel)
            if name not in _WRAPPERS and not parallel:
                segments.append(name)
        yield ".".join(segments), real, module


def _glob_as_regex(text: str) -> str:
    """A glob as a regular expression for a path that ends in a dot."""
    pieces = []
    for segment in text.split("."):
        inside = re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
        pieces.append(r"(?:[^.]+\.)*" if segment == "**" else rf"(?!\.){inside}\.")
    return "".join(pieces)


def find(model: nn.Module, target: Any, layer_name: str | None) -> list[nn.Module]:
    """The modules that one part of a target means, each once, in module order."""
    found: dict[int, nn.Module] = {}
    taken: set[str] = set()
    for path, real, module in visible_paths(model):
        if isinstance(target, str):
            if target == real:
                return [module]
            # A wrapper and what it wraps have one path; the caller sees the wrapper.
            if path in taken:
                continue
            taken.add(path)
            if target.startswith("re:"):
                fits = re.fullmatch(target[3:], path) is not None
            elif target == path:
                fits = True
            else:
                dotted = f"{path}." if path else ""
                fits = re.fullmatch(_glob_as_regex(target), dotted) is not None
        else:
            fits = isinstance(module, target)
            if layer_name is not None:
                fits = fits and f".{path}".endswith(f".{layer_name}")
        if fits:
            found.setdefault(id(module), module)
    return list(found.values())


def _argument(module: nn.Module, args: Any, kwargs: Any, name: int | str | None) -> Any:
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    if isinstance(name, str):
        return bound.arguments[name]
    return list(bound.arguments.values())[name or 0]


def _treat(value: Any, tap: fxc.Tap) -> Any:
    """Reduction, detach and cast, on each tensor of a value."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tap.reduce == "last":
            tensor = tensor[:, -1]
        elif tap.reduce == "mean":
            tensor = tensor.mean(1)
        elif callable(tap.reduce):
            tensor = tap.reduce(tensor)
        if tap.detach:
            tensor = tensor.detach()
        dtype = tap.dtype if tensor.is_floating_point() else None
        return tensor if dtype is None else tensor.to(dtype)

    return mapped(value, one)


def keep_selected(hits: list[Any], select: Any) -> list[Any]:
    """Full length, ``None`` where not selected."""
    if select is None:
        return hits
    if isinstance(select, int):
        select = [select]
    if not isinstance(select, (tuple, list)):
        select = range(len(hits))[slice(select.start, select.stop, select.step)]
    wanted = {i + len(hits) if i < 0 else i for i in select}
    return [h if i in wanted else None for i, h in enumerate(hits)]


def eager_records(
    model: nn.Module,
    spec: Mapping[str, fxc.Tap],
    run: Callable[[], Any],
    *,
    select: Mapping[str, Any] | None = None,
) -> tuple[Any, Hits]:
    """Run a model eagerly under copying hooks.

    Returns:
        What ``run`` returned, and for each record the full list of its positions.
    """
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in spec}
    handles = []

    def watch(name: str, tap: fxc.Tap, module: nn.Module) -> None:
        entered: list[Any] = []

        def before(m: nn.Module, args: Any, kwargs: Any) -> None:
            wanted = tap.output if tap.point == "input" else 0
            if tap.point == "input" or tap.initial:
                entered.append(snapshot(_argument(m, args, kwargs, wanted)))
            else:
                entered.append(None)

        def after(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            received = entered.pop()
            given = None if tap.point == "input" else snapshot(element(out, tap.output))
            calls[name].append((received, given))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    for name, tap in spec.items():
        matched: dict[int, nn.Module] = {}
        for part in tap.target.parts:
            for module in find(model, part, tap.target.layer_name):
                matched.setdefault(id(module), module)
        for module in matched.values():
            watch(name, tap, module)
    try:
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    records: Hits = {}
    for name, tap in spec.items():
        hits = [_treat(r if tap.point == "input" else g, tap) for r, g in calls[name]]
        if tap.initial and calls[name]:
            hits.insert(0, _treat(calls[name][0][0], tap))
        chosen = (select or {}).get(name, tap.select)
        records[name] = keep_selected(hits, chosen)
    return output, records


def difference(want: Any, got: Any, tolerance: float = 0.0, at: str = "") -> str:
    """Where and how two values differ; empty if they are equal, types included."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_difference(want.detach(), got.detach(), tolerance, at)
    if type(want) is not type(got):
        return f"{at or 'value'}: {type(want).__name__} against {type(got).__name__}"
    if isinstance(want, Mapping):
        if list(want) != list(got):
            return f"{at}: keys {list(want)} against {list(got)}"
        pairs = [(k, want[k], got[k]) for k in want]
    elif isinstance(want, (tuple, list)):
        if len(want) != len(got):
            return f"{at or 'value'}: {len(want)} entries against {len(got)}"
        pairs = [(i, w, g) for i, (w, g) in enumerate(zip(want, got, strict=True))]
    elif dataclasses.is_dataclass(want):
        names = [f.name for f in dataclasses.fields(want)]
        pairs = [(n, getattr(want, n), getattr(got, n)) for n in names]
    else:
        equal = want == got or (want != want and got != got)
        return "" if equal else f"{at or 'value'}: {want!r} against {got!r}"
    found = (difference(w, g, tolerance, f"{at}[{k!r}]") for k, w, g in pairs)
    return next((text for text in found if text), "")


def _tensor_difference(
    want: torch.Tensor, got: torch.Tensor, tolerance: float, at: str
) -> str:
    at = at or "value"
    if want.dtype != got.dtype:
        return f"{at}: {want.dtype} against {got.dtype}"
    if want.is_nested or got.is_nested:
        if not (want.is_nested and got.is_nested):
            return f"{at}: one of the two is a nested tensor"
        return difference(list(want.unbind()), list(got.unbind()), tolerance, at)
    if want.shape != got.shape:
        return f"{at}: {tuple(want.shape)} against {tuple(got.shape)}"
    if want.is_floating_point() and tolerance:
        close = torch.isclose(
            want.double(), got.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    else:
        close = (want == got) | ((want != want) & (got != got))
    if close.all():
        return ""
    worst = (want.double() - got.double()).abs().max().item()
    return f"{at}: differs by up to {worst:.3g} (allowed {tolerance:g})"


def assert_same(want: Any, got: Any, tolerance: float = 0.0) -> None:
    """Fail with the first difference."""
    found = difference(want, got, tolerance)
    assert not found, found


def assert_records(want: Hits, got: fxc.Records, tolerance: float = 0.0) -> None:
    """Fail with the first record entry that is not what the oracle saw."""
    assert_same(want, {name: list(got[name]) for name in got}, tolerance)


def footprint(model: nn.Module) -> dict[str, Any]:
    """All that capture could leave on a model: hooks, attributes, replaced methods."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        own = module.__dict__
        seen[path] = {
            "class": type(module),
            "attributes": sorted(own),
            "methods": {k: own[k] for k in sorted(own) if inspect.isroutine(own[k])},
            "hooks": {
                k: list(v.items()) for k, v in own.items() if k.endswith("_hooks") and v
            },
        }
        for cls in type(module).__mro__:
            seen[f"{cls.__module__}.{cls.__qualname__}"] = {
                k: v
                for k, v in vars(cls).items()
                # Dynamo itself replaces these two of nn.Module, once in a process.
                if inspect.isroutine(v) and k not in ("__init__", "__setstate__")
            }
    return seen
