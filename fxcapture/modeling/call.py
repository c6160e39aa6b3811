"""One decorated call: flags in, records out.

Terms
    decorated call: one call of a method under ``capture_outputs``.
    request: what a flag asks for, see :mod:`fxcapture.spec.flags`.

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
from typing import Any, NamedTuple, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture._torch.dynamo_for_decorators import outside_dynamo, untraced
from fxcapture.modeling.captures import declared
from fxcapture.modeling.positions import positions_of, warn_count
from fxcapture.modeling.trace import begin, collect, end, goes_by
from fxcapture.plan.resolve import canonical_selection
from fxcapture.runtime.call import eager_call_in_flight
from fxcapture.runtime.model_outputs import (
    get_field,
    has_field,
    inject_records,
    to_tuple,
)
from fxcapture.spec.declaration import CAPTURES, declaration
from fxcapture.spec.flags import Request, flag_name, request, spell
from fxcapture.trace.fused_layers import fused_attention

__all__ = ["CONFIG_DEFAULTS", "Method", "decorated"]

#: Arguments that ``merge_with_config_defaults`` fills from the config.
CONFIG_DEFAULTS = (
    "use_cache",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_aspect_ratio",
)
#: Whether this thread is inside a decorated call; only the outermost one converts.
_inside: ContextVar[bool] = ContextVar("fxcapture_inside", default=False)
_SELF = 1  # positional arguments are counted without ``self``


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """What is known of a decorated function when it is decorated.

    Attributes:
        positions: Parameter name to its place among the positional arguments.
        takes_any: It has ``**kwargs``.
        keywords: Parameters that may be passed by keyword.
        tie: The last hidden state is replaced by the output's ``last_hidden_state``.
        filled: Those of ``CONFIG_DEFAULTS`` that may be passed by position.
    """

    positions: dict[str, int]
    takes_any: bool
    keywords: frozenset[str]
    tie: bool
    filled: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, function: Callable[..., Any], tie: bool = True) -> Method:
        """Look at the signature of ``function``."""
        parameters = list(inspect.signature(function).parameters.values())[_SELF:]
        positions = {
            p.name: i
            for i, p in enumerate(parameters)
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
        return cls(
            positions,
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            frozenset(
                p.name
                for p in parameters
                if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
            ),
            tie,
            tuple((n, positions[n]) for n in CONFIG_DEFAULTS if n in positions),
        )

    def accepts(self, keyword: str) -> bool:
        """Whether ``keyword`` may be passed."""
        return self.takes_any or keyword in self.keywords


def decorated(
    function: Callable[..., Any], method: Method, *, captures: bool
) -> Callable[..., Any]:
    """``function`` with its outputs converted as ``return_dict`` says.

    Args:
        function: The method to wrap.
        method: What is known of it.
        captures: Whether it also collects what its model declares.
    """

    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        own = kwargs.pop("return_dict", None)
        return_dict = getattr(config, "return_dict", None) if own is None else own
        for name, place in method.filled:
            # A decorator outside of this one has filled it in, although it was passed.
            if place < len(args) and name in kwargs:
                value = kwargs.pop(name)
                if args[place] is None:
                    args = (*args[:place], value, *args[place + 1 :])
        wanted: dict[str, Request] = {}
        if captures:
            for name in declaration(self):
                asked = _requested(name, method, config, args, kwargs)
                if asked is not False:
                    wanted[name] = asked
        call = _Call(function, self, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            nested, outputs, records = _call_traced(call, wanted, captures)
        else:
            nested, outputs, records = _call_eager(call, wanted, captures)
        if records:
            outputs = _inject(self, config, method, outputs, records)
        if return_dict is False and not (nested and own is None):
            return to_tuple(outputs)
        return outputs

    made = named_after(function, wrapper)
    if captures:
        setattr(made, CAPTURES, method)
    return made


def named_after(
    function: Callable[..., Any], wrapper: Callable[..., Any]
) -> Callable[..., Any]:
    """``wrapper``, with a code object of its own and the names of ``function``.

    Dynamo guards on the function in its closure: with one code object for all, each
    decorated class would use up the recompile limit of every other.
    """
    made = _torch.own_code(wrapper, f"{function.__module__}.{function.__qualname__}")
    return functools.update_wrapper(made, function)


def _requested(
    name: str,
    method: Method,
    config: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Request:
    """What the call asks of one record; makes ``kwargs`` fit for the forward."""
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


class _Call(NamedTuple):
    """A decorated function with the arguments of one call; Dynamo traces it away."""

    function: Callable[..., Any]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: Record name to its entries.
Entries = dict[str, list[Any]]


@untraced
def _call_eager(
    call: _Call, wanted: dict[str, Request], captures: bool
) -> tuple[bool, Any, Entries]:
    """Whether it stands in another decorated call, what it returned, its records."""
    function, model, args, kwargs = call
    records: Entries = {}
    outer = _inside.set(True)
    try:
        if wanted:
            # Run as it is also where Dynamo has met a graph break in it: what it would
            # compile piece by piece could not be seen.
            outputs, records = outside_dynamo(_capture, call, wanted)
        elif captures and eager_call_in_flight.get() is not None:
            hidden = eager_call_in_flight.set(None)
            try:
                outputs = function(model, *args, **kwargs)
            finally:
                eager_call_in_flight.reset(hidden)
        else:
            outputs = function(model, *args, **kwargs)
    finally:
        _inside.reset(outer)
    return outer.old_value is True, outputs, records


def _capture(call: _Call, wanted: dict[str, Request]) -> tuple[Any, Entries]:
    function, model, args, kwargs = call
    found = declared(model, tuple(wanted))
    capture = found.capture
    positions, promised = positions_of(model, found.spec, wanted)
    selection = canonical_selection(found.spec, positions)
    with (
        fused_attention(not capture.bound.inside_fused),
        capture.call(selection) as running,
    ):
        outputs = function(model, *args, **kwargs)
    values = capture.records(running)
    records = {name: list(values.get(name, ())) for name in wanted}
    _compare(type(model), records, promised)
    return outputs, records


@untraced
def _call_traced(
    call: _Call, wanted: dict[str, Request], captures: bool
) -> tuple[bool, Any, Entries]:
    """The same under Dynamo, in its plainest Python."""
    if not torch.compiler.is_dynamo_compiling():
        # It met a graph break in here, gave up on this call, and runs it as it is.
        return _call_eager(call, wanted, captures)
    function, model, args, kwargs = call
    nested = begin()
    try:
        if wanted:
            run = functools.partial(function, model, *args, **kwargs)
            outputs, records, promised = collect(model, wanted, run)
            _compare(type(model), records, promised)
        else:
            records = {}
            with goes_by(captures):
                outputs = function(model, *args, **kwargs)
    finally:
        end()
    return nested, outputs, records


def _compare(cls: type, records: Entries, promised: dict[str, int]) -> None:
    """Warn where the config has promised another number of entries."""
    for name, expected in promised.items():
        # A record of a part that did not run, such as cross-attention, counts nothing.
        if len(records[name]) not in (0, expected):
            warn_count(cls, name, len(records[name]), expected)


def _inject(
    model: nn.Module,
    config: Any,
    method: Method,
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
