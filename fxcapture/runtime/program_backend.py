"""The backend that Dynamo calls with the graphs of one program.

Invariants
    It does not keep its program alive, since Dynamo keeps every backend for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from torch import fx

from fxcapture import passes

__all__ = ["Program", "ProgramBackend", "RunInPieces", "check_whole"]


class Program(Protocol):
    """What a backend asks of its program."""

    def compile_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that Dynamo has traced."""


@final
class ProgramBackend:
    """The Dynamo backend of one program, which Dynamo keeps for ever.

    Args:
        program: Gives the program while it lives; a weak reference.
        inner: The backend that compiles.
    """

    def __init__(
        self, program: Callable[[], Program | None], inner: Callable[..., Any]
    ) -> None:
        self._program = program
        self._inner = inner

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that Dynamo has traced."""
        program = self._program()
        if program is None:
            return self._inner(passes.without_marks(gm), list(example_inputs))
        return program.compile_graph(gm, example_inputs)


def check_whole(gm: fx.GraphModule) -> None:
    """Check that the marks of a whole run tell its calls apart, and its scope ends.

    Raises:
        RunInPieces: they do not, or it does not.
    """
    if passes.reuses_bodies(gm):
        raise RunInPieces(
            "a nested compile region has one body for several calls, in which only "
            "tokens can tell the modules apart"
        )
    if passes.forgets_overrides(gm):
        raise RunInPieces(
            "the graph has a conditional, a loop or another operator with a body, "
            "through which Dynamo cannot trace the undoing of overrides"
        )


class RunInPieces(Exception):  # noqa: N818 - a signal to ourselves
    """A graph that no traced scope can capture: run it with real overrides."""
