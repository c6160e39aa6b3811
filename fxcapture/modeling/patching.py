"""The registry of replacement classes, and keeping declarations in step with it.

Terms
    mapping: class name, or regular expression over class names, to replacement class.
    patched model: one whose declarations were brought in step by
        ``patch_output_recorders``; per instance, so that others of the class keep
        theirs.

Invariants
    A registration or removal takes effect as a whole or not at all.
    What a key stood for before is there again once the key is unregistered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = [
    "apply_patches",
    "clear_patch_mapping",
    "get_patch_mapping",
    "patch_output_recorders",
    "register_patch_mapping",
    "unregister_patch_mapping",
]

_DECLARED = "_can_record_outputs"
_MISSING = object()

_lock = threading.RLock()
_mapping: dict[str, type[nn.Module]] = {}
# Patched module -> the declaration its instance had of its own, or _MISSING.
_patched: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

#: Changes whenever a declaration may have changed.  Compiled code is guarded on it; a
#: string, since Dynamo makes an int that changes symbolic.
generation = "0"


def register_patch_mapping(
    mapping: Mapping[str, type[nn.Module]], overwrite: bool = False
) -> None:
    r"""Register replacement classes.

    Example::

        register_patch_mapping({"Qwen2MoeExperts": SequentialExperts})
        register_patch_mapping({r"^Llama\d+Attention$": FusedAttention})

    An exact name has priority over a pattern; patterns are tried in the order of
    registration, and match anywhere in the name unless they are anchored.

    Args:
        mapping: Class name or regular expression to replacement.
        overwrite: Replace keys that are registered already.

    Raises:
        TypeError: a key is no string, or a replacement is no subclass of ``nn.Module``.
        ValueError: a key is registered already.  Nothing has been registered then.
    """
    with _lock:
        for key, replacement in mapping.items():
            _check(key, replacement)
            if key in _mapping and not overwrite:
                raise ValueError(
                    f"Class {key!r} already has a patch mapping registered "
                    f"({_mapping[key].__qualname__}). Use overwrite=True to replace it."
                )
        _mapping.update(mapping)
        _refresh()


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Remove keys, spelled as they were registered; patched models are restored.

    Raises:
        TypeError: a single string was passed.
        ValueError: a key is not registered.  Nothing has been removed then.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys={keys!r} is a string; pass a list of keys, [{keys!r}]")
    with _lock:
        gone = list(keys)
        for key in gone:
            if key not in _mapping:
                raise ValueError(
                    f"Class or pattern {key!r} not found in monkey patch mapping "
                    "cache. "
                    "Cannot unregister a class that is not registered; registered are "
                    f"{sorted(_mapping)}."
                )
        for key in gone:
            _mapping.pop(key, None)
        _refresh()


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """A copy of what is registered."""
    with _lock:
        return dict(_mapping)


def clear_patch_mapping() -> None:
    """Remove every key; patched models are restored."""
    with _lock:
        _mapping.clear()
        _refresh()


def patch_output_recorders(model: nn.Module) -> None:
    """Point the declarations of ``model`` and its sub-models at the replacements.

    Call it on a model that was built with replaced classes.  The declarations of other
    instances, and of the class, stay as they are.  Calling it twice changes nothing
    more.  A deep copy of a patched model keeps its declarations when keys are
    unregistered later.
    """
    with _lock:
        for module in model.modules():
            if not hasattr(type(module), _DECLARED) and (
                _DECLARED not in module.__dict__
            ):
                continue
            if module not in _patched and _replaced(getattr(module, _DECLARED)):
                _patched[module] = module.__dict__.get(_DECLARED, _MISSING)
        _refresh()


@contextlib.contextmanager
def apply_patches(packages: Iterable[str] = ("transformers",)) -> Iterator[None]:
    """Replace the registered classes in the loaded modules of ``packages``.

    Models built within the block consist of the replacements.  The classes are put back
    at the end, also when the block raises.  The change is one of the process: do not
    build other models in other threads meanwhile.

    Args:
        packages: Top-level names of the packages whose modules are searched.
    """
    mapping = get_patch_mapping()
    undo: list[tuple[Any, str, type]] = []
    try:
        if mapping:
            for module in _loaded(tuple(packages)):
                for name, value in list(vars(module).items()):
                    if isinstance(value, type):
                        replacement = _replacement(name, mapping)
                        if replacement is not None and replacement is not value:
                            undo.append((module, name, value))
                            setattr(module, name, replacement)
        yield
    finally:
        for module, name, value in reversed(undo):
            setattr(module, name, value)


def _loaded(packages: tuple[str, ...]) -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and name.split(".", 1)[0] in packages
    ]


def _check(key: Any, replacement: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(
            f"Key {key!r} must be a class name or a pattern, got {type(key).__name__}"
        )
    if not isinstance(replacement, type):
        raise TypeError(
            f"Replacement for {key!r} must be a class, got {type(replacement).__name__}"
        )
    if not issubclass(replacement, nn.Module):
        raise TypeError(
            f"Replacement class for {key!r} must be a subclass of nn.Module, got "
            f"{replacement.__qualname__}"
        )


def _replacement(
    name: str | None, mapping: Mapping[str, type[nn.Module]]
) -> type[nn.Module] | None:
    if name is None:
        return None
    if name in mapping:
        return mapping[name]
    for pattern, replacement in mapping.items():
        try:
            if re.search(pattern, name):
                return replacement
        except re.error as error:
            warnings.warn(
                f"{pattern!r} is not a regular expression ({error}); it matches the "
                "class of exactly that name only",
                stacklevel=2,
            )
    return None


def _replaced(declared: Any) -> Any:
    """``declared`` with replacements in it; ``None`` if there are none."""
    if not declared:
        return None
    changed = {name: _replace_in(value) for name, value in declared.items()}
    return None if _same(changed, declared) else changed


def _same(changed: Mapping[str, Any], declared: Mapping[str, Any]) -> bool:
    return all(changed[name] is declared[name] for name in declared)


def _replace_in(value: Any) -> Any:
    """One value of a declaration; the same object if nothing in it is replaced."""
    if isinstance(value, (list, tuple)):
        parts = [_replace_in(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(parts)
    if isinstance(value, str):
        return _replacement(value, _mapping) or value
    if isinstance(value, type):
        return _replacement(value.__name__, _mapping) or value
    target = getattr(value, "target_class", None)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    name = getattr(value, "class_name", None)
    if target is not None:
        name = getattr(target, "__name__", None)
    replacement = _replacement(name, _mapping)
    if replacement is None or replacement is target:
        return value
    return dataclasses.replace(value, target_class=replacement)


def _refresh() -> None:
    """Recompute every patched declaration from what it was before."""
    global generation
    for module, before in list(_patched.items()):
        if before is _MISSING:
            module.__dict__.pop(_DECLARED, None)
        else:
            module.__dict__[_DECLARED] = before
        changed = _replaced(getattr(module, _DECLARED, None))
        if changed is not None:
            module.__dict__[_DECLARED] = changed
        else:
            del _patched[module]
    generation = str(int(generation) + 1)
