"""The eager reference, and checks built on it.

The reference runs the model eagerly with forward hooks that copy what they see at once.
It shares no code with the tracing path: that is what makes it a reference.

Terms
    direct call: ``child.forward(x)`` instead of ``child(x)``.  Forward hooks do not see
        it; it counts as a call all the same, so the reference watches for it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxcapture import _compat
from fxcapture.errors import VerificationError
from fxcapture.frontends.inputs import find_inputs
from fxcapture.mark import describe_forward
from fxcapture.passes.base import PassResult, walk
from fxcapture.plan import Match, entry_name, match
from fxcapture.program import CapturedModule
from fxcapture.records import Captured, Records
from fxcapture.reductions import Reduction
from fxcapture.sites import format_table
from fxcapture.spec import CaptureSpec, Tap

__all__ = [
    "Verification",
    "assert_parity",
    "check_pass",
    "eager_reference",
    "verify",
]

#: Largest difference that ``assert_parity`` allows by default, relative and absolute.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}


# --------------------------------------------------------------------------------------
# The reference
# --------------------------------------------------------------------------------------


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
    model = _compat.unwrap_optimized(model)
    bound = match(spec, model)
    seen: list[_Seen] = []
    given = dict(kwargs or {})
    extra = given.pop("capture_inputs", None)
    args = tuple(_copied(tuple(args)))
    kwargs = _copied(given)
    inputs = find_inputs(spec, model, args, kwargs, extra)
    with _unchanged(model), _watching(model, bound, spec, seen):
        output = model(*args, **kwargs)
    values: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for name, tap in spec.items():
        hits = [s for s in seen if s.path in bound.paths[name]]
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
    weights: list[torch.Tensor]


def _value_of(seen: _Seen, tap: Tap, inputs: Mapping[str, Any]) -> Any:
    if tap.attention is not None:
        (weights,) = seen.weights
        weights = _picked(weights, tap.attention.heads, 1)
        return _reduced(tap, _picked(weights, tap.attention.queries, 2), inputs)
    if tap.point == "input":
        return _reduced(tap, seen.entries[entry_name(tap)], inputs)  # type: ignore[index]
    return _reduced(tap, _element(seen.result, tap.output), inputs)


def _picked(value: torch.Tensor, positions: Any, dim: int) -> torch.Tensor:
    places = list(range(value.shape[dim]))
    if positions is not None and positions[0] == "slice":
        places = places[slice(*positions[1:])]
    elif positions is not None:
        places = [places[i] for i in positions]
    return value.index_select(dim, torch.tensor(places, device=value.device))


class _NoteWeights(TorchFunctionMode):
    """Notes the weights of fused calls: what they make of the unit matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fused = torch.nn.functional.scaled_dot_product_attention
        if func is fused:
            bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args,
                             strict=False)) | kwargs  # fmt: skip
            key = bound["key"]
            unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            unit = unit.expand(*key.shape[:-2], -1, -1)
            more = {"value": unit, "dropout_p": 0.0}
            if len(args) > 5:
                more |= {"is_causal": args[5]}
            self.weights.append(fused(**(bound | more)).detach())
        elif func is torch.ops.higher_order.flex_attention:
            query, key, _, *more_args = args
            unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            unit = unit.expand(*key.shape[:-2], -1, -1)
            weights = func(query, key, unit, *more_args, **kwargs)[0]
            self.weights.append(weights.detach())
        return func(*args, **kwargs)


def _element(value: Any, name: int | str | None) -> Any:
    if name is None or isinstance(value, (torch.Tensor, torch.Size)):
        return value
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        return value[name] if hasattr(value, "to_tuple") else value[str(name)]
    if isinstance(value, (tuple, list)):
        return value[name] if isinstance(name, int) else getattr(value, name)
    if dataclasses.is_dataclass(value) and isinstance(name, str):
        return getattr(value, name)
    return value


def _reduced(tap: Tap, value: Any, inputs: Mapping[str, Any]) -> Any:
    def one(t: torch.Tensor) -> torch.Tensor:
        if isinstance(tap.reduce, Reduction):
            t = tap.reduce.apply(t, inputs.get(str(tap.reduce.source)))
        elif tap.reduce == "last":
            t = t[:, -1]
        elif tap.reduce == "mean":
            t = t.mean(dim=1)
        elif callable(tap.reduce):
            t = tap.reduce(t)
        dtype = tap.dtype if t.is_floating_point() else None
        return t.to(device=tap.device, dtype=dtype)

    return _map(value, one)


