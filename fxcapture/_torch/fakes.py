"""Tensors without data.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["fake_mode", "is_fake", "no_data_errors"]


def fake_mode() -> Any:
    """A mode in which tensors have no data.

    There is no public way to make tensors that know a device but hold nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def no_data_errors() -> tuple[type[Exception], ...]:
    """What a read of a fake tensor's value raises."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


def is_fake(value: Any) -> bool:
    """Whether a tensor is one of those without data that tracers run on.

    Asked where a fake one may come, without importing what makes them.
    """
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(value, module.FakeTensor)
