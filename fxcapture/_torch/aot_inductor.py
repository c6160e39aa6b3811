"""Packages compiled ahead of time.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

__all__ = ["aoti_load", "aoti_package"]


def aoti_package(
    program: Any, path: str, configs: dict[str, Any], metadata: dict[str, str]
) -> str:
    """Compile an exported program ahead of time; ``metadata`` travels with it.

    AOTInductor has no public module; ``torch._inductor`` is where its documentation
    points.
    """
    from torch._inductor import aoti_compile_and_package

    known = dict(configs.get("aot_inductor.metadata", {}))
    configs = {**configs, "aot_inductor.metadata": {**known, **metadata}}
    return str(
        aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
    )


def aoti_load(path: str) -> tuple[Any, dict[str, str]]:
    """A compiled package as a callable, and the metadata that travelled with it."""
    from torch._inductor import aoti_load_package

    loaded = aoti_load_package(path)
    return loaded, dict(loaded.loader.get_metadata())