def _chosen(select: Any, length: int) -> frozenset[int]:
    if select is None:
        return frozenset(range(length))
    if isinstance(select, tuple):
        return frozenset(i % length for i in select if -length <= i < length)
    return frozenset(select.indices(length))


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with ``function`` applied to its tensors, containers made anew."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map(v, function) for v in value])
    if isinstance(value, (tuple, list)):
        items = [_map(v, function) for v in value]
        return items if type(value) is list else type(value)(items)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _map(item, function)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(cast(Any, value))
        for field in dataclasses.fields(value):
            item = _map(getattr(value, field.name), function)
            object.__setattr__(made, field.name, item)
        return made
    return value


def _snapshot(value: Any) -> Any:
    return _map(value, lambda t: t.detach().clone())


def _copied(value: Any) -> Any:
    """Arguments of their own for the reference: the model may write to them."""

    def one(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    if isinstance(value, (tuple, list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {k: _copied(v) for k, v in items}
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
def _watching(
    model: nn.Module, bound: Match, spec: CaptureSpec, seen: list[_Seen]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        done: set[str] = set()
        for target in bound.targets:
            if target.path not in done:
                done.add(target.path)
                module = model
                for name in target.real_path:
                    module = module._modules[name]  # type: ignore[assignment]
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
    seen: list[_Seen],
    attention: bool,
) -> None:
    # Calls in progress of this module: the arguments, and whether forward has begun.
    calls: list[dict[str, Any]] = []
    names = describe_forward(module)[0]
    own_forward = module.forward
    weights: list[list[torch.Tensor]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        if not attention:
            return own_forward(*args, **kwargs)
        with _NoteWeights() as noted:
            value = own_forward(*args, **kwargs)
        weights.append(noted.weights)
        return value

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        return {
            w: _snapshot(_argument(own_forward, names, w, args, kwargs)) for w in wanted
        }

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({"entries": arguments(args, kwargs), "begun": False})

    def after(_: nn.Module, args: Any, output: Any) -> None:
        call = calls.pop()
        noted = weights.pop() if weights else []
        seen.append(_Seen(path, call["entries"], _snapshot(output), noted))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if calls and not calls[-1]["begun"]:
            calls[-1]["begun"] = True
            return original(*args, **kwargs)
        entries = arguments(args, kwargs)
        output = original(*args, **kwargs)
        noted = weights.pop() if weights else []
        seen.append(_Seen(path, entries, _snapshot(output), noted))
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


def _argument(
    forward: Callable[..., Any],
    names: Sequence[str],
    which: int | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    try:
        values = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature to read
        values = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(which, int):
        name = names[which] if which < len(names) else None
        if name in values:
            return values[name]
        return args[which] if which < len(args) else None
    if which in values:
        return values[which]
    return kwargs.get(which)


# --------------------------------------------------------------------------------------
# Comparison
# --------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a captured model is from the eager reference.

    Attributes:
        differences: Record name to the largest absolute difference of any element of
            any of its tensors; 0.0 where all are bitwise equal.
        output_difference: The same of the model's output; ``None`` if it was not kept.
        scales: Record name to the largest absolute value in the reference.
    """

    differences: Mapping[str, float]
    output_difference: float | None
    scales: Mapping[str, float]

    def __str__(self) -> str:
        rows = [("record", "largest difference", "largest value")]
        rows += [
            (name, f"{d:.3g}", f"{self.scales[name]:.3g}")
            for name, d in self.differences.items()
        ]
        if self.output_difference is not None:
            rows.append(("(output)", f"{self.output_difference:.3g}", ""))
        return format_table(rows)


def verify(captured: CapturedModule, *args: Any, **kwargs: Any) -> Verification:
    """Run a captured model and the eager reference beside it.

    Args:
        captured: What :func:`fxcapture.compile` returned.
        *args: The model's arguments.
        **kwargs: The model's keyword arguments.

    Returns:
        The largest difference per record.

    Raises:
        VerificationError: a record differs in length, structure, shape or dtype.
    """
    model, spec, _ = captured._fxc_parts()
    with torch.random.fork_rng():
        reference = eager_reference(model, spec, args, kwargs)
    output, records = captured(*args, **kwargs)
    differences: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name in spec:
        expected, got = reference.records[name], records[name]
        if len(expected) != len(got):
            raise VerificationError(
                f"record {name!r} has {len(got)} positions",
                why=f"the eager reference has {len(expected)}",
                remedy="report it, with the model and the spec",
            )
        pairs = [
            _difference(e, g, f"{name}[{i}]")
            for i, (e, g) in enumerate(zip(expected, got, strict=True))
        ]
        differences[name] = max((d for d, _ in pairs), default=0.0)
        scales[name] = max((s for _, s in pairs), default=0.0)
    kept = None
    if output is not None:
        kept = _difference(_snapshot(reference.output), output, "the output")[0]
    return Verification(differences=differences, output_difference=kept, scales=scales)


def _difference(expected: Any, got: Any, where: str) -> tuple[float, float]:
    """Largest absolute difference and largest absolute expected value."""
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        return _tensor_difference(expected, got, where)
    parts = _parts(expected)
    if parts is None:
        same = expected == got or (expected != expected and got != got)
        compares = "__eq__" in {k for c in type(expected).__mro__[:-1] for k in vars(c)}
        if not same and compares:
            raise _differs(where, expected, got)
        return 0.0, 0.0
    others = _parts(got)
    if others is None or list(parts) != list(others) or type(expected) is not type(got):
        raise _differs(where, type(expected).__name__, type(got).__name__)
    pairs = [_difference(v, others[k], f"{where}[{k!r}]") for k, v in parts.items()]
    return (
        max((d for d, _ in pairs), default=0.0),
        max((s for _, s in pairs), default=0.0),
    )


def _tensor_difference(expected: Any, got: Any, where: str) -> tuple[float, float]:
    if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)):
        raise _differs(where, type(expected).__name__, type(got).__name__)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise _differs(
            where,
            f"{expected.dtype}{list(expected.shape)}",
            f"{got.dtype}{list(got.shape)}",
        )
    if not expected.numel():
        return 0.0, 0.0
    left, right = (
        t.detach().to("cpu", torch.float64) if not t.is_complex() else t.detach().cpu()
        for t in (expected, got)
    )
    # Equal infinities and NaNs in the same places are no difference.
    apart = (left - right).abs().masked_fill((left == right), 0)
    apart = apart.masked_fill(left.isnan() & right.isnan(), 0)
    size = left.abs().nan_to_num(0.0, posinf=0.0)
    value = float(apart.max())
    return (math.inf if math.isnan(value) else value), float(size.max())


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _differs(where: str, expected: Any, got: Any) -> VerificationError:
    return VerificationError(
        f"{where} is {got!r}",
        why=f"the eager reference has {expected!r}",
        remedy="report it, with the model and the spec",
    )


def assert_parity(
    captured: CapturedModule, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> Verification:
    """Raise unless a captured model agrees with the eager reference.

    Args:
        captured: What :func:`fxcapture.compile` returned.
        *args: The model's arguments.
        tolerance: Largest difference allowed, absolute and relative to the record's
            largest value; by default the one of the model's dtype in ``TOLERANCES``.
        **kwargs: The model's keyword arguments.

    Raises:
        VerificationError: a record or the output is further away.
    """
    result = verify(captured, *args, **kwargs)
    if tolerance is None:
        dtypes = {p.dtype for p in captured.parameters()} or {torch.float32}
        tolerance = max(TOLERANCES.get(d, 0.0) for d in dtypes)
    for name, difference in result.differences.items():
        limit = tolerance * max(1.0, result.scales[name])
        if not difference <= limit:
            raise VerificationError(
                f"record {name!r} is {difference:.3g} away from the eager reference",
                why=f"the tolerance is {limit:.3g}",
                remedy="pass a wider tolerance= if the backend may round differently",
            )
    return result


def check_pass(
    run: Callable[[fx.GraphModule], PassResult],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    idempotent: bool = True,
) -> fx.GraphModule:
    """Check a pass: lint clean, truthful ``modified``, same outputs, idempotent.

    Args:
        run: The pass, with everything but the graph module bound.
        graph_module: What to run it on; changed.
        inputs: Inputs to compare the outputs on.
        idempotent: Whether a second run has to change nothing.

    Returns:
        The graph module after the pass.

    Raises:
        AssertionError: one of these does not hold.
    """
    before = _printed(graph_module)
    expected = graph_module(*_copied(tuple(inputs)))
    result = run(graph_module)
    made = result.graph_module
    made.graph.lint()
    made.recompile()
    after = _printed(made)
    assert result.modified == (before != after), "modified is not truthful"
    got = made(*_copied(tuple(inputs)))
    for left, right in zip(_flat(expected), _flat(got), strict=False):
        assert torch.equal(left, right), "the pass changed an output"
    if idempotent:
        again = run(made)
        assert not again.modified, "a second run changes something"
        assert _printed(again.graph_module) == after, "a second run changes something"
    return made


def _printed(gm: fx.GraphModule) -> str:
    """A graph and its bodies as text."""
    owners = {id(owner): owner for owner, _, _ in walk(gm)}
    return "\n".join(str(owner.graph) for owner in owners.values())


def _flat(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(value, found.append)
    return found
