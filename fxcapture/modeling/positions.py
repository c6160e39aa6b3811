"""What the flags of a call ask for, as positions of a full record.

Invariants
    Negative positions are counted by the config, where it agrees with the modules; else
    by the calls that the run made, and a warning says so once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fxcapture._torch import constant, recompile_limit
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.declaration import declaration, recorders
from fxcapture.spec.flags import Request

__all__ = ["count_selection", "layer_count", "positions_of", "warn_cache", "warn_count"]

#: Record name to positions, ``None`` for all, negative ones if the run has to count.
Positions = dict[str, tuple[int, ...] | None]


def positions_of(
    model: nn.Module, spec: CaptureSpec, wanted: Mapping[str, Request]
) -> tuple[Positions, dict[str, int]]:
    """The positions that a call asks for.

    Args:
        model: The model with the declaration and the config.
        spec: What it declares, from ``record_spec``.
        wanted: Record name to what its flag asks for.

    Returns:
        Those of each record of the spec; and of each that the run has to count, how
        many entries the config promises.

    Raises:
        ValueError: a position is negative, and the config has no layer count.
    """
    positions: Positions = {}
    promised: dict[str, int] = {}
    for name, asked in wanted.items():
        if isinstance(asked, bool):
            chosen = None
        else:
            found = {int(p) for p in asked}
            negative = {p for p in found if p < 0}
            if negative:
                length = layer_count(model, name, found)
                if length == _matched(spec, name):
                    found = {p if p >= 0 else p + length for p in found}
                    found = {p for p in found if p >= 0}
                elif name in spec:
                    promised[name] = length
            chosen = tuple(sorted(found))
        if name in spec:
            positions[name] = chosen
    return positions, promised


def _matched(spec: CaptureSpec, name: str) -> int:
    """How many entries a record has if each of its modules is called once."""
    if name not in spec:
        return 0
    tap = spec[name]
    assert tap.recorded is not None
    return sum(len(of) for _, of in tap.recorded.elements) + tap.initial


def layer_count(model: nn.Module, name: str, positions: Iterable[int]) -> int:
    """Entries of a full record, as the model's config says.

    Args:
        model: The model with the declaration and the config.
        name: The record.
        positions: What was asked for, for the error.

    Raises:
        ValueError: the config does not say how many layers there are.
    """
    declared = recorders(name, declaration(model).get(name))
    count = 0
    for key in dict.fromkeys(r.num_hidden_layers_key for r in declared) or (
        "num_hidden_layers",
    ):
        layers = getattr(getattr(model, "config", None), key, None)
        if not isinstance(layers, int) or isinstance(layers, bool):
            raise ValueError(
                f"{type(model).__name__} cannot select {name.replace('_', ' ')} with "
                f"negative indices {sorted(positions)} because its config does not "
                f"define `{key}`.\n  what to do: use positive indices, or name the "
                "attribute that holds the layer count with "
                "OutputRecorder(..., num_hidden_layers_key=)"
            )
        count += layers
    initial = any(r.capture_initial_hidden_state for r in declared)
    return count + (name == "hidden_states" and initial)


_warned: set[tuple[Any, ...]] = set()
_lock = threading.Lock()


def _warn_once(key: tuple[Any, ...], text: str) -> None:
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(text, UserWarning, stacklevel=4)


@constant
def warn_count(cls: type, name: str, actual: int, promised: int) -> None:
    """Say once that the config and the run disagree on the number of entries."""
    _warn_once(
        ("count", cls.__module__, cls.__qualname__, name),
        f"{cls.__name__}: its config gives {promised} {name}, the run gave "
        f"{actual}; negative indices were counted from the end of what ran. To silence "
        "this, correct the config's layer count or name the right attribute with "
        "OutputRecorder(..., num_hidden_layers_key=)",
    )


@constant
def warn_cache(cls: type) -> None:
    """Say once that gradient checkpointing switches the cache off."""
    _warn_once(
        ("cache", cls.__module__, cls.__qualname__),
        f"{cls.__name__}: use_cache=True is incompatible with gradient checkpointing; "
        "running with use_cache=False",
    )


_selections: weakref.WeakKeyDictionary[nn.Module, set[Any]]
_selections = weakref.WeakKeyDictionary()


def count_selection(model: nn.Module, selection: Any) -> None:
    """Say so once when a model was traced for many selections."""
    limit = recompile_limit()
    with _lock:
        seen = _selections.setdefault(model, set())
        seen.add(selection)
        reached = len(seen) == limit
    if reached:
        warnings.warn(
            f"{type(model).__name__} has been compiled for {limit} selections, and "
            f"torch._dynamo.config.recompile_limit is {limit}: further ones may run "
            "without compilation. Compile with fxcapture.compile, which needs one "
            "trace for all selections, or raise the limit",
            stacklevel=4,
        )
