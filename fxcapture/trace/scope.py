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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.reductions import Reducers
from fxcapture.trace.emit import emit_result
from fxcapture.trace.mark import Emit
from fxcapture.trace.observe import observed, observed_unheard
from fxcapture.trace.target import Target, find

__all__ = [
    "Asks",
    "Saved",
    "Way",
    "enter",
    "leave",
    "restore_left_behind",
    "undo",
    "way_to",
]

#: By a target's path: whether to copy what it receives, and to compute its weights.
Asks = Callable[[str], tuple[bool, bool]]


class Saved(NamedTuple):
    """What ``enter`` changed.

    Attributes:
        simple: Dictionaries that have got the simplest override.
        others: (dictionary, key, whether it was there, what was there).
    """

    simple: list[dict[str, Any]]
    others: list[tuple[dict[str, Any], str, bool, Any]]


def enter(
    model: nn.Module,
    way: Way,
    emit: Emit,
    reducers: Reducers,
    watched: bool = False,
    into: Saved | None = None,
    asks: Asks | None = None,
    listens: bool = False,
) -> Saved:
    """Make each target emit the marks of each of its calls.

    Args:
        model: The model.
        way: The targets, from :func:`way_to`.
        emit: Takes the marks.
        reducers: Record name to its reduction.
        watched: Compute attention weights while a call runs, see ``observe``.
        into: Receives what is changed, at once; for callers that are not traced, which
            may be interrupted.
        asks: By a target's path, which of two kinds of values a record may still select
            of a call that begins now: what it receives, and attention weights; all,
            if it is not given.
        listens: Mark the function calls inside of targets here.
    """
    simple, others = ([], []) if into is None else into
    through, plain, rest, layers = way
    tensor, general = torch.Tensor, emit_result
    modules: list[Any] = [model]
    for parent, name in through:
        modules.append(modules[parent]._modules[name])
    for place, key, value in layers:
        slot = modules[place].__dict__
        others.append((slot, key, key in slot, slot.get(key)))
        slot[key] = value
    for parent, name, path in plain:
        module = modules[parent]._modules[name]

        def forward(
            *args: Any,
            _fxc_original: Callable[..., Any] = module.forward,
            _fxc_path: str = path,
            _fxc_emit: Emit = emit,
            _fxc_tensor: type = tensor,
            _fxc_general: Callable[..., None] = general,
            **kwargs: Any,
        ) -> Any:
            value = _fxc_original(*args, **kwargs)
            if isinstance(value, _fxc_tensor):
                _fxc_emit(None, [value], [], "T", _fxc_path, "result")
            else:
                _fxc_general(_fxc_emit, None, value, _fxc_path, "result")
            return value

        slot = module.__dict__
        simple.append(slot)
        slot["forward"] = forward
        # What a call goes through has nothing to do, and need not be traced.
        slot["_call_impl"] = forward
    for place, target, bare in rest:
        module, key = modules[place], target[2]
        slot = module.__dict__
        original = getattr(module, key)
        if key in slot:
            others.append((slot, key, True, slot[key]))
            if bare:  # then it is a scope's around this one, which has overridden both
                others.append((slot, "_call_impl", True, slot["_call_impl"]))
        else:
            others.append((slot, key, False, None))
            if bare:
                others.append((slot, "_call_impl", False, None))
        override = _override(original, target, emit, reducers, watched, asks, listens)
        slot[key] = override
        if bare:
            slot["_call_impl"] = override
    return Saved(simple, others)


def leave(saved: Saved) -> None:
    """Undo ``enter``, in reverse, since one module may have been changed twice.

    Dynamo loses the undoing where it has traced the body of a conditional or a loop in
    between: it goes back to what it knew before the body, and the dictionary that is
    written here is not the one it replays (torch 2.13 and 2.14).  Whoever traces a
    scope has to look for such operators, see ``passes.forgets_overrides``.
    """
    simple, others = saved
    for slot, key, present, value in reversed(others):
        if present:
            slot[key] = value
        else:
            del slot[key]
    for slot in simple:
        del slot["forward"]
        del slot["_call_impl"]


def undo(saved: Saved) -> None:
    """Undo ``enter`` where no trace runs, also if it or this has been interrupted."""
    try:
        _undo(saved)
    except BaseException:
        _undo(saved)
        raise


def _undo(saved: Saved) -> None:
    # The simplest overrides are of Dynamo's traces alone.
    for slot, key, present, value in reversed(saved.others):
        if present:
            slot[key] = value
        else:
            slot.pop(key, None)


def _override(
    original: Callable[..., Any],
    target: Target,
    emit: Emit,
    reducers: Reducers,
    watched: bool,
    asks: Asks | None,
    listens: bool,
) -> Callable[..., Any]:
    heard = listens and target[8] is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        copies, weighs = (True, watched) if asks is None else asks(target[0])
        if heard:
            return observed_unheard(
                original, args, kwargs, target, None, emit, reducers, weighs, copies
            )
        return observed(
            original, args, kwargs, target, None, emit, reducers, weighs, copies
        )

    return forward


