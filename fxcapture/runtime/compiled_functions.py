"""What Dynamo is given of a program: it as one graph, in pieces, and its regions.

Invariants
    They are made together, for one state of the model's hooks, and go together; with
    them goes all that Dynamo has compiled of them.
    No code object is shared with anything else (``_torch.own_code``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import nn

from fxcapture import _torch
from fxcapture.runtime.hook_state import HookState
from fxcapture.runtime.traced import call_function, call_model

__all__ = ["CompiledFunctions"]


@final
class CompiledFunctions:
    """The compiled functions of a program.

    Args:
        model: The model.
        name: The program's, which the names of code objects are made of.
        whole: The function that is traced as one graph.
        backend: A Dynamo backend.
        fullgraph: Whether pieces may not be several; with regions, whether each may.
        regional: Whether regions were asked for.
        settings: Further keywords of ``torch.compile``.

    Attributes:
        hooks: The hooks that are compiled in.
        whole: Runs the model as one graph, or raises.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        whole: Callable[..., Any],
        *,
        backend: Callable[..., Any],
        fullgraph: bool,
        regional: bool,
        settings: Mapping[str, Any],
    ) -> None:
        self.hooks = HookState.of(model)
        self.whole = _torch.Compiled(
            _torch.own_code(whole, f"captured_{name}"),
            backend=backend,
            fullgraph=True,
            **settings,
        )
        settings = {**settings, "isolate_recompiles": True}
        self._name = name
        self._pieces = _torch.Compiled(
            _torch.own_code(call_model, f"pieces_of_{name}"),
            backend=backend,
            fullgraph=fullgraph and not regional,
            **settings,
        )
        self._regions: dict[type, Callable[..., Any]] = {}
        self._region_settings: dict[str, Any] = {
            "backend": backend,
            "fullgraph": fullgraph and regional,
            **settings,
        }

    def guarded(self) -> contextlib.AbstractContextManager[Any]:
        """To be held by a run in pieces, or by regions.

        There one code serves all modules of a kind, of which some may have hooks.
        """
        if self.hooks.tables:
            return _torch.hook_guards()
        return contextlib.nullcontext()

    def pieces(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model, whose overrides stand, in as many graphs as it takes."""
        return self._pieces(model, args, kwargs)

    def region(
        self, kind: type, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module as a region: one compilation for all modules of its class."""
        compiled = self._regions.get(kind)
        if compiled is None:
            # A code object for each class, so that a model of many kinds of blocks does
            # not run into the recompile limit, which counts by code object.
            name = f"region_{kind.__name__}_of_{self._name}"
            compiled = _torch.Compiled(
                _torch.own_code(call_function, name), **self._region_settings
            )
            self._regions[kind] = compiled
        return compiled(below, args, kwargs)
