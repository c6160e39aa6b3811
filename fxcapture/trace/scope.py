"""The scope in a trace: overrides that are set and deleted by the traced code itself.

A *scope* is the time in which the target modules emit marks: on entry each gets an
override in the instance's ``__dict__``, on exit the key goes again.

Invariants
    ``enter`` and ``leave`` are traced by Dynamo.  There the set and the delete of the
    key are a net no-op: nothing is written to the module when the compiled code runs,
    no hook dictionary changes, no guard on hooks is added.  That holds for
    ``module.__dict__[key] = ...`` only; ``setattr`` would be replayed.
    What Dynamo has to trace for a target is kept to a few bytecodes: each name of the
    module tree is followed once, overrides of plain targets are made in place, and what
    they use stands in their defaults (a global of another module costs a millisecond).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxcapture.reductions import Reducers
from fxcapture.trace.mark import RESULT, Emit
from fxcapture.trace.observe import Target, emit_result, find, observed

__all__ = ["Saved", "Step", "enter", "leave", "restore_left_behind", "steps_to"]

#: What ``enter`` changed: (dictionary, key, whether it was there, what was there).
Saved = list[tuple[dict[str, Any], str, bool, Any]]
Asks = Callable[[str], tuple[bool, bool]]


def enter(
    model: nn.Module,
    steps: Sequence[Step],
    emit: Emit,
    reducers: Reducers,
    watched: bool = False,
    into: Saved | None = None,
    asks: Asks | None = None,
) -> Saved:
    """Make each target emit the marks of each of its calls.

    Args:
        model: The model.
        steps: The targets, from :func:`steps_to`.
        emit: Takes the marks.
        reducers: Record name to its reduction.
        watched: Compute attention weights while a call runs, see ``observe``.
        into: Receives what is changed, at once; for callers that are not traced, which
            may be interrupted.
        asks: By a target's path, which of two kinds of values a record may still select
            of a call that begins now: what it receives, and attention weights; all,
            if it is not given.
    """
    saved: Saved = [] if into is None else into
    tensor, result, general = torch.Tensor, RESULT, emit_result
    modules: list[Any] = [model]
    for parent, name, asked in steps:
        if parent < 0:
            module = model
        else:
            module = modules[parent]._modules[name]
            modules.append(module)
        for target, plain in asked:
            key = target[2]
            slot = module.__dict__
            original = getattr(module, key)
            if key in slot:
                saved.append((slot, key, True, slot[key]))
            else:
                saved.append((slot, key, False, None))
            if plain:

                def forward(
                    *args: Any,
                    _fxc_original: Callable[..., Any] = original,
                    _fxc_path: str = target[0],
                    _fxc_emit: Emit = emit,
                    _fxc_tensor: type = tensor,
                    _fxc_result: str = result,
                    _fxc_general: Callable[..., None] = general,
                    **kwargs: Any,
                ) -> Any:
                    value = _fxc_original(*args, **kwargs)
                    if isinstance(value, _fxc_tensor):
                        _fxc_emit(None, [value], [], "T", _fxc_path, _fxc_result)
                    else:
                        _fxc_general(_fxc_emit, None, value, _fxc_path, _fxc_result)
                    return value

                slot[key] = forward
            else:
                slot[key] = _override(original, target, emit, reducers, watched, asks)
    return saved


def leave(saved: Saved) -> None:
    """Undo ``enter``; in reverse, since one module may stand in the list twice.

    Dynamo loses the undoing where it has traced the body of a conditional or a loop in
    between: it goes back to what it knew before the body, and the dictionary that is
    written here is not the one it replays (torch 2.13 and 2.14).  Whoever traces a
    scope has to look for such operators, see ``passes.forgets_overrides``.
    """
    for slot, key, present, value in reversed(saved):
        if present:
            slot[key] = value
        else:
            del slot[key]


def _override(
    original: Callable[..., Any],
    target: Target,
    emit: Emit,
    reducers: Reducers,
    watched: bool,
    asks: Asks | None,
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        copies, weighs = (True, watched) if asks is None else asks(target[0])
        return observed(
            original, args, kwargs, target, None, emit, reducers, weighs, copies
        )

    return forward


#: One module of the way to the targets: the place of its parent among those before it
#: (-1: it is the model itself), its name there, and the targets that it is, each with
#: whether it is plain.
Step = tuple[int, str, tuple[tuple[Target, bool], ...]]


def steps_to(targets: Sequence[Target], *, by_dynamo: bool) -> tuple[Step, ...]:
    """The modules to go through, parents first, each once; constants for a trace.

    Args:
        targets: How the modules are tapped.
        by_dynamo: Dynamo goes through them.  To it, the wrapper that ``torch.compile``
            makes and what it wraps are one object.
    """
    asked: dict[tuple[str, ...], list[tuple[Target, bool]]] = {}
    for target in targets:
        path = target.real_path
        if by_dynamo:
            path = tuple(name for name in path if name != "_orig_mod")
        for i in range(1, len(path) + 1):
            asked.setdefault(path[:i], [])
        asked.setdefault(path, []).append((target, target.is_plain))
    root = asked.pop((), [])
    places: dict[tuple[str, ...], int] = {(): 0}
    steps: list[Step] = [(-1, "", tuple(root))] if root else []
    for path, found in asked.items():
        places[path] = len(places)
        steps.append((places[path[:-1]], path[-1], tuple(found)))
    return tuple(steps)


def restore_left_behind(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """Undo overrides that a traced scope has left in the instances.

    It should leave none.  What Dynamo makes of a scope depends on everything that is
    traced between its ends, so whoever runs new code of Dynamo's looks once.

    Returns:
        Paths of the modules where one was left.
    """
    found = []
    for target in targets:
        module = find(model, target)
        left: Any = module.__dict__.get(target.key)
        original = _original_of(left)
        if original is None:
            continue
        found.append(target.path)
        if getattr(original, "__self__", None) is module:
            del module.__dict__[target.key]
        else:
            module.__dict__[target.key] = original
    return found


def _original_of(function: Any) -> Any:
    """What an override of a scope stands for; ``None`` for any other function."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != __file__:
        return None
    defaults = function.__kwdefaults__ or {}
    if "_fxc_original" in defaults:
        return defaults["_fxc_original"]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    return cells["original"].cell_contents if "original" in cells else None
