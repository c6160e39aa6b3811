"""A model run on fake tensors, as a graph of ATen operators with marks.

Terms
    fake model: a copy of the user's model whose parameters have shapes, dtypes and a
        device but no data; nothing is allocated for it, whatever the model's size.

Invariants
    The user's model is neither changed nor run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxcapture import _torch
from fxcapture.errors import CaptureError, FxCaptureError, SpecError, TraceError
from fxcapture.inspect.liveness import PATH
from fxcapture.reductions import bind_inputs
from fxcapture.trace.mark import emit_mark
from fxcapture.trace.scope import Saved, enter, leave, way_to
from fxcapture.trace.signature import has_forward

__all__ = ["Fakes", "trace"]


class Fakes:
    """Makes fake copies: same shape, stride, dtype; no data.

    Args:
        device: Where they pretend to be; ``None`` for where the original is.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.mode = _torch.fake_mode()
        self._device = None if device is None else torch.device(device)
        kind = None if self._device is None else self._device.type
        if kind == "cuda" and torch.version.cuda is None:
            raise SpecError(
                f"device={str(device)!r} cannot be imitated",
                why="this build of torch has no CUDA",
                remedy="drop device=, or use a build of torch with CUDA",
            )

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A fake of one tensor; a parameter's is a parameter."""
        device = self._device or value.device
        if device.type == "meta":
            device = torch.device("cpu")
        with self.mode:
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, requires_grad=value.requires_grad)
        return made

    def model(self, model: nn.Module) -> nn.Module:
        """A fake model; shared parameters stay shared."""
        memo: dict[int, Any] = {}
        for module in model.modules():
            own = module.__dict__
            for group in (own["_parameters"], own["_buffers"], own):
                for value in group.values():
                    if isinstance(value, torch.Tensor) and id(value) not in memo:
                        memo[id(value)] = self.tensor(value)
        try:
            shadow = copy.deepcopy(model, memo)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied for an estimate",
                why=f"{type(error).__name__}: {error}",
                remedy="build a fresh model, on the meta device, and estimate that",
            ) from error
        for path, module in shadow.named_modules():
            if has_forward(module) and not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = _labelled(module.forward, path)
        return shadow

    def value(self, value: Any) -> Any:
        """Any argument, with its tensors replaced."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.value, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.value, value))
        if isinstance(value, dict):
            return {k: self.value(v) for k, v in value.items()}
        return value


def _labelled(forward: Callable[..., Any], path: str) -> Callable[..., Any]:
    """``forward``, whose graph nodes say which module they belong to."""

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with fx.traceback.annotate({PATH: path}):
            return forward(*args, **kwargs)

    return labelled


def trace(
    model: nn.Module,
    fakes: Fakes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Any,
    reducers: Any,
    inputs_of: Callable[..., dict[str, Any]] | None = None,
) -> fx.GraphModule:
    """The fake model's run as a graph of ATen operators with marks.

    Args:
        model: A fake model.
        fakes: What made it.
        args: Positional arguments, real or fake.
        kwargs: Keyword arguments.
        targets: What emits marks.
        reducers: Record name to its reduction.
        inputs_of: Gives what the reductions read of a call's arguments, by name.

    Raises:
        TraceError: the model reads values of tensors, which fake ones do not have.
    """
    args, kwargs = fakes.value(args), fakes.value(kwargs)
    flat, rebuild = _torch.flatten_arguments(args, kwargs)
    steps = way_to(model, targets, by_dynamo=False)

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        call_args, call_kwargs = rebuild(inputs)
        named = inputs_of(call_args, call_kwargs) if inputs_of else {}
        saved = Saved([], [])
        try:
            enter(
                model,
                steps,
                emit_mark,
                bind_inputs(reducers, named),
                True,
                saved,
                listens=True,
            )
            output = model(*call_args, **call_kwargs)
        finally:
            leave(saved)
        return list(_tensors(output))

    try:
        with torch.no_grad(), fakes.mode, fx.traceback.preserve_node_meta():
            return _torch.make_aten_graph(run, flat)
    except FxCaptureError:
        raise
    except _torch.no_data_errors() as error:
        raise TraceError(
            f"{type(model).__name__} reads the value of a tensor, so that its cost "
            "depends on the data",
            why=f"{type(error).__name__}: {error}".strip().replace("\n", "\n    "),
            remedy="estimate the part of the model that does not, or measure a run",
        ) from error


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors that an output holds, also inside objects such as a cache."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, depth)
    elif depth < 4 and not isinstance(value, (type, nn.Module)):
        for item in getattr(value, "__dict__", {}).values():
            yield from _tensors(item, depth + 1)
