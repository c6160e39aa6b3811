"""Activation checkpoints, which run a function once more in backward.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["while_recomputing"]


def while_recomputing(
    key: Any,
    prepare: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]],
) -> None:
    """Hold a context while the checkpoint that this runs in computes anew.

    An activation checkpoint runs its function again in backward, and insists that as
    many tensors are saved as before.  What stood on the modules has gone by then.
    There is no public way to learn of it: of a non-reentrant checkpoint, the hooks for
    saved tensors refer to a record of it, which refers to the function.  A reentrant
    one compares nothing.  (torch 2.13.0 and 2.14.1)

    Args:
        key: The context is held once for each key.
        prepare: Called now, if this is inside such a checkpoint; what it returns makes
            the context.
    """
    if not torch.is_grad_enabled():
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = hooks[0] if hooks else None
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if "frame" not in names:
        return
    frame = pack.__closure__[names.index("frame")].cell_contents
    function = getattr(frame, "recompute_fn", None)
    if function is None:
        return
    held = frame.__dict__.setdefault("fxcapture_held", set())
    if key in held:
        return
    held.add(key)
    context = prepare()

    def recompute(*args: Any) -> Any:
        with context():
            return function(*args)

    frame.recompute_fn = recompute
