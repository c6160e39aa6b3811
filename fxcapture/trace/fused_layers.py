"""Whether ``nn.TransformerEncoderLayer`` may skip its submodules while a call runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import final

import torch

from fxcapture.trace.real_scope import Holder, hold_by

__all__ = ["fused_attention"]


@final
class fused_attention:
    """A time in which ``nn.TransformerEncoderLayer`` may use its fused kernel, or not.

    The fused kernel calls none of the layer's submodules, so a capture inside one has
    to do without, as it would with eager hooks.  The flag is one for the process, and
    Dynamo guards on it: it is off for the whole of each call that needs it off.  A call
    that an interrupt has ended does not count: see :class:`Holder`.

    Args:
        allowed: Whether it may.
        depth: How many frames above ``__enter__`` the one is that holds it.
    """

    _lock = threading.Lock()
    _refusals: list[Holder] = []  # noqa: RUF012 - of the process, as the flag is
    _before: bool | None = None

    def __init__(self, allowed: bool, depth: int = 2) -> None:
        self._allowed = allowed
        self._depth = depth
        self._holder: Holder | None = None

    def __enter__(self) -> None:
        if self._allowed and not fused_attention._refusals:
            return
        cls = fused_attention
        with cls._lock:
            cls._refusals[:] = [h for h in cls._refusals if h.runs]
            if not self._allowed:
                if cls._before is None:
                    cls._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                self._holder = hold_by(self._depth)
                cls._refusals.append(self._holder)
            elif not cls._refusals:
                self._restore()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._holder is None:
            return
        cls = fused_attention
        with cls._lock:
            cls._refusals[:] = [h for h in cls._refusals if h is not self._holder]
            if not cls._refusals:
                self._restore()

    @staticmethod
    def _restore() -> None:
        before, fused_attention._before = fused_attention._before, None
        if before is not None:
            torch.backends.mha.set_fastpath_enabled(before)
