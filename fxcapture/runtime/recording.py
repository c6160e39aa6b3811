"""A time in which every call of a model runs its captured program.

Terms
    recording: such a time, in one thread.
    step: one forward of a loop that calls the model again and again.
    phase: ``"prefill"`` for a forward whose cache is empty, ``"decode"`` for one that
        finds something in it.

Invariants
    The open recordings are a context variable: each thread and each task has its own,
    and a call is kept by the innermost one of its model.
    While a recording is open, an override stands in the model's instance, under what a
    call goes through.  Dynamo does not look there, unless the model itself is tapped or
    hooked: calls in recordings then have a trace of their own, one for all of them.
    The override is gone afterwards, also after an exception; one that an interrupt has
    left there lets every call pass, and goes with the next one.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import torch
from torch import nn

from fxcapture import _torch
from fxcapture.errors import SpecTypeError
from fxcapture.plan.records import Records
from fxcapture.runtime.call import call_in_flight
from fxcapture.runtime.call_arguments import cache_of, length_of, shapes_of
from fxcapture.runtime.joined_steps import join_steps
from fxcapture.trace.method_entry import MethodEntry
from fxcapture.trace.override import Override

__all__ = ["CallRecording", "Keep", "RecordedCall", "recording_of", "taken_by"]

Keep = Literal["last"] | int | Callable[["RecordedCall"], Any] | None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One forward of a recording.

    Attributes:
        records: What was captured.
        phase: ``"prefill"`` or ``"decode"`` where the call has a cache, else ``None``.
        step: Its number in its loop, from 0; a prefill starts a new one.
        shapes: Argument name to the shape of the tensor that was passed.
        past: How many positions the cache held before; ``None`` if the call has none,
            or if asking would have made the host wait for the device.
    """

    records: Records
    phase: Literal["prefill", "decode"] | None
    step: int
    shapes: Mapping[str, torch.Size]
    past: int | None


@final
class CallRecording:
    """The calls of a model in a ``with`` block.

    Made by :meth:`CapturedModule.recording`.

    Attributes:
        calls: One entry for each forward, in order, as far as ``keep`` lets them stay.
    """

    def __init__(self, captured: Any, keep: Keep) -> None:
        self.calls: list[RecordedCall] = []
        self._keep = _checked(keep)
        self._captured = captured
        self._model, _, self._program = captured._fxc_parts()
        self.place = _place_of(self._model)
        if not self._program.keep_output:
            raise SpecTypeError(
                "a model without its output cannot be recorded",
                why="whoever calls it in the recording needs what it returns",
                remedy="compile it without keep_output=False",
            )
        self._overrides: list[Override] = []
        self._is_open = False
        self._taken = 0
        self._step = 0
        self._cache: Any = None

    def joined(self, beam_indices: torch.Tensor | None = None) -> Records:
        """The steps of the latest generation, as one tensor for each entry.

        Args:
            beam_indices: For beam search, what ``generate`` returns by that name, with
                ``return_dict_in_generate=True``: each row then follows the beams that
                its sequence came from.  Positions after its end are zero.

        Returns:
            Records of tensors (batch, positions, ...): those of the prompt and of each
            new token but the last, which no forward has seen.  A record without
            positions, as of a reduction, is stacked: (batch, steps, ...).

        Raises:
            CaptureError: nothing was recorded, ``keep`` has let go of a step, or a
                record cannot be joined, as attention weights.
        """
        return join_steps(self.calls, beam_indices)

    def __enter__(self) -> CallRecording:
        if self._is_open:
            raise SpecTypeError(
                "the recording is open already",
                why="it is one time, with one list of calls",
                remedy="call captured.recording() again for another",
            )
        try:
            with _lock:
                self._is_open = True
                for key, method, bind in _entries(*self.place):
                    below: list[Any] = []
                    override = Override(
                        self.place[0], key, method(self, below), {}, bind, below
                    )
                    self._overrides.append(override)
                    override.install()
            _open.set((*_open.get(), self))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._close()
        if error is None and not self._taken:
            warnings.warn(
                f"a recording of {type(self._model).__name__} is over, and the model "
                "was not called in it: what ran may have called its submodules alone "
                "(compile the method: fxcapture.compile(model.method, spec)), have run "
                "in another thread, or be compiled by somebody else "
                "(fxcapture.backend)",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"CallRecording({len(self.calls)} calls)"

    # -- what calls ask ------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured program; what the model returns."""
        return self._captured.forward(*args, **kwargs).output

    def is_in_flight(self) -> bool:
        """Whether the captured program runs, and itself calls the model."""
        call = call_in_flight.get()
        running = (
            call is not None and self._program.owns(call) and call.holder is not None
        )
        return running and call.holder.runs  # type: ignore[union-attr]

    def begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any, Records], None]:
        """A forward is about to run; what takes its output and records."""
        cache = cache_of(self._model, args, kwargs)
        again = cache is not None and cache is self._cache
        past = length_of(cache, again)
        shapes = shapes_of(self._model, args, kwargs)
        self._cache = cache

        def take(output: Any, records: Records) -> None:
            phase: Literal["prefill", "decode"] | None = None
            if cache is not None:
                empty = not again if past is None else past == 0
                phase = "prefill" if empty else "decode"
            elif cache_of(self._model, (), {}, output) is not None:
                phase = "prefill"
            if phase == "prefill":
                self._step = 0
            entry = RecordedCall(
                records=records,
                phase=phase,
                step=self._step,
                shapes=shapes,
                past=0 if phase == "prefill" else past,
            )
            self._step += 1
            self._taken += 1
            if callable(self._keep):
                self._keep(entry)
                return
            self.calls.append(entry)
            if self._keep is not None:
                del self.calls[: -self._keep]

        return take

    def _close(self) -> None:
        self._is_open = False  # from here on the overrides let every call pass
        _open.set(tuple([r for r in _open.get() if r is not self]))
        self.remove()
        self._cache = None

    def remove(self) -> None:
        """Take the overrides away."""
        with _lock:
            for override in reversed(self._overrides):
                override.remove()

    @property
    def is_open(self) -> bool:
        """Whether calls are still to be recorded."""
        return self._is_open