class Way(NamedTuple):
    """How to get to the targets, as constants for a trace.

    Attributes:
        through: The modules to go through, parents first: the place of the parent among
            those before it (0: the model), and the name there.
        plain: Modules for which the simplest override does: the parent's place, the
            name there, and the path.
        rest: The other targets: the module's place, the target, whether its calls go
            through nothing else first.
        layers: Those of torch's own modules that have to call their submodules: the
            module's place, an attribute, and a value of it under which it calls them.
    """

    through: tuple[tuple[int, str], ...]
    plain: tuple[tuple[int, str, str], ...]
    rest: tuple[tuple[int, Target, bool], ...]
    layers: tuple[tuple[int, str, Any], ...] = ()


def way_to(
    model: nn.Module,
    targets: Sequence[Target],
    *,
    by_dynamo: bool,
    outermost: bool = False,
    unfused: bool = False,
) -> Way:
    """The way to the targets; each name of the module tree is followed once.

    Args:
        model: The model, as it is now.
        targets: How its modules are tapped.
        by_dynamo: Dynamo goes through them.  To it, the wrapper that ``torch.compile``
            makes and what it wraps are one object.
        outermost: No other scope can stand around this one in its trace.
        unfused: Keep encoder layers from their kernel for inference, which calls no
            submodule, where a target needs that.  Where nobody has turned the kernel
            off for the process: a trace cannot.
    """
    places: dict[tuple[str, ...], int] = {(): 0}
    through: list[tuple[int, str]] = []

    def place_of(path: tuple[str, ...]) -> int:
        if path not in places:
            parent = place_of(path[:-1])
            places[path] = len(places)
            through.append((parent, path[-1]))
        return places[path]

    def reached(path: tuple[str, ...]) -> tuple[str, ...]:
        if by_dynamo:
            return tuple(name for name in path if name != "_orig_mod")
        return path

    plain, rest = [], []
    for target in targets:
        path = reached(target.real_path)
        bare = by_dynamo and _is_bare(model, target)
        if bare and outermost and path and target.is_plain:
            plain.append((place_of(path[:-1]), path[-1], target.path))
        else:
            rest.append((place_of(path), target, bare))
    layers: dict[tuple[int, str, Any], None] = {}
    if unfused:
        for target in targets:
            for path, key, value in _fused_layers(model, target):
                layers.setdefault((place_of(reached(path)), key, value))
    return Way(tuple(through), tuple(plain), tuple(rest), tuple(layers))


#: The modules that skip their submodules in inference, and how each is kept from it: no
#: activation that the kernel knows, and no nested tensor, which nothing else takes.
_FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def _fused_layers(
    model: nn.Module, target: Target
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """The modules that must not skip their submodules for a target: path and how."""
    module = model
    for i, name in enumerate(target.real_path):
        for key, value in _kept_from_skipping(module):
            yield target.real_path[:i], key, value
        module = module._modules[name]  # type: ignore[assignment]
    if target.attention:
        for below, child in module.named_modules():
            for key, value in _kept_from_skipping(child):
                path = below.split(".") if below else ()
                yield (*target.real_path, *path), key, value


def _kept_from_skipping(module: nn.Module) -> list[tuple[str, Any]]:
    return [how for cls, how in _FUSED.items() if isinstance(module, cls)]


def _is_bare(model: nn.Module, target: Target) -> bool:
    """Whether a call goes through nothing that has to be traced before ``forward``.

    Dynamo is then kept from what it goes through, by an override of that too: from
    tracing it, and from guarding on it, since an eager call of another thread may
    override it.  Where nothing traces, ``forward`` alone is overridden: somebody may
    yet put one of his own over it.
    """
    if target.key != "forward":
        return False
    module = find(model, target)
    own = module.__dict__.keys() & {"forward", "_call_impl"}
    return not own and not _torch.has_hooks(module)


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
        # The simplest override stands under two keys, which go together.
        other = module.__dict__.get("_call_impl")
        if target.key == "forward" and _is_ours(other):
            del module.__dict__["_call_impl"]
        left: Any = module.__dict__.get(target.key)
        if not _is_ours(left):
            continue
        original = _original_of(left)
        found.append(target.path)
        if getattr(original, "__self__", None) is module:
            del module.__dict__[target.key]
        else:
            module.__dict__[target.key] = original
    return found


def _is_ours(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == __file__


def _original_of(function: Any) -> Any:
    """What an override of a scope stands for."""
    code = function.__code__
    defaults = function.__kwdefaults__ or {}
    if "_fxc_original" in defaults:
        return defaults["_fxc_original"]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    return cells["original"].cell_contents
