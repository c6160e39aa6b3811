"""The ways in which a captured model runs, for tests that hold in all of them."""

from __future__ import annotations

from typing import Any

from torch import nn

import fxcapture as fxc

MODES = ("whole", "pieces", "regions")


def compile_in(
    mode: str, model: nn.Module, spec: Any, *, regions: str, backend: str = "aot_eager"
) -> fxc.CapturedModule:
    """A captured model that runs as one graph, in pieces, or by regions."""
    if mode == "whole":
        return fxc.compile(model, spec, backend=backend, fullgraph=True)
    if mode == "regions":
        return fxc.compile(model, spec, backend=backend, regions=regions)
    captured = fxc.compile(model, spec, backend=backend)
    captured._fxc_parts()[2].break_reason = "asked for by the test"
    return captured