def recording_of(model: nn.Module, name: str = "") -> CallRecording | None:
    """The innermost open recording of a model's calls, or of a method's.

    Only one of this thread.
    """
    for found in reversed(_open.get()):
        if found.place[0] is model and found.place[1] == name and found.is_open:
            return found
    return None


def _place_of(entry: nn.Module) -> tuple[nn.Module, str]:
    """The model, and the method's name; empty where the model itself is called."""
    if isinstance(entry, MethodEntry):
        return entry.fxc_model, entry.fxc_name
    return entry, ""


def taken_by(
    captured: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Any, Records], None] | None:
    """What takes the result of a captured model's call; ``None`` if nothing records."""
    if not _open.get():
        return None
    found = recording_of(*_place_of(captured._fxc_model))
    if found is None or found._captured is not captured:
        return None
    return found.begin(args, kwargs)


_lock = threading.RLock()
_open: contextvars.ContextVar[tuple[CallRecording, ...]] = contextvars.ContextVar(
    "fxcapture_open_recordings", default=()
)

_Method = Callable[[CallRecording, list[Any]], Callable[..., Any]]


def _entries(
    model: nn.Module, name: str
) -> list[tuple[str, _Method, Callable[..., Any]]]:
    """What to override in a model: the key, the method, and how to bind it."""
    if name:
        return [(name, _calling, types.MethodType)]
    in_place = _torch.is_compiled_in_place(model)
    key = "_compiled_call_impl" if in_place else "_call_impl"
    found: list[Any] = [(key, _calling, _torch.out_of_sight)]
    if hasattr(type(model), "get_compiled_call"):
        # transformers compiles the steps of a generation itself, where it thinks that
        # this helps; the captured program is compiled already.
        found.append(("get_compiled_call", _uncompiled, types.MethodType))
    return found


def _calling(recording: CallRecording, below: list[Any]) -> Callable[..., Any]:
    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return below[0](*args, **kwargs)
        if not recording.is_open:
            recording.remove()  # an interrupt has left it here
            return below[0](*args, **kwargs)
        found = recording_of(*recording.place)
        if found is None or found.is_in_flight():
            return below[0](*args, **kwargs)
        return found.call(*args, **kwargs)

    return call


def _uncompiled(recording: CallRecording, below: list[Any]) -> Callable[..., Any]:
    def get_compiled_call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if recording_of(self) is None:
            return below[0](*args, **kwargs)
        return self.__call__

    return get_compiled_call


def _checked(keep: Any) -> Any:
    if keep == "last":
        return 1
    number = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0
    if keep is None or number or callable(keep):
        return keep
    raise SpecTypeError(
        f"keep={keep!r} is not known",
        why="it says which calls stay in the recording",
        remedy='pass "last", a positive number of calls, a function that takes each '
        "call as it comes, or None for all",
    )
