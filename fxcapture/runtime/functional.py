"""The functional front end: a capture that the traced function returns itself.

No mark and no pass: the scope keeps each observed value and hands it out with the
output.  This works under every transform and inside every other trace, since the
records are ordinary outputs of the function.

Invariants
    Values are copied when the call returns, so that a later write does not show.
    Nothing is kept between calls, and the model is as it was when a call ends.
    A value cannot leave the body of an activation checkpoint or another higher-order
    operator this way; ``compile`` and ``export`` can bring it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.passes.analyses.collect_marks import pair_hooked
from fxcapture.plan.plan import Match, Plan, Slot, match, reducers_of, resolve
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.sites import Site, SiteTable
from fxcapture.spec.tap import CaptureSpec
from fxcapture.trace.mark import Observation, Target, enter, leave
from fxcapture.trace.structure import Structure, build_container, encode, parse

__all__ = ["Function", "collector", "functional"]

#: ``fn(params, buffers, *args, **kwargs) -> Captured``
Function = Callable[..., Captured]
#: What is constant of an observation: path, structures, numbers of sizes, hooked.
_Shape = tuple[str, str, str, int, int, bool]
Selection = Sequence[tuple[str, Any]]


def functional(
    model: nn.Module, spec: CaptureSpec | Mapping[str, Any]
) -> tuple[Function, dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """A pure function of a model that returns its output and the records.

    Example::

        fn, params, buffers = functional(model, {"hidden": Tap("layers.*")})
        output, records = fn(params, buffers, x)

        def loss(params):
            output, records = fn(params, buffers, x)
            return output.sum(), records

        grads, records = torch.func.grad(loss, has_aux=True)(params)

    The function can be transformed (``grad``, ``vmap``, ``jacrev``, ``make_fx``,
    ``functorch.compile.aot_function``) and compiled.  Records are outputs like any
    other, so a transform treats them as it treats the output; they are a pytree.

    Args:
        model: The model; a call leaves it as it was.  Its own parameters are used
            where ``params`` and ``buffers`` do not name one.
        spec: What to capture; a mapping is made into a :class:`CaptureSpec`.

    Returns:
        The function, and the model's parameters and buffers by name, not copied.  A
        model that writes to a buffer writes to the one it was given.

    Raises:
        TargetNotFoundError: a target matches no module of the model.
        AmbiguousTargetError: a class name names several classes.
    """
    if not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    checked: CaptureSpec = spec
    model = _torch.unwrap_optimized(model)
    match(checked, model)
    collect = collector(model, checked)

    def fn(
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Captured:
        tensors = {**params, **buffers}

        def call() -> Any:
            return torch.func.functional_call(model, tensors, args, kwargs)

        output, records = collect(call)
        return Captured(output, records)

    return fn, dict(model.named_parameters()), dict(model.named_buffers())


def _flatten(records: Records) -> tuple[list[torch.Tensor], Any]:
    """The tensors of records, and the rest; transforms take nothing but tensors."""
    tensors: list[torch.Tensor] = []
    context = []
    for name, values in records.items():
        sizes: list[int] = []
        text = encode(values, tensors, sizes)
        context.append((name, records.paths(name), text, tuple(sizes)))
    return tensors, tuple(context)


@final
class _Blank:
    """Records whose places hold something else than tensors.

    Transforms put numbers there to compare structures, and expect to find them again.
    """

    def __init__(self, leaves: list[Any], context: Any) -> None:
        self.leaves = leaves
        self.context = context


def _unflatten(leaves: Iterable[Any], context: Any) -> Records | _Blank:
    rest = list(leaves)
    if not all(isinstance(leaf, torch.Tensor) for leaf in rest):
        return _Blank(rest, context)
    values: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    at = 0
    for name, found, text, sizes in context:
        count, template = _read(text)
        here = rest[at : at + count]
        values[name] = _fill(template, _getter(here), _getter(sizes))
        paths[name] = found
        at += count
    return Records(values, paths)


def _getter(values: Sequence[Any]) -> Callable[[int], Any]:
    return lambda i: values[i]


@_torch.constant
def _read(text: str) -> tuple[int, Any]:
    """Number of tensors of a written structure, and its template."""
    structure = parse(text)
    return sum(1 for _ in structure.leaves("tensor")), _template(structure)


def collector(
    model: nn.Module, spec: CaptureSpec
) -> Callable[..., tuple[Any, Records]]:
    """A function that calls a model and collects its records, in any trace.

    It has to be made outside the trace: Dynamo knows a function whose result is
    constant only if the function is there before.

    Args:
        model: The model that will be called.
        spec: What to capture.

    Returns:
        ``collect(call, selection=()) -> (output, records)``, where ``call`` calls the
        model and ``selection`` replaces the spec's positions, in the form that
        ``canonical_selection`` gives.  It raises ``TargetError``
        where the spec does not fit what the call called.
    """
    reducers = reducers_of(spec)
    _torch.register_pytree(Records, _flatten, _unflatten)
    _torch.register_pytree(_Blank, lambda b: (b.leaves, b.context), _unflatten)

    @_torch.constant
    def targets() -> tuple[Target, ...]:
        return match(spec, model).targets

    @_torch.constant
    def layout(shapes: Sequence[_Shape], selection: Selection) -> _Layout:
        return _layout(spec, match(spec, model), shapes, selection)

    def collect(
        call: Callable[[], Any], selection: Selection = ()
    ) -> tuple[Any, Records]:
        seen: list[Observation] = []

        def keep(
            token: Any, result: list[Any], derived: list[Any], *fields: Any
        ) -> None:
            # The model may write to what it returned, and a reduction may be a view.
            result = [t.clone() for t in result]
            derived = [t.clone() for t in derived]
            seen.append(Observation(token, result, derived, *fields))

        saved = enter(model, targets(), keep, reducers)
        try:
            output = call()
        finally:
            leave(saved)
        values: dict[str, tuple[Any, ...]] = {}
        paths: dict[str, tuple[str, ...]] = {}
        for name, found, slots in layout(tuple([_shape(o) for o in seen]), selection):
            values[name] = tuple([_value(slot, seen) for slot in slots])
            paths[name] = found
        return output, Records(values, paths)

    return collect


def _shape(o: Observation) -> _Shape:
    sizes = len(o.sizes), len(o.entry_sizes)
    return o.path, o.structure, o.entries, *sizes, o.hooked


#: A slot as constants that Dynamo can hold: which observation, whether it is an entry,
#: the leaves as (kind, index, detach, dtype, device) by tensor leaf, and a template.
_SlotLayout = tuple[int, bool, dict[int, tuple[Any, ...]], Any]
_Layout = tuple[tuple[str, tuple[str, ...], tuple[_SlotLayout | None, ...]], ...]


def _layout(
    spec: CaptureSpec, bound: Match, shapes: Sequence[_Shape], selection: Selection
) -> _Layout:
    sites, marks = pair_hooked(
        [
            Site(
                path=path,
                structure=structure,
                entries=entries,
                sizes=(None,) * num_sizes,
                entry_sizes=(None,) * num_entry_sizes,
                class_name=bound.classes.get(path, ""),
                hooked=hooked,
            )
            for path, structure, entries, num_sizes, num_entry_sizes, hooked in shapes
        ]
    )
    made: Plan = resolve(spec, bound, SiteTable(sites), selection)
    return tuple(
        (
            record.name,
            record.paths,
            tuple(
                None if slot is None else _slot_layout(slot, marks)
                for slot in record.slots
            ),
        )
        for record in made.records
    )


def _slot_layout(slot: Slot, marks: Sequence[tuple[int, int]]) -> _SlotLayout:
    inner, outer = marks[slot.site]
    leaves = {
        i: (leaf.kind, leaf.index, leaf.detach, leaf.dtype, leaf.device)
        for i, leaf in slot.leaves
    }
    index = inner if slot.entry else outer
    return index, slot.entry, leaves, _template(slot.structure)


def _template(structure: Structure) -> tuple[Any, ...]:
    """A structure as nested tuples of constants."""
    if structure.kind in ("tensor", "int"):
        return structure.kind, structure.index
    if structure.kind == "const":
        return "const", structure.value
    parts = tuple(map(_template, structure.children))
    if structure.cls in (tuple, list):
        return "tuple" if structure.cls is tuple else "list", parts
    if structure.cls is dict:
        return "dict", structure.keys, parts
    return structure.kind + " class", structure.cls, structure.keys, parts


def _fill(
    template: tuple[Any, ...],
    tensor: Callable[[int], torch.Tensor],
    size: Callable[[int], int],
) -> Any:
    kind = template[0]
    if kind == "tensor":
        return tensor(template[1])
    if kind == "int":
        return size(template[1])
    if kind == "const":
        return template[1]
    parts = [_fill(part, tensor, size) for part in template[-1]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "dict":
        return dict(zip(template[1], parts, strict=True))
    return build_container(kind.removesuffix(" class"), template[1], template[2], parts)


def _value(slot: _SlotLayout | None, seen: Sequence[Observation]) -> Any:
    if slot is None:
        return None
    index, entry, leaves, template = slot
    observation = seen[index]
    sizes = observation.entry_sizes if entry else observation.sizes

    def tensor(i: int) -> torch.Tensor:
        kind, place, detach, dtype, device = leaves[i]
        held = observation.result if kind == "result" else observation.derived
        value = held[place]
        if detach:
            value = value.detach()
        if dtype is not None and not value.is_floating_point():
            dtype = None
        if dtype is None and device is None:
            return value
        return value.to(device=device, dtype=dtype)

    return _fill(template, tensor, lambda i: sizes[i])
