"""The capture that serves the decorated calls of one model.

Invariants
    It is kept from call to call, and used again only if the model is what it was:
    layers that are appended, swapped, wrapped or re-classed are found, and so are
    changes of what is declared.
    No model is kept alive.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, final

from torch import nn

from fxcapture.runtime.capture import Capture
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.declaration import declaration, declaring, kernels_of
from fxcapture.spec.declared_spec import record_spec
from fxcapture.trace.module_tree import ModuleTree

__all__ = ["Declared", "declared"]


@final
class Declared:
    """Records that a model declares, bound to the model as it is.

    Args:
        model: The model; not kept alive.
        names: The records.

    Attributes:
        spec: What is captured; records without modules left out.
        capture: Serves the calls.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self._tree = ModuleTree(model)
        self._declarations = [
            (weakref.ref(module), dict(declaration(module)))
            for module in declaring(model).values()
        ]
        self._kernels = kernels_of(model)
        self.spec: CaptureSpec = record_spec(model, names)
        self.capture = Capture(model, self.spec, eager=True)

    def holds(self) -> bool:
        """Whether the model is still what it was."""
        return (
            self._tree.is_same()
            and all(
                (module := ref()) is not None and declaration(module) == before
                for ref, before in self._declarations
            )
            and self._kernels.are_same()
        )


_kept: weakref.WeakKeyDictionary[nn.Module, dict[Any, Declared]]
_kept = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def declared(model: nn.Module, names: tuple[str, ...]) -> Declared:
    """The records ``names`` of ``model``, as they are declared now.

    Raises:
        SpecTypeError: a declaration is of no kind that it may be.
    """
    with _lock:
        found = _kept.setdefault(model, {}).get(names)
    if found is None or not found.holds():
        found = Declared(model, names)
        with _lock:
            _kept.setdefault(model, {})[names] = found
    return found
