"""Decorators for the authors of model classes: flags, collection, output conversion.

``capture_outputs`` on a model's ``forward`` collects what the model class declares in
``_can_record_outputs`` and what the caller asks for with ``output_<name>``, puts it into
the returned output object, and honours ``return_dict``.

Terms
    decorated call: one call of a method under ``capture_outputs``.
    request: what a flag asks for, see :mod:`fxcapture.flags`.

Invariants
    Everything is scoped to the call; nothing stays on the model.
    The same function body serves eager runs and Dynamo's trace; what cannot be traced
    (reading the module tree, checking flags) is done at trace time, as a constant.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, final, overload

import torch
from torch import nn

from fxcapture import collect, dispatch, patching
from fxcapture._dynamo import outside_dynamo, untraced
from fxcapture.collect import Collector, Store
from fxcapture.declare import CAPTURES, OutputRecorder, declaration
from fxcapture.declared_spec import declared_spec
from fxcapture.flags import Request, flag_name, request, spell
from fxcapture.outputs import get_field, has_field, inject_records, to_tuple
from fxcapture.resolve import (
    StorePlan,
    bind,
    declared_names,
    end_trace,
    trace_constants,
    warn_cache,
    warn_count,
)

__all__ = [
    "OutputRecorder",
    "capture_outputs",
    "declared_spec",
    "inject_records",
    "merge_with_config_defaults",
    "select_hidden_states",
]

F = TypeVar("F", bound=Callable[..., Any])

#: Whether this thread is inside a decorated call; only the outermost one converts.
_inside: ContextVar[bool] = ContextVar("fxcapture_inside", default=False)
_SELF = 1  # positional arguments are counted without ``self``


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Method:
    """What is known of a decorated function when it is decorated.

    Attributes:
        positions: Parameter name to its place among the positional arguments.
        takes_any: It has ``**kwargs``.
        keywords: Parameters that may be passed by keyword.
        tie: The last hidden state is replaced by the output's ``last_hidden_state``.
    """

    positions: dict[str, int]
    takes_any: bool
    keywords: frozenset[str]
    tie: bool

    @classmethod
    def of(cls, function: Callable[..., Any], tie: bool) -> _Method:
        parameters = list(inspect.signature(function).parameters.values())[_SELF:]
        return cls(
            {
                p.name: i
                for i, p in enumerate(parameters)
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            },
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            frozenset(
                p.name
                for p in parameters
                if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
            ),
            tie,
        )

    def accepts(self, keyword: str) -> bool:
        return self.takes_any or keyword in self.keywords


@overload
def capture_outputs(func: F, *, tie_last_hidden_states: bool = ...) -> F: ...
@overload
def capture_outputs(
    func: None = None, *, tie_last_hidden_states: bool = ...
) -> Callable[[F], F]: ...
def capture_outputs(func: Any = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Collect the values that a model class declares while its forward runs.

    Example::

        class MyModel(nn.Module):
            _can_record_outputs = {"hidden_states": MyBlock, "attentions": MyAttention}

            @capture_outputs
            def forward(self, input_ids, **kwargs):
                ...
                return BaseModelOutput(last_hidden_state=hidden_states)

        model(input_ids, output_hidden_states=[0, -2])

    For each record the keyword ``output_<record>``, or if that is absent or ``None`` the
    attribute of that name of ``self.config``, says what is wanted: everything (``True``),
    nothing (``False``), or positions in the full tuple.  Positions out of range select
    nothing.  The records become fields of the returned object (a mapping or a
    dataclass), as tuples of full length with ``None`` where nothing was selected.

    Recorded tensors are copies, on the device and of the dtype of the model's own, and
    connected to autograd; where autograd records and nothing wrote to the model's own
    tensor in the meantime, it is that tensor itself.

    Args:
        func: The method to decorate.
        tie_last_hidden_states: The last entry of ``hidden_states`` is the output's
            ``last_hidden_state``, behind a final norm.  ``config.tie_last_hidden_states``
            takes precedence.

    Raises:
        SpecTypeError: (at the call) a flag's value is no selection.
        ValueError: (at the call) a negative position, and the config has no layer count.
        TypeError: (at the call) records are wanted and the method returned an object
            that cannot hold them.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        method = _Method.of(function, tie_last_hidden_states)

        @functools.wraps(function)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            config = getattr(self, "config", None)
            own = kwargs.pop("return_dict", None)
            return_dict = getattr(config, "return_dict", None) if own is None else own
            if torch.compiler.is_dynamo_compiling():
                names = declared_names(self, patching.generation)
            else:
                names = tuple(declaration(self))
            wanted: dict[str, Request] = {}
            for name in names:
                asked = _requested(name, method, config, args, kwargs)
                if asked is not False:
                    wanted[name] = asked
            if torch.compiler.is_dynamo_compiling():
                outputs, records = _call_traced(function, self, args, kwargs, wanted)
            else:
                if _inside.get() and own is None:
                    return_dict = None
                outputs, records = _call_eager(function, self, args, kwargs, wanted)
            if records:
                outputs = _inject(self, config, method, outputs, records)
            return to_tuple(outputs) if return_dict is False else outputs

        setattr(wrapper, CAPTURES, method)
        return wrapper

    return decorate if func is None else decorate(func)


def _requested(
    name: str,
    method: _Method,
    config: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Request:
    """What the call asks of one record; leaves ``kwargs`` fit for the model's forward."""
    flag = flag_name(name)
    value = kwargs.get(flag)
    if value is not None:
        asked = request(flag, value)
        if not method.accepts(flag):
            del kwargs[flag]
        elif not isinstance(value, (bool, int, list, tuple)):
            kwargs[flag] = spell(value, asked)
        return asked
    if flag in kwargs and not method.accepts(flag):
        del kwargs[flag]
    place = method.positions.get(flag, -1)
    if 0 <= place < len(args) and args[place] is not None:
        return request(flag, args[place])
    return request(flag, getattr(config, flag, None))


