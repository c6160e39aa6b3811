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

from fxcapture import _compat
from fxcapture.errors import CaptureError, FxCaptureError, SpecError, TraceError
from fxcapture.liveness import PATH
from fxcapture.mark import emit_mark, enter, has_forward, leave
from fxcapture.passes import collect_marks
from fxcapture.plan import match
from fxcapture.sites import SiteTable
from fxcapture.spec import CaptureSpec, Tap

__all__ = ["Fakes", "survey", "trace"]


class Fakes:
    """Makes fake copies: same shape, stride, dtype; no data.

    Args:
        device: Where they pretend to be; ``None`` for where the original is.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.mode = _compat.fake_mode()
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
) -> fx.GraphModule:
    """The fake model's run as a graph of ATen operators with marks."""
    args, kwargs = fakes.value(args), fakes.value(kwargs)
    flat, rebuild = _compat.flatten_arguments(args, kwargs)

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        call_args, call_kwargs = rebuild(inputs)
        saved = enter(model, targets, emit_mark, reducers)
        try:
            output = model(*call_args, **call_kwargs)
        finally:
            leave(model, saved)
        return list(_tensors(output))

    try:
        with torch.no_grad(), fakes.mode, fx.traceback.preserve_node_meta():
            return _compat.make_aten_graph(run, flat)
    except FxCaptureError:
        raise
    except _compat.no_data_errors() as error:
        raise TraceError(
            f"{type(model).__name__} reads the value of a tensor, so that its cost "
            "depends on the data",
            why=f"{type(error).__name__}: {error}".strip().replace("\n", "\n    "),
            remedy="estimate the part of the model that does not, or measure a run",
        ) from error


def survey(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SiteTable:
    """Every call of every submodule in one run, on fake tensors.

    Raises:
        TraceError: the model reads values of tensors, which fake ones do not have.
        CaptureError: the model cannot be copied.
    """
    fakes = Fakes(None)
    shadow = fakes.model(model)
    bound = match(CaptureSpec({"all": Tap("re:.*", optional=True)}), shadow)
    graph = trace(shadow, fakes, args, dict(kwargs), bound.targets, {})
    return collect_marks(graph, graph=0, classes=bound.classes).sites


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
