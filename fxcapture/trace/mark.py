"""The mark: what a call of a module leaves in a graph.

A *mark* is an operator without outputs.  It stands in a graph where a module call gave
a value, and holds that value; data flow is unchanged.  A pass makes taps of the marks
that are wanted and removes them all.

Each kind of value has a mark of its own:

===================  ===================================================================
``begin``            holds nothing: the call begins here (only where its span is asked)
``returned``         holds nothing: ``forward`` has returned (in the same cases)
``calls``            holds nothing: its structure lists the functions called inside
``named``            no call's: a value that the model's code gives a name, as path
``entry``            what the module received, copied when it was entered
``original``         what the module received, not copied, with the versions that the
                     tensors had then (only outside of graphs, where autograd records)
``reduced NAME``     the result, as the reduction of the record NAME made it
``received NAME``    what the module received, reduced for NAME
``weights NAME``     attention weights for NAME, computed while the call ran
``result``           what ``forward`` returned; ends the call
``hooked``           what forward hooks made of it; ends the call once more
``input NAME``       no call's: an input of the run that a reduction reads later
===================  ===================================================================

Terms
    derived value: a tensor computed for the capture and not by the model: whatever
        stands in a mark that is neither ``result`` nor ``hooked``.

Invariants
    The marks of one call stand together, ``result`` or ``hooked`` last; ``begin`` alone
    stands where the call began.  Each call gives one ``result``, also a call that
    returned no tensor.
    A mark that is executed, and not only traced, reaches the call in flight: Dynamo may
    trace a frame, give up, and run it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fxcapture import _torch

__all__ = [
    "BEGIN",
    "CALLS",
    "ENDS",
    "ENTRY",
    "HOOKED",
    "INPUT",
    "MARK",
    "NAMED",
    "ORIGINAL",
    "RESULT",
    "RETURNED",
    "Emit",
    "Mark",
    "allow_marks",
    "emit_mark",
    "input_named",
    "naming",
    "received",
    "receiver",
    "reduced",
    "weights",
]

BEGIN = "begin"
RETURNED = "returned"
CALLS = "calls"
NAMED = "named"
ENTRY = "entry"
ORIGINAL = "original"
RESULT = "result"
HOOKED = "hooked"
ENDS = (RESULT, HOOKED)
#: What the kind of an input begins with.
INPUT = "input "


def reduced(record: str) -> str:
    """The kind of a result as the reduction of a record made it."""
    return f"reduced {record}"


def received(record: str) -> str:
    """The kind of an argument as the reduction of a record made it."""
    return f"received {record}"


def weights(record: str) -> str:
    """The kind of the attention weights that a record wants."""
    return f"weights {record}"


def input_named(name: str) -> str:
    """The kind of an input that a reduction reads."""
    return INPUT + name


class Mark(NamedTuple):
    """One mark; the fields are the operator's arguments, in their order.

    Attributes:
        token: Stands for the module where one graph serves several of them; the path is
            then that of their group.
        tensors: Tensor leaves of the value; the model's own are not copied.
        sizes: Integer leaves of the value.
        structure: The value's structure, see :mod:`fxcapture.trace.structure`.
        path: The module's path, as the user sees it.
        kind: Which value of the call it is.
    """

    token: Any
    tensors: Sequence[Any]
    sizes: Sequence[Any]
    structure: str
    path: str
    kind: str

    @property
    def ends(self) -> bool:
        """Whether it is the last of its call's marks."""
        return self.kind in ENDS


#: Receives the fields of a :class:`Mark`, in their order.  Not an object, which Dynamo
#: would trace the making of, and the taking apart.
Emit = Callable[..., None]

#: Takes the marks of this thread's call that are executed; ``None`` outside of one.
receiver: ContextVar[Emit | None] = ContextVar("fxcapture_receiver", default=None)

#: Whether this thread traces for a capture whose passes look for names.
naming: ContextVar[bool] = ContextVar("fxcapture_naming", default=False)

# torch.library has no annotations: what is called of it is untyped.
_LIBRARY: Any = torch.library.Library("fxcapture", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "mark(Tensor? token, Tensor[] tensors, SymInt[] sizes, str structure, str path, "
    "str kind) -> ()"
)


def _executed(*fields: Any) -> None:
    """A mark that runs: hand it to the call in flight, if it stands for a module's.

    A mark with a token is of an override that is real, in a frame that Dynamo has
    traced and then not compiled; one without is of a graph that keeps its marks.
    """
    take = receiver.get()
    if take is not None and fields[0] is not None and not _torch.is_fake(fields[0]):
        take(*fields)


def _ignored(*fields: Any) -> None:
    return None


# CompositeExplicitAutograd and not CompositeImplicitAutograd: tracers must see the op.
_LIBRARY.impl("mark", _executed, "CompositeExplicitAutograd")
torch.library.register_fake("fxcapture::mark", _ignored, lib=_LIBRARY)
# Under vmap a mark observes what it would without: it computes nothing.
torch.library.register_vmap(
    "fxcapture::mark", lambda info, in_dims, *args: (None, None), lib=_LIBRARY
)
MARK = torch.ops.fxcapture.mark.default
torch.fx.node.has_side_effect(MARK)


def emit_mark(
    token: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[Any],
    structure: str,
    path: str,
    kind: str,
) -> None:
    """Put a mark into the graph that is being traced.

    In Dynamo's graph it is a call of this function, so that a tensor of any class can
    be marked: a subclass (``DTensor``, a jagged tensor) knows the operators it knows.
    Whoever traces with Dynamo calls ``allow_marks`` first.
    """
    fields = (token, tensors, sizes, structure, path, kind)
    if _torch.is_written_down() and not any(map(_torch.is_subclass, tensors)):
        torch.ops.fxcapture.mark(*fields)
    else:
        _executed(*fields)


torch.fx.node.has_side_effect(emit_mark)


def allow_marks() -> None:
    """Let Dynamo put calls of :func:`emit_mark` into its graphs as they are."""
    torch.compiler.allow_in_graph(emit_mark)  # type: ignore[no-untyped-call]
