"""The eager reference: what records should hold, found without tracing anything.

The model runs eagerly, with forward hooks that copy what they see at once.  No code is
shared with the tracing path: that is what makes it a reference.

Terms
    direct call: ``child.forward(x)`` instead of ``child(x)``.  Forward hooks do not see
        it; it counts as a call all the same, so the reference watches for it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import ElementError, UnsupportedOutputError
from fxcapture.plan.inputs import find_inputs
from fxcapture.plan.match import Match, entry_name, match
from fxcapture.plan.records import Captured, Records
from fxcapture.reductions import Reduction
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.positions import Slice
from fxcapture.spec.tap import Tap
from fxcapture.testing.reference_attention import NoteWeights
from fxcapture.testing.reference_functions import hearing_taps
from fxcapture.trace.listen import unheard
from fxcapture.trace.signature import describe_forward
from fxcapture.trace.target import find

__all__ = ["copied", "eager_reference", "map_tensors", "snapshot"]


def eager_reference(
    model: nn.Module,
    spec: CaptureSpec,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Captured:
    """Run a model eagerly and record what the spec asks for, with forward hooks.

    The random state and the model's buffers are put back afterwards, and tensors in
    ``args`` and ``kwargs`` are copied first, so that a second run sees what this saw.

    Args:
        model: The model, not compiled.
        spec: What to record.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Output and records; tensors of the records are detached copies.
    """
    model = _torch.unwrap_optimized(model)
    bound = match(spec, model)
    seen: list[Any] = []
    given = dict(kwargs or {})
    extra = given.pop("capture_inputs", None)
    args = tuple(copied(tuple(args)))
    kwargs = copied(given)
    inputs = find_inputs(spec, model, args, kwargs, extra)
    with (
        _unchanged(model),
        _watching(model, bound, seen),
        hearing_taps(model, bound, seen, snapshot),
    ):
        output = model(*args, **kwargs)
    values: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for name, tap in spec.items():
        hits = [s for s in seen if s.path in bound.paths[name]]
        if tap.function is not None:
            hits = [s for s in hits if s.is_taken_by(tap.function)]
        entries = [(h.path, _value_of(h, tap, inputs)) for h in hits]
        if tap.initial and hits:
            first = _reduced(tap, hits[0].entries[0], inputs)
            entries.insert(0, (hits[0].path, first))
        chosen = _chosen(tap.select, len(entries))
        values[name] = tuple(
            v if i in chosen else None for i, (_, v) in enumerate(entries)
        )
        paths[name] = tuple(p for p, _ in entries)
    return Captured(output, Records(values, paths))


@final
@dataclasses.dataclass(slots=True)
class _Seen:
    """One call: its path, copies of the arguments asked for, and of its result."""

    path: str
    entries: dict[int | str, Any]
    result: Any
    weights: list[Any]


def _value_of(seen: Any, tap: Tap, inputs: Mapping[str, Any]) -> Any:
    if tap.attention is not None:
        (found,) = seen.weights
        weights = found[int(tap.attention.scores)]
        if weights is None:
            raise UnsupportedOutputError(
                f"the eager reference has no attention scores of {seen.path!r}",
                why="torch.nn.functional.multi_head_attention_forward returns weights",
                remedy="verify the weights, fxcapture.AttentionWeights",
            )
        weights = _picked(weights, tap.attention.heads, -3)
        return _reduced(tap, _picked(weights, tap.attention.queries, -2), inputs)
    if tap.point == "input":
        return _reduced(tap, seen.entries[entry_name(tap)], inputs)  # type: ignore[index]
    return _reduced(tap, _element(seen.result, tap.output), inputs)


def _picked(value: torch.Tensor, positions: Any, dim: int) -> torch.Tensor:
    places = list(range(value.shape[dim]))
    if isinstance(positions, Slice):
        places = [places[i] for i in positions.indices(len(places))]
    elif positions is not None:
        places = [places[i] for i in positions]
    return value.index_select(dim, torch.tensor(places, device=value.device))


def _element(value: Any, name: int | str | None) -> Any:
    if name is None:
        return value
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        return value[name] if hasattr(value, "to_tuple") else value[str(name)]
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return value[name] if isinstance(name, int) else getattr(value, name)
    if dataclasses.is_dataclass(value):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(name, int):
            return [v for v in values.values() if v is not None][name]
        return values[name]
    if name == 0:
        return value
    kind = "tensor" if isinstance(value, torch.Tensor) else repr(value)
    raise ElementError(
        f"output={name!r} does not exist in the output of a module",
        why=f"{kind} has no elements",
        remedy="pass output=None for the whole value",
    )


def _reduced(tap: Tap, value: Any, inputs: Mapping[str, Any]) -> Any:
    own = callable(tap.reduce) and not isinstance(tap.reduce, Reduction)
    if own and _holds_tensor(value):
        value = tap.reduce(value)  # type: ignore[operator, misc]

    def one(t: torch.Tensor) -> torch.Tensor:
        if isinstance(tap.reduce, Reduction):
            t = tap.reduce.apply(t, inputs.get(str(tap.reduce.source)))
        elif tap.reduce == "last":
            t = t[:, -1]
        elif tap.reduce == "mean":
            t = t.mean(dim=1)
        dtype = tap.dtype if t.is_floating_point() else None
        return t.to(device=tap.device, dtype=dtype)

    return map_tensors(value, one)


def _holds_tensor(value: Any) -> bool:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return bool(found)


def _chosen(select: Any, length: int) -> frozenset[int]:
    if select is None:
        return frozenset(range(length))
    if isinstance(select, tuple):
        return frozenset(i % length for i in select if -length <= i < length)
    return frozenset(select.indices(length))


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A value with a function applied to its tensors, containers made anew."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(v, function) for v in value])
    if isinstance(value, (tuple, list)):
        items = [map_tensors(v, function) for v in value]
        return items if type(value) is list else type(value)(items)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = map_tensors(item, function)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(cast(Any, value))
        for field in dataclasses.fields(value):
            item = map_tensors(getattr(value, field.name), function)
            object.__setattr__(made, field.name, item)
        return made
    return value


def snapshot(value: Any) -> Any:
    """A copy of a value whose tensors are detached copies."""
    return map_tensors(value, lambda t: t.detach().clone())


def copied(value: Any) -> Any:
    """Arguments of their own for a run: the model may write to them."""

    def one(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    if isinstance(value, (tuple, list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {k: copied(v) for k, v in items}
        return made if isinstance(value, dict) else type(value)(made.values())
    if isinstance(value, torch.Tensor):
        return one(value)
    return copy.deepcopy(value)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])


@contextlib.contextmanager
def _watching(model: nn.Module, bound: Match, seen: list[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        done: set[str] = set()
        for target in bound.targets:
            if target.path not in done:
                done.add(target.path)
                module = find(model, target)
                wanted = bound.entries[target.path]
                watched = bool(bound.attention.get(target.path))
                _watch(stack, module, target.path, wanted, seen, watched)
        if bound.inside_fused:
            before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, before)
        yield


def _watch(
    stack: contextlib.ExitStack,
    module: nn.Module,
    path: str,
    wanted: Sequence[int | str],
    seen: list[Any],
    attention: bool,
) -> None:
    # Calls in progress of this module: the arguments, and whether forward has begun.
    calls: list[dict[str, Any]] = []
    known = _arguments_of(module)
    own_forward = module.forward
    weights: list[list[Any]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        if not attention:
            return own_forward(*args, **kwargs)
        with NoteWeights() as noted:
            value = own_forward(*args, **kwargs)
        weights.append(noted.weights)
        return value

    def quietly(value: Any) -> Any:
        # A copy made here is no function call of the model's.
        return unheard(snapshot, (value,))

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        return {w: quietly(known(w, args, kwargs)) for w in wanted}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({"entries": arguments(args, kwargs), "begun": False})

    def after(_: nn.Module, args: Any, output: Any) -> None:
        call = calls.pop()
        noted = weights.pop() if weights else []
        seen.append(_Seen(path, call["entries"], quietly(output), noted))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if calls and not calls[-1]["begun"]:
            calls[-1]["begun"] = True
            return original(*args, **kwargs)
        entries = arguments(args, kwargs)
        output = original(*args, **kwargs)
        noted = weights.pop() if weights else []
        seen.append(_Seen(path, entries, quietly(output), noted))
        return output

    present, own = "forward" in module.__dict__, module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def restore() -> None:
        if present:
            module.__dict__["forward"] = own
        else:
            del module.__dict__["forward"]

    stack.callback(restore)
    if isinstance(module, torch.jit.ScriptModule):
        return  # it refuses forward hooks; every call counts as a direct one
    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _arguments_of(module: nn.Module) -> Callable[..., Any]:
    """Tells one argument of a call, or its default if that is a plain constant."""
    known = describe_forward(module)

    def argument(
        which: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(known.names, known.defaults, strict=True))
        given |= dict(zip(known.names[: known.positional], args, strict=False)) | kwargs
        if isinstance(which, str):
            return given.get(which)
        if which < len(args):
            return args[which]
        return given.get(known.names[which]) if which < len(known.names) else None

    return argument
