"""Requests bound to a model: which positions to keep, and where to collect them.

Invariants
    Plain Python that is never traced.  Dynamo calls the two functions under
    ``assume_constant_result`` while it traces, and takes their result for a constant;
    ``generation`` is among their arguments so that the trace is guarded on it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxcapture._torch import constant
from fxcapture._torch.dynamo_for_decorators import (
    begin_collection,
    end_collection,
    local_of_trace,
)
from fxcapture.modeling.collect import trace_plan
from fxcapture.spec.flags import Request
from fxcapture.spec.declaration import Found, declaration, find, recorders

__all__ = [
    "StorePlan",
    "bind",
    "end_trace",
    "layer_count",
    "trace_constants",
    "warn_cache",
    "warn_count",
]

#: Of one record: (name, wanted positions or None for all, late positions, expected).
StorePlan = tuple[str, "tuple[int, ...] | None", tuple[int, ...], int]


@constant
def trace_constants(
    names: tuple[str, ...], asked: tuple[Request, ...]
) -> tuple[Any, ...]:
    """Stores and seats of a trace; whoever calls it calls ``end_trace`` too."""
    model = local_of_trace("model")
    found, stores = bind(model, dict(zip(names, asked, strict=True)))
    _count_selection(model, names, asked)
    begin_collection()
    return stores, trace_plan(found, model)


@constant
def end_trace() -> None:
    """Take back what ``trace_constants`` changed."""
    end_collection()


def bind(
    model: nn.Module, wanted: Mapping[str, Request]
) -> tuple[list[Found], tuple[StorePlan, ...]]:
    """The modules to record of, and what to keep."""
    found = find(model, tuple(wanted))
    return found, plan_stores(model, wanted, found)


def plan_stores(
    model: nn.Module, wanted: Mapping[str, Request], found: list[Found]
) -> tuple[StorePlan, ...]:
    """Resolve each request against the model."""
    plans: list[StorePlan] = []
    for name, asked in wanted.items():
        if isinstance(asked, bool):
            plans.append((name, None, (), -1))
            continue
        positions = frozenset(int(p) for p in asked)
        negative = sorted(p for p in positions if p < 0)
        plain = {p for p in positions if p >= 0}
        if not negative:
            plans.append((name, tuple(sorted(plain)), (), -1))
            continue
        length, matched = _expected(model, name, sorted(positions), found)
        if length == matched:
            plain |= {length + p for p in negative if length + p >= 0}
            negative = []
        plans.append((name, tuple(sorted(plain)), tuple(negative), length))
    return tuple(plans)


def _expected(
    model: nn.Module, name: str, positions: list[int], found: list[Found]
) -> tuple[int, int]:
    """Entries of a full record: as the config says, and as the modules say."""
    matched = sum(
        task.record == name for f in found if f.owner is None for task in f.tasks
    )
    return layer_count(model, name, positions), matched + _initial(model, name)


def _initial(model: nn.Module, name: str) -> bool:
    return name == "hidden_states" and any(
        r.capture_initial_hidden_state
        for r in recorders(name, declaration(model).get(name))
    )


def layer_count(model: nn.Module, name: str, positions: list[int]) -> int:
    """Entries of a full record, as the model's config says.

    Args:
        model: The model with the declaration and the config.
        name: The record.
        positions: What was asked for, for the error.

    Raises:
        ValueError: the config does not say how many layers there are.
    """
    declared = recorders(name, declaration(model).get(name))
    keys = list(dict.fromkeys(r.num_hidden_layers_key for r in declared))
    count = 0
    for key in keys or ["num_hidden_layers"]:
        layers = getattr(getattr(model, "config", None), key, None)
        if not isinstance(layers, int) or isinstance(layers, bool):
            raise ValueError(
                f"{type(model).__name__} cannot select {name.replace('_', ' ')} with "
                f"negative indices {positions} because its config does not define "
                f"`{key}`.\n  what to do: use positive indices, or name the attribute "
                "that holds the layer count with "
                "OutputRecorder(..., num_hidden_layers_key=)"
            )
        count += layers
    return count + _initial(model, name)


_warned: set[tuple[Any, ...]] = set()
_warned_lock = threading.Lock()


def _warn_once(key: tuple[Any, ...], text: str) -> None:
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(text, UserWarning, stacklevel=4)


@constant
def warn_count(cls: type, name: str, actual: int, expected: int) -> None:
    """Say once that the config and the run disagree on the number of entries."""
    _warn_once(
        ("count", cls, name),
        f"{cls.__name__}: its config gives {expected} {name}, the run gave "
        f"{actual}; negative indices were counted from the end of what ran. To silence "
        "this, correct the config's layer count or name the right attribute with "
        "OutputRecorder(..., num_hidden_layers_key=)",
    )


@constant
def warn_cache(cls: type) -> None:
    """Say once that gradient checkpointing switches the cache off."""
    _warn_once(
        ("cache", cls),
        f"{cls.__name__}: use_cache=True is incompatible with gradient checkpointing; "
        "running with use_cache=False",
    )


_selections: weakref.WeakKeyDictionary[nn.Module, set[Any]]
_selections = weakref.WeakKeyDictionary()


def _count_selection(
    model: nn.Module, names: tuple[str, ...], asked: tuple[Request, ...]
) -> None:
    """Say so once when a model was traced for many selections."""
    limit = torch._dynamo.config.recompile_limit
    with _warned_lock:
        seen = _selections.setdefault(model, set())
        seen.add((names, asked))
        reached = len(seen) == limit
    if reached:
        warnings.warn(
            f"{type(model).__name__} has been compiled for {limit} selections, and "
            f"torch._dynamo.config.recompile_limit is {limit}: further ones may run "
            "without compilation. Compile with fxcapture.compile, which needs one "
            "trace for all selections, or raise the limit",
            stacklevel=4,
        )
