"""One override that really stands in an instance, and how several stack.

Invariants
    ``install`` and ``remove`` can be called again after one of them was interrupted
    anywhere; ``remove`` then leaves the instance as it was before ``install``.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, final

from torch import nn

__all__ = ["LOCK", "Override"]


@final
class Override:
    """One override in one instance, and the attributes that its method reads.

    Args:
        module: The instance.
        key: Name of the attribute to override.
        method: A function of the instance; bound here.
        attributes: What to put beside it; ``None`` stands for what was overridden.
        bind: Binds the method to the instance.
        below: Receives what was overridden, for methods that do not read it from the
            instance.
    """

    def __init__(
        self,
        module: nn.Module,
        key: str,
        method: Callable[..., Any],
        attributes: dict[str, Any],
        bind: Callable[..., Any] = types.MethodType,
        below: list[Any] | None = None,
    ) -> None:
        self.module = module
        self.key = key
        self._slot = module.__dict__
        self._wrapper = bind(method, module)
        self._original = below
        self._attributes = attributes
        self._below: tuple[bool, Any] = (False, None)
        self._wanted = False

    def install(self) -> None:
        """Put the override on top of what the instance has."""
        self._wanted = True
        if self._stands():
            return
        present = self.key in self._slot
        self._below = (present, self._slot.get(self.key))
        original = getattr(self.module, self.key)
        if self._original is not None:
            self._original[:] = [original]
        for name, value in self._attributes.items():
            self._slot[name] = original if value is None else value
        _standing[id(self._wrapper)] = self
        self._slot[self.key] = self._wrapper

    def remove(self) -> None:
        """Take it away, with inactive ones below it; later, if another is on top."""
        self._wanted = False
        top = _override_of(self._slot.get(self.key))
        while top is not None and not top._wanted:
            present, value = top._below
            if present:
                self._slot[self.key] = value
            else:
                del self._slot[self.key]
            top._gone()
            top = _override_of(value) if present else None
        if not self._stands():
            self._gone()  # a removal, or an installation, that was cut short

    def _gone(self) -> None:
        _standing.pop(id(self._wrapper), None)
        for name in self._attributes:
            self._slot.pop(name, None)

    def _stands(self) -> bool:
        """Whether it is in the instance, on top or below others."""
        present, value = self.key in self._slot, self._slot.get(self.key)
        while present and value is not self._wrapper:
            over = _override_of(value)
            if over is None:
                return False
            present, value = over._below
        return present


def _override_of(function: Any) -> Override | None:
    """The override whose method a function is."""
    found = _standing.get(id(function))
    return found if found is not None and found._wrapper is function else None


#: Every override that stands, by the identity of its method.  They are kept alive: one
#: that is not on top when its scope has gone is still to be taken away.
_standing: dict[int, Override] = {}

#: Held while overrides are put into instances, or taken away.
LOCK = threading.RLock()
