"""The state of a torch.nn.Module that has no public name.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

__all__ = [
    "call_uncompiled",
    "has_forward_hooks",
    "has_forward_pre_hooks",
    "has_hooks",
    "hook_guards",
    "hook_tables",
    "hooks_made",
    "is_compiled_in_place",
    "is_initialised",
    "out_of_sight",
    "override_states",
    "share_tables",
    "unwrap_optimized",
]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs between ``forward`` and its caller; no public way."""
    return bool(module._forward_hooks or torch.nn.modules.module._global_forward_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does anything but call its ``forward``."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(own) or bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Whether something runs between the module's caller and ``forward``."""
    return bool(
        module._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks
    )


def hooks_made() -> int:
    """How many hooks of any kind were made in the process, those removed included."""
    return torch.utils.hooks.RemovableHandle.next_id


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def hook_tables(model: nn.Module) -> Iterator[Mapping[int, Any]]:
    """What holds hooks that calls of a model go through, and holds any.

    The tables of its modules, and those of hooks for all modules; no public way.
    """
    found = [vars(nn.modules.module)[name] for name in _GLOBAL_HOOKS]
    for module in model.modules():
        own = vars(module)
        found += [own[name] for name in _HOOKS if name in own]
    return filter(None, found)


def hook_guards() -> contextlib.AbstractContextManager[Any]:
    """While it is held, Dynamo guards on the hooks of what this thread compiles.

    By default it does not, and code that it compiled for a module without hooks would
    serve another instance of the class, which has some.
    """
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # type: ignore[no-any-return,no-untyped-call]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called on it."""
    return module._compiled_call_impl is not None


def override_states(modules: Sequence[nn.Module]) -> list[tuple[bool, bool]]:
    """What decides how modules have to be overridden: hooked, compiled in place."""
    hooked = bool(torch.nn.modules.module._global_forward_hooks)
    return [
        (hooked or bool(m._forward_hooks), is_compiled_in_place(m)) for m in modules
    ]


def share_tables(module: nn.Module, model: nn.Module) -> None:
    """Give a module the very parameters, buffers and submodules of another.

    The dictionaries themselves: names have no prefix, and who swaps a parameter in one
    (``torch.func.functional_call``) swaps the other's.
    """
    for name in (
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
        "_modules",
    ):
        module.__dict__[name] = model.__dict__[name]


def unwrap_optimized(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wrapped; others as they are.

    ``OptimizedModule`` documents no public attribute for what it wraps.
    """
    while "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def is_initialised(model: nn.Module) -> bool:
    """Whether no module of a model waits for its first call to learn its shapes."""
    lazy = nn.modules.lazy.LazyModuleMixin
    return not any(
        isinstance(module, lazy) and module.has_uninitialized_params()  # type: ignore[no-untyped-call]
        for module in model.modules()
    )


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module that was compiled in place as if it had not been."""
    call: Any = module._call_impl
    return call(*args, **kwargs)


@final
class out_of_sight:
    """A bound method for what a module is called through; Dynamo takes it for torch's.

    In the instance's ``__dict__`` under ``_call_impl`` or ``_compiled_call_impl`` it
    serves every call that runs as it is.  Dynamo asks only whether the method's
    function is torch's own, and then goes straight to the class's ``forward``; it puts
    no guard on these names.

    Args:
        method: A function of the instance.
        module: The instance.
    """

    __slots__ = ("__func__", "_method", "_module")

    def __init__(self, method: Callable[..., Any], module: nn.Module) -> None:
        self.__func__ = nn.Module._call_impl
        self._method = method
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._module, *args, **kwargs)
