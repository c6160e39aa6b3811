"""Whether ``nn.TransformerEncoderLayer`` may skip its submodules while a call runs."""

from __future__ import annotations

import threading
from typing import final

import torch

__all__ = ["fused_attention"]


@final
class fused_attention:
    """A time in which ``nn.TransformerEncoderLayer`` may use its fused kernel, or not.

    The fused kernel calls none of the layer's submodules, so a capture inside one has
    to do without, as it would with eager hooks.  The flag is one for the process, and
    Dynamo guards on it: it is off for the whole of each call that needs it off.
    """

    _lock = threading.Lock()
    _refusals = 0
    _before = True

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed

    def __enter__(self) -> None:
        if self._allowed:
            return
        cls = fused_attention
        with cls._lock:
            if cls._refusals == 0:
                cls._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            cls._refusals += 1

    def __exit__(self, *exc: object) -> None:
        if self._allowed:
            return
        cls = fused_attention
        with cls._lock:
            cls._refusals -= 1
            if cls._refusals == 0:
                torch.backends.mha.set_fastpath_enabled(cls._before)
