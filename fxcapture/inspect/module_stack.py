"""Which module calls an operation of a graph stands in, as its tracer wrote it down."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

__all__ = ["module_paths"]


def module_paths(node: fx.Node) -> Iterator[str]:
    """Paths of the modules in whose call a node was traced, outermost first."""
    for place, *_ in (node.meta.get("nn_module_stack") or {}).values():
        path = re.sub(r"^L\['\w+'\]\.?", "", place)
        yield re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