# ------------------------------------------------------------------- one call


@untraced
def _call_eager(
    function: Callable[..., Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: dict[str, Request],
) -> tuple[Any, dict[str, list[Any]]]:
    collector = None
    outer = _inside.set(True)
    try:
        if wanted:
            collector, leave = outside_dynamo(_begin_collecting, model, wanted)
        elif dispatch.is_collecting():
            leave = dispatch.silence()
        else:
            return function(model, *args, **kwargs), {}
        try:
            outputs = function(model, *args, **kwargs)
        finally:
            outside_dynamo(leave)
    finally:
        _inside.reset(outer)
    if collector is None:
        return outputs, {}
    return outputs, outside_dynamo(_settle, model, collector)


def _begin_collecting(
    model: nn.Module, wanted: dict[str, Request]
) -> tuple[Collector, Callable[[], None]]:
    found, stores = bind(model, wanted)
    collector = _collector(stores)
    return collector, dispatch.collect_from(collector, found)


@untraced
def _call_traced(
    function: Callable[..., Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: dict[str, Request],
) -> tuple[Any, dict[str, list[Any]]]:
    """The same under Dynamo, in its plainest Python."""
    if not torch.compiler.is_dynamo_compiling():
        # Dynamo met a graph break in here, gave up on this call, and runs it as it is.
        return _call_eager(function, model, args, kwargs, wanted)
    names = tuple(wanted)
    asked = tuple([wanted[n] for n in names])
    stores, seats = trace_constants(model, names, asked, patching.generation)
    collector = _collector(stores)
    saved = collect.enter_traced(model, seats, collector)
    try:
        outputs = function(model, *args, **kwargs)
    finally:
        collect.leave_traced(saved)
        end_trace(model)
    return outputs, _settle(model, collector)


def _collector(stores: tuple[StorePlan, ...]) -> Collector:
    collector = Collector()
    for name, positions, late, expected in stores:
        collector.stores[name] = Store(
            None if positions is None else frozenset(positions),
            frozenset(late),
            expected,
        )
    return collector


def _settle(model: nn.Module, collector: Collector) -> dict[str, list[Any]]:
    records = {}
    for name, store in collector.stores.items():
        if store.late and len(store.entries) != store.expected:
            warn_count(model, name, len(store.entries), store.expected)
        entries = store.settle()
        # An attention kernel that returns no weights gives an empty record, as in
        # transformers; where some entries have a value, each keeps its position.
        keeps = name == "hidden_states" or store.any_value
        records[name] = entries if keeps else []
    return records


def _inject(
    model: nn.Module,
    config: Any,
    method: _Method,
    outputs: Any,
    records: dict[str, list[Any]],
) -> Any:
    made: dict[str, tuple[Any, ...]] = {}
    for name, entries in records.items():
        if name == "hidden_states" and entries and entries[-1] is not None:
            tie = getattr(config, "tie_last_hidden_states", None)
            if method.tie if tie is None else tie:
                for field in ("vision_hidden_states", "last_hidden_state"):
                    if has_field(outputs, field):
                        entries[-1] = get_field(outputs, field)
                        break
        made[name] = tuple(entries)
    return inject_records(outputs, made, owner=type(model).__name__)


# --------------------------------------------------------- the other decorators

_CONFIG_DEFAULTS = (
    "use_cache",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_aspect_ratio",
)
_STRATEGIES = ("default", "full")


def merge_with_config_defaults(func: F) -> F:
    """Fill arguments that the caller left out, or passed as ``None``, from the config.

    Example::

        @merge_with_config_defaults
        @capture_outputs
        def forward(self, input_ids, use_cache=None, **kwargs): ...

    The arguments are ``use_cache``, ``vision_feature_layer``,
    ``vision_feature_select_strategy`` and ``vision_aspect_ratio``, passed by position or
    by keyword.  ``use_cache`` is off while ``self.gradient_checkpointing`` trains.

    Raises:
        ValueError: (at the call) ``vision_feature_select_strategy`` is unknown.
    """
    method = _Method.of(func, True)

    @functools.wraps(func)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        for name in _CONFIG_DEFAULTS:
            place = method.positions.get(name, -1)
            by_position = 0 <= place < len(args)
            value = args[place] if by_position else kwargs.get(name)
            if value is None:
                value = getattr(config, name, None)
            if value is None:
                continue
            if name == "use_cache":
                value = _cache_allowed(self, value)
            elif name == "vision_feature_select_strategy" and value not in _STRATEGIES:
                raise ValueError(
                    f"Unexpected select feature strategy: {value!r}.\n"
                    f"  what to do: select one of {list(_STRATEGIES)}"
                )
            if by_position:
                args = (*args[:place], value, *args[place + 1 :])
            elif name in kwargs or method.accepts(name):
                kwargs[name] = value
        return func(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _cache_allowed(model: nn.Module, use_cache: Any) -> Any:
    if use_cache and model.training and getattr(model, "gradient_checkpointing", False):
        warn_cache(type(model))
        return False
    return use_cache


def select_hidden_states(
    selection: str | Callable[[Any], Any],
) -> Callable[[F], F]:
    """Ask sub-models for those hidden states only that the decorated method uses.

    Example::

        @select_hidden_states("vision_feature_layer")
        def get_image_features(self, pixel_values, vision_feature_layer=-2, **kwargs):
            outputs = self.vision_tower(pixel_values, **kwargs)
            return outputs.hidden_states[vision_feature_layer]

    A caller's own ``output_hidden_states`` takes precedence, unless it asks for nothing.

    Args:
        selection: Name of the argument that holds the positions, default included; or a
            function of the model that returns them.

    Raises:
        ValueError: (when decorating) the method has no argument of that name, or cannot
            be handed ``output_hidden_states``.
    """

    def decorate(func: F) -> F:
        method = _Method.of(func, True)
        signature = inspect.signature(func)
        default: Any = None
        if isinstance(selection, str):
            if selection not in signature.parameters:
                raise ValueError(
                    f"select_hidden_states({selection!r}): {func.__qualname__} has no "
                    f"such argument\n  what to do: name one of "
                    f"{list(signature.parameters)[_SELF:]}"
                )
            default = signature.parameters[selection].default
            if default is inspect.Parameter.empty:
                default = None
        place = (
            method.positions.get(selection, -1) if isinstance(selection, str) else -1
        )

        @functools.wraps(func)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            asked = kwargs.get("output_hidden_states")
            if request("output_hidden_states", asked) is False:
                if not isinstance(selection, str):
                    kwargs["output_hidden_states"] = selection(self)
                elif 0 <= place < len(args):
                    kwargs["output_hidden_states"] = args[place]
                else:
                    kwargs["output_hidden_states"] = kwargs.get(selection, default)
            return func(self, *args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
