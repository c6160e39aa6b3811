"""The export front end: a model, exported with marks in its graph.

Invariants
    The overrides stand in the model's instances while the export lasts, in both modes,
    and are gone after it, also if it failed.  So is whatever else the trace left in an
    attribute of a module.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fxcapture.errors import FxCaptureError, TraceError
from fxcapture.passes.compute_weights import weights_wanted
from fxcapture.plan.inputs import Place, find_places, read_inputs
from fxcapture.plan.match import Match, reducers_of
from fxcapture.reductions import Reducers
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.mark import allow_marks, emit_mark
from fxcapture.trace.scope import Saved, enter, undo, way_to
from fxcapture.trace.signature import describe_forward
from fxcapture.trace.target import Target

__all__ = ["overridden", "trace"]

# torch.export runs the model's own Python code, so two exports of one model at a time
# would see each other's overrides.
_exporting = threading.RLock()


_OUR_SIDE_EFFECT = (
    r".*side effects happened.*: \["
    r"\"L\['self'\]\._modules\['_export_root'\]\.forward\.__closure__\[\d+\]"
    r"\.cell_contents\"\]$"
)

#: Of function modes, which are made in the trace and are gone with it.
_A_MODE_S_SIDE_EFFECT = r".*side effects happened.*: \['<unknown source>'\]$"


@contextlib.contextmanager
def overridden(
    model: nn.Module,
    targets: Sequence[Target],
    reducers: Reducers,
    places: Mapping[str, Place],
    added: Mapping[str, Any],
    marked: Collection[str],
    packed: Collection[str] = (),
) -> Iterator[None]:
    """A time in which the targets emit marks.

    Args:
        model: The model.
        targets: What to mark.
        reducers: Record name to its reduction.
        places: Where the model's call has the inputs of reductions.
        added: Those that are keywords of the call but not of the model.
        marked: Those that a pass has to find in the graph.
        packed: Targets whose attention weights no pass can find in the graph, which
            takes ``multi_head_attention_forward`` apart.
    """
    signature = _with_keywords(inspect.signature(model.forward), added)
    slot = model.__dict__
    # Targets call their reducers when the model runs, so those are found by then.
    late: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(reducers)
    with _exporting:
        before = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
        saved = Saved([], [])
        try:
            enter(
                model,
                way_to(model, targets, by_dynamo=False),
                emit_mark,
                late,
                into=saved,
                listens=True,
                asks=lambda path: (True, path in packed),
            )
            if places:
                saved.others.append(
                    (slot, "forward", "forward" in slot, slot.get("forward"))
                )
                slot["forward"], made = read_inputs(
                    model.forward, reducers, places, added, marked
                )
                late.update(made)
            own = slot.get("forward")
            if own is not None and inspect.isfunction(own):
                # torch.export names the program's inputs after the root's parameters.
                own.__signature__ = signature  # type: ignore[attr-defined]
            yield
        finally:
            undo(saved)
            # A model that stores a value in an attribute would keep a tensor without
            # data, since export ran it on such tensors.
            for live, kept in before:
                live.update(kept)
                for key in live.keys() - kept.keys():
                    del live[key]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    bound: Match,
    spec: CaptureSpec,
    *,
    capture_inputs: Mapping[str, Any],
    dynamic_shapes: Any,
    strict: bool,
) -> ExportedProgram:
    """Export a model with marks behind the targets' calls.

    Raises:
        ElementError: a reduction names an input that there is not.
        SpecError: ``capture_inputs`` has the name of an argument.
        SpecTypeError: an input is no tensor that its reduction can use.
        TraceError: the model cannot be exported.
    """
    places = find_places(spec, model, args, kwargs, capture_inputs)
    if capture_inputs:
        dynamic_shapes = _shapes_with(dynamic_shapes, model, capture_inputs)
    if strict:
        allow_marks()
    late = {w.source for w in weights_wanted(spec).values() if w.source}
    with (
        overridden(
            model,
            bound.listening,
            reducers_of(spec),
            places,
            capture_inputs,
            late,
            bound.packed,
        ),
        warnings.catch_warnings(),
    ):
        # Where ``read_inputs`` puts them, which is empty again after the call; anything
        # else that the model writes to is still warned of.
        warnings.filterwarnings("ignore", _OUR_SIDE_EFFECT)
        if bound.packed or bound.functions:
            warnings.filterwarnings("ignore", _A_MODE_S_SIDE_EFFECT)
        try:
            return torch.export.export(
                model,
                args,
                {**kwargs, **capture_inputs},
                dynamic_shapes=dynamic_shapes,
                strict=strict,
            )
        except FxCaptureError:
            raise
        except Exception as error:
            # torch.export lets all kinds of errors through, its own and the model's.
            raise TraceError(
                f"{type(model).__name__} cannot be exported as one graph",
                why=f"{type(error).__name__}: {error}".strip().replace("\n", "\n    "),
                remedy="remove what stops the export (see the reason), or use "
                "fxcapture.compile, which also runs a model in pieces",
            ) from error


def _with_keywords(
    signature: inspect.Signature, names: Mapping[str, Any]
) -> inspect.Signature:
    """The signature with further keywords."""
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    return signature.replace(parameters=[*named, *added, *parameters[len(named) :]])


def _shapes_with(
    shapes: Any, model: nn.Module, capture_inputs: Mapping[str, Any]
) -> Any:
    """Dynamic shapes with an entry for each further input; static by default."""
    if shapes is None:
        return None
    if not isinstance(shapes, Mapping):
        # By position, which says nothing of keywords.
        shapes = dict(zip(describe_forward(model).names, shapes, strict=False))
    return {**shapes, **{n: shapes.get(n) for n in capture_inputs}}
