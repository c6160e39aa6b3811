"""The calls that are in flight.

Terms
    frame: one call of one captured model: its selection, and what it has produced so
        far.  Compiled code finds its frame when it runs; nothing is stored on the model
        or on the compiled program, so that calls do not see each other.

Invariants
    The active frame is a context variable: each thread and each task has its own.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any, final

import torch

from fxcapture.plan import Leaf
from fxcapture.records import Records
from fxcapture.sites import Site

__all__ = ["Event", "Frame", "active_frame"]


@final
@dataclasses.dataclass(slots=True)
class Event:
    """One site and the values it gave, where one graph is not the whole run."""

    site: Site
    tensors: Mapping[Leaf, torch.Tensor]
    sizes: tuple[int, ...]
    entry_sizes: tuple[int, ...]


@final
@dataclasses.dataclass(slots=True)
class Frame:
    """One call in flight.

    Attributes:
        owner: The program that was called; frames of others are not touched.
        selection: Positions that replace the spec's, in canonical form.
        whole: The call runs as one graph, which delivers finished records.
        events: What the call produced so far, in call order, if it is not whole.
        delivered: The finished records, if it is.
        error: An error of ours that has to pass through Dynamo unharmed.
    """

    owner: Any
    selection: tuple[tuple[str, Any], ...]
    whole: bool
    events: list[Event] = dataclasses.field(default_factory=list)
    delivered: Records | None = None
    error: Exception | None = None


active_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar(
    "fxcapture_active_frame", default=None
)
