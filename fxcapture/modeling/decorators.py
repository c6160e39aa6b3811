"""Decorators for the authors of model classes.

``capture_outputs`` on a model's ``forward`` collects what the model class declares in
``_can_record_outputs`` and what the caller asks for with ``output_<name>``, puts it
into the returned output object, and honours ``return_dict``.  What happens in one call
is in :mod:`fxcapture.modeling.call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

from fxcapture.modeling.call import CONFIG_DEFAULTS, Method, decorated, named_after
from fxcapture.modeling.positions import warn_cache
from fxcapture.runtime.model_outputs import inject_records
from fxcapture.spec.declaration import OutputRecorder
from fxcapture.spec.declared_spec import declared_spec
from fxcapture.spec.flags import request

__all__ = [
    "OutputRecorder",
    "capture_outputs",
    "convert_outputs",
    "declared_spec",
    "inject_records",
    "merge_with_config_defaults",
    "select_hidden_states",
]

F = TypeVar("F", bound=Callable[..., Any])


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

    For each record the keyword ``output_<record>``, or if that is absent or ``None``
    the attribute of that name of ``self.config``, says what is wanted: everything
    (``True``), nothing (``False``), or positions in the full tuple.  Positions out of
    range select nothing.  The records become fields of the returned object (a mapping
    or a dataclass), as tuples of full length with ``None`` where nothing was selected.

    Recorded tensors are copies, on the device and of the dtype of the model's own, and
    connected to autograd; where autograd records and nothing wrote to the model's own
    tensor in the meantime, it is that tensor itself.

    Args:
        func: The method to decorate.
        tie_last_hidden_states: The last entry of ``hidden_states`` is the output's
            ``last_hidden_state``, behind a final norm.
            ``config.tie_last_hidden_states`` takes precedence.

    Raises:
        SpecTypeError: (at the call) a flag's value is no selection.
        ValueError: (at the call) a negative position, and the config has no layer
            count.
        TypeError: (at the call) records are wanted and the method returned an object
            that cannot hold them.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        method = Method.of(function, tie_last_hidden_states)
        return decorated(function, method, captures=True)

    return decorate if func is None else decorate(func)


def convert_outputs(func: F) -> F:
    """Honour ``return_dict`` around a model that captures, without capturing.

    For a head model that calls a decorated base model: within its call the base model
    returns an output object, whatever the config says.
    """
    return decorated(func, Method.of(func), captures=False)  # type: ignore[return-value]


_STRATEGIES = ("default", "full")


def merge_with_config_defaults(func: F) -> F:
    """Fill arguments that the caller left out, or passed as ``None``, from the config.

    Example::

        @merge_with_config_defaults
        @capture_outputs
        def forward(self, input_ids, use_cache=None, **kwargs): ...

    The arguments are ``use_cache``, ``vision_feature_layer``,
    ``vision_feature_select_strategy`` and ``vision_aspect_ratio``, passed by position
    or by keyword.  ``use_cache`` is off while ``self.gradient_checkpointing`` trains.

    Raises:
        ValueError: (at the call) ``vision_feature_select_strategy`` is unknown.
    """
    method = Method.of(func)

    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        for name in CONFIG_DEFAULTS:
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

    return named_after(func, wrapper)  # type: ignore[return-value]


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

    A caller's own ``output_hidden_states`` takes precedence, unless it asks for
    nothing.

    Args:
        selection: Name of the argument that holds the positions, default included; or a
            function of the model that returns them.

    Raises:
        ValueError: (when decorating) the method has no argument of that name, or cannot
            be handed ``output_hidden_states``.
    """

    def decorate(func: F) -> F:
        method = Method.of(func)
        signature = inspect.signature(func)
        default: Any = None
        if isinstance(selection, str):
            if selection not in signature.parameters:
                raise ValueError(
                    f"select_hidden_states({selection!r}): {func.__qualname__} has no "
                    f"such argument\n  what to do: name one of "
                    f"{list(signature.parameters)[1:]}"
                )
            default = signature.parameters[selection].default
            if default is inspect.Parameter.empty:
                default = None
        place = (
            method.positions.get(selection, -1) if isinstance(selection, str) else -1
        )

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

        return named_after(func, wrapper)  # type: ignore[return-value]

    return decorate
