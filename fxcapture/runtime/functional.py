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
from fxcapture.plan.match import Match, match, reducers_of
from fxcapture.plan.plan import Slot, treat
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import SiteTable, group_marks, pair_hooked, site_of
from fxcapture.reductions import Reducers, bind_inputs
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import Mark
from fxcapture.trace.method_entry import as_module
from fxcapture.trace.scope import Asks, Saved, Way, enter, leave, undo, way_to
from fxcapture.trace.structure_text import encode, parse
from fxcapture.trace.templates import fill, template

__all__ = [
    "Function",
    "Layout",
    "Shape",
    "collector",
    "functional",
    "layout_of",
    "observe",
    "read",
    "shapes_of",
]

#: ``fn(params, buffers, *args, **kwargs) -> Captured``.
Function = Callable[..., Captured]
#: What is constant of an observation: path, kind, structure, number of sizes.
Shape = tuple[str, str, str, int]
#: An observation: path, kind, structure, tensors, sizes.
Kept = tuple[str, str, str, list[torch.Tensor], list[Any]]
Selection = Sequence[tuple[str, Any]]


def functional(
    model: nn.Module | Callable[..., Any], spec: CaptureSpec | Mapping[str, Any]
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
    root = _torch.unwrap_optimized(as_module(model))
    match(checked, root)
    collect = collector(root, checked)

    def fn(
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Captured:
        tensors = {**params, **buffers}

        def call() -> Any:
            return torch.func.functional_call(root, tensors, args, kwargs)

        output, records = collect(call)
        return Captured(output, records)

    return fn, dict(root.named_parameters()), dict(root.named_buffers())


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
    """Records with something else than tensors in them.

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
        count, form = _read(text)
        here = rest[at : at + count]
        values[name] = fill(form, _getter(here), _getter(sizes))
        paths[name] = found
        at += count
    return Records(values, paths)


def _getter(values: Sequence[Any]) -> Callable[[int], Any]:
    return lambda i: values[i]


@_torch.constant
def _read(text: str) -> tuple[int, Any]:
    """Number of tensors of a written structure, and its template."""
    structure = parse(text)
    return sum(1 for _ in structure.leaves("tensor")), template(structure)


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
        ``collect(call, selection=(), inputs=None) -> (output, records)``, where
        ``call`` calls the model, ``selection`` replaces the spec's positions (in the
        form that ``canonical_selection`` gives), and ``inputs`` are those of
        reductions, by name.  It raises ``TargetError`` where the spec does not fit what
        the call called.
    """
    reducers = reducers_of(spec)
    _torch.register_pytree(Records, _flatten, _unflatten)
    _torch.register_pytree(_Blank, lambda b: (b.leaves, b.context), _unflatten)

    @_torch.constant
    def steps(by_dynamo: bool) -> Way:
        targets = match(spec, model).listening
        return way_to(model, targets, by_dynamo=by_dynamo, unfused=True)

    @_torch.constant
    def layout(shapes: Sequence[Shape], selection: Selection) -> Layout:
        return layout_of(spec, match(spec, model), shapes, selection)

    def collect(
        call: Callable[[], Any],
        selection: Selection = (),
        inputs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Records]:
        found = steps(torch.compiler.is_dynamo_compiling())
        output, seen = observe(call, model, found, bind_inputs(reducers, inputs))
        return output, Records(*read(seen, layout(shapes_of(seen), selection)))

    return collect


def observe(
    call: Callable[[], Any],
    model: nn.Module,
    steps: Way,
    reducers: Reducers,
    takes: Callable[[str, str], bool | None] | None = None,
    asks: Asks | None = None,
) -> tuple[Any, list[Kept]]:
    """Call a model and keep a copy of what its targets give; in any trace.

    Args:
        call: Calls the model.
        model: The model.
        steps: The targets, from ``way_to``.
        reducers: Record name to its reduction.
        takes: By a mark's path and kind, asked once of each, whether to keep its
            tensors; ``None`` if the mark counts for nothing.  All, if it is not given.
        asks: See ``scope.enter``.
    """
    seen: list[Kept] = []

    def keep(
        token: Any,
        tensors: list[Any],
        sizes: list[Any],
        structure: str,
        path: str,
        kind: str,
    ) -> None:
        kept = True if takes is None else takes(path, kind)
        if kept is None:
            return
        # The model may write to what it returned, and a reduction may be a view.
        copies = [t.clone() for t in tensors] if kept else []
        seen.append((path, kind, structure, copies, sizes))

    saved = Saved([], [])
    try:
        enter(model, steps, keep, reducers, True, saved, asks, listens=True)
        output = call()
    finally:
        if torch.compiler.is_dynamo_compiling():
            leave(saved)
        else:
            undo(saved)
    return output, seen


def shapes_of(seen: Sequence[Kept]) -> tuple[Shape, ...]:
    """What is constant of the marks of a trace."""
    return tuple([(p, k, s, len(z)) for p, k, s, _, z in seen])


def read(
    seen: Sequence[Kept], layout: Layout
) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[str, ...]]]:
    """The values of each record, and the path behind each."""
    values: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for name, found, slots in layout:
        values[name] = tuple([_value(slot, seen) for slot in slots])
        paths[name] = found
    return values, paths


#: A slot as constants that Dynamo can hold: for each leaf of the template the
#: observation, its index there, detach, dtype and device; the observation of the sizes;
#: the template.
_SlotLayout = tuple[dict[int, tuple[Any, ...]], int, Any]
Layout = tuple[tuple[str, tuple[str, ...], tuple[_SlotLayout | None, ...]], ...]


def layout_of(
    spec: CaptureSpec, bound: Match, shapes: Sequence[Shape], selection: Selection
) -> Layout:
    """Where each position of each record stands among the marks of a trace.

    Raises:
        TargetError: the spec does not fit what was called.
        CaptureError: a value cannot be captured.
    """
    marks = [
        Mark(None, (), (None,) * num_sizes, structure, path, kind)
        for path, kind, structure, num_sizes in shapes
    ]
    places = {id(mark): i for i, mark in enumerate(marks)}
    calls = group_marks(marks)
    sites, parts = pair_hooked(
        [
            site_of(
                call,
                path=call.result.path,
                classes=bound.classes,
                type_of=lambda tensor: ((), ""),
                size_of=lambda size: None,
            )
            for call in calls
        ]
    )
    plan = resolve(spec, bound, SiteTable(sites), selection)

    def slot_layout(slot: Slot) -> _SlotLayout:
        inner, outer = parts[slot.site]
        call = calls[inner if slot.precedes_hooks else outer]
        place = places[id(call.marks[slot.kind])]
        leaves = {
            i: (place, leaf.index, leaf.detach, leaf.dtype, leaf.device)
            for i, leaf in slot.leaves
        }
        return leaves, place, template(slot.structure)

    return tuple(
        (r.name, r.paths, tuple([s and slot_layout(s) for s in r.slots]))
        for r in plan.records
    )


def _value(slot: _SlotLayout | None, seen: Sequence[Kept]) -> Any:
    if slot is None:
        return None
    leaves, sizes_at, form = slot

    def tensor(i: int) -> torch.Tensor:
        place, index, detach, dtype, device = leaves[i]
        return treat(seen[place][3][index], detach, dtype, device)

    return fill(form, tensor, lambda i: seen[sizes_at][4][i])
