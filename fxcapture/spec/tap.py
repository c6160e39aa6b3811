"""What a user asks for: taps under record names.

Invariants
    A spec holds no module, tensor or graph node.  It is checked and normalised when it
    is made, and never again; it is frozen and hashable, so compiled programs can be
    cached by it.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, final

import torch

from fxcapture.errors import RecordNameError, SpecError, SpecTypeError
from fxcapture.reductions import Reduction
from fxcapture.spec.attention import Attention
from fxcapture.spec.recorded import Recorded
from fxcapture.spec.selector import Selector, import_name, import_object

__all__ = ["CaptureSpec", "Selection", "Tap", "normalise_select"]

#: Positions in frozen form: ``None`` all, a tuple of ints, or a slice.
Selection = tuple[int, ...] | slice | None

_REDUCTIONS = ("last", "mean")
_FORMAT = 1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Slice:
    """A slice that can be hashed (``slice`` itself cannot before Python 3.12)."""

    start: int | None
    stop: int | None
    step: int | None

    def indices(self, length: int) -> range:
        return range(*slice(self.start, self.stop, self.step).indices(length))


def normalise_select(
    select: Any, name: str = "select"
) -> tuple[int, ...] | _Slice | None:
    """Positions as a sorted, duplicate-free tuple, a slice, or ``None`` for all.

    Args:
        select: An int, an iterable of ints, a slice, or ``None``.  Anything with
            ``__index__`` counts as an int, bools included.
        name: What to call it in the error.

    Raises:
        SpecTypeError: it is something else.
    """
    if select is None or isinstance(select, _Slice):
        return select
    if isinstance(select, slice):
        parts = [
            None if p is None else operator.index(p)
            for p in (select.start, select.stop, select.step)
        ]
        if parts[2] == 0:
            raise SpecError(
                f"{name}={select!r} has a step of zero", remedy="drop the step"
            )
        return _Slice(*parts)
    if isinstance(select, (str, bytes, bool, Mapping)):
        raise _bad_select(select, select, name)
    try:
        return (operator.index(select),)
    except TypeError:
        pass
    try:
        items = list(select)
    except TypeError:
        raise _bad_select(select, select, name) from None
    positions = set()
    for item in items:
        try:
            positions.add(operator.index(item))
        except TypeError:
            raise _bad_select(select, item, name) from None
    return tuple(sorted(positions))


def _bad_select(select: Any, item: Any, name: str) -> SpecTypeError:
    why = "" if item is select else f"{item!r} is of type {type(item).__name__}"
    return SpecTypeError(
        f"{name}={select!r} is not a selection",
        why=why or f"it is of type {type(select).__name__}",
        remedy="pass an int, a list of ints, a slice, or None for all",
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Tap:
    """One record's source: which modules, which value of theirs, which positions.

    Example::

        Tap("layers.*", output=0, select=[0, -2], initial=True)

    Args:
        target: See :mod:`fxcapture.spec.selector` for the grammar.
        output: Element of a tuple or list (int), key of a dict, field of a dataclass or
            named tuple (str).  What is not a container is taken whole by 0 alone.
            ``None``: the whole output, its structure kept.  With ``point="input"``: the
            parameter of ``forward``, by position or name, however it was passed;
            ``None`` means the first.
        select: Positions among the ordered hits of the record: int, ints, slice;
            negative from the end; ``None`` all.
        layer_name: With a class, class name or predicate: the trailing path segments
            that a match must end with (``"cross_attn"``).
        point: ``"output"`` or ``"input"``.
        initial: The first hit's first input stands before the outputs, as position 0.
        detach: Cut the record from autograd.
        reduce: ``"last"`` (``h[:, -1]``), ``"mean"`` (mean over dimension 1), one of
            :mod:`fxcapture.reductions`, or a traceable callable tensor -> tensor,
            applied to each tensor of the value.
        dtype: Cast floating-point tensors to it.
        device: Move tensors to it.
        optional: A target without a match, a position that does not exist and a module
            that is not called yield nothing instead of an error.
        attention: Record the weights of the fused attention call that the module makes,
            see :func:`fxcapture.AttentionWeights`.
        recorded: For this package alone: what a model's own declaration takes of each
            module, in place of ``output``; with ``attention``, the weights stand where
            that is ``None``.

    Raises:
        SpecError: a field's value is malformed.
        SpecTypeError: a field is of the wrong type.
    """

    target: Selector
    output: int | str | None
    select: tuple[int, ...] | _Slice | None
    point: Literal["output", "input"]
    initial: bool
    detach: bool
    reduce: str | Callable[[torch.Tensor], torch.Tensor] | None
    dtype: torch.dtype | None
    device: torch.device | None
    optional: bool
    attention: Attention | None
    recorded: Recorded | None

    def __init__(
        self,
        target: Any,
        *,
        output: int | str | None = None,
        select: Any = None,
        layer_name: str | None = None,
        point: Literal["output", "input"] = "output",
        initial: bool = False,
        detach: bool = False,
        reduce: str | Callable[[torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        optional: bool = False,
        attention: Attention | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        put = object.__setattr__
        if layer_name is None and isinstance(target, Selector):
            layer_name = target.layer_name
        put(self, "target", Selector.of(target, layer_name))
        put(self, "output", _check_output(output))
        put(self, "select", normalise_select(select))
        if point not in ("output", "input"):
            raise SpecError(
                f"point={point!r} is not a point",
                remedy="pass point='output' or point='input'",
            )
        put(self, "point", point)
        for name, value in (
            ("initial", initial),
            ("detach", detach),
            ("optional", optional),
        ):
            if not isinstance(value, bool):
                raise SpecTypeError(
                    f"{name}={value!r} is not a bool", remedy="pass True or False"
                )
            put(self, name, value)
        if initial and point == "input":
            raise SpecError(
                "initial=True with point='input' asks for the first input twice",
                remedy="drop one of the two",
            )
        put(self, "reduce", _check_reduce(reduce))
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise SpecTypeError(
                f"dtype={dtype!r} is not a torch.dtype",
                remedy="pass a dtype such as torch.bfloat16",
            )
        put(self, "dtype", dtype)
        put(self, "device", _check_device(device))
        if attention is not None and (
            initial or point == "input" or output is not None
        ):
            raise SpecError(
                "attention= with output=, point= or initial=",
                why="the weights are no part of what the module returns or receives",
                remedy="use one tap for the weights and one for the value",
            )
        put(self, "attention", attention)
        if recorded is not None and not isinstance(recorded, Recorded):
            raise SpecTypeError(
                f"recorded={recorded!r} is no part of a tap that users make",
                remedy="leave it out",
            )
        put(self, "recorded", recorded)

    def with_select(self, select: Any) -> Tap:
        """A copy with other positions."""
        fields: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
        }
        return Tap(**(fields | {"select": select}))

    def to_json(self) -> dict[str, Any]:
        """The tap as JSON values; fields at their default are left out.

        Raises:
            SpecError: a class, predicate or reduction cannot be imported by name.
        """
        out: dict[str, Any] = {"target": self.target.to_json()}
        if self.target.layer_name is not None:
            out["layer_name"] = self.target.layer_name
        if self.output is not None:
            out["output"] = self.output
        if isinstance(self.select, _Slice):
            out["select"] = {"slice": list(dataclasses.astuple(self.select))}
        elif self.select is not None:
            out["select"] = list(self.select)
        if self.point != "output":
            out["point"] = self.point
        for name in ("initial", "detach", "optional"):
            if getattr(self, name):
                out[name] = True
        if isinstance(self.reduce, str):
            out["reduce"] = self.reduce
        elif isinstance(self.reduce, Reduction):
            out["reduce"] = self.reduce.to_json()
        elif self.reduce is not None:
            out["reduce"] = {"object": import_name(self.reduce)}
        if self.dtype is not None:
            out["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.device is not None:
            out["device"] = str(self.device)
        if self.attention is not None:
            out["attention"] = self.attention.to_json()
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Tap:
        """The tap that :meth:`to_json` wrote."""
        fields = dict(data)
        try:
            targets = fields.pop("target")
            targets = [targets] if isinstance(targets, str) else targets
            target = Selector.from_json(targets)
            if isinstance(fields.get("select"), Mapping):
                fields["select"] = slice(*fields["select"]["slice"])
            if isinstance(fields.get("reduce"), Mapping):
                stored = fields["reduce"]
                fields["reduce"] = (
                    Reduction(**stored)
                    if "kind" in stored
                    else import_object(stored["object"])
                )
            if "attention" in fields:
                fields["attention"] = Attention.from_json(fields["attention"])
            if "dtype" in fields:
                fields["dtype"] = getattr(torch, fields["dtype"])
            return Tap(target, **fields)
        except SpecError:
            raise  # a SpecTypeError is a TypeError too
        except (KeyError, AttributeError, ImportError, TypeError) as error:
            raise SpecError(
                f"{data!r} is not a stored tap",
                why=f"{type(error).__name__}: {error}",
                remedy="write it with CaptureSpec.to_json",
            ) from error

    def __repr__(self) -> str:
        parts = [str(self.target)]
        if self.target.layer_name is not None:
            parts.append(f"layer_name={self.target.layer_name!r}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or value is False or value == "output":
                continue
            if isinstance(value, tuple):
                value = list(value)
            parts.append(f"{field.name}={value!r}")
        return f"Tap({', '.join(parts)})"


def _check_output(output: Any) -> int | str | None:
    if output is None or isinstance(output, str):
        return output
    if isinstance(output, bool):
        raise SpecTypeError(
            f"output={output!r} is a bool", remedy="pass an int, a str or None"
        )
    try:
        return operator.index(output)
    except TypeError:
        raise SpecTypeError(
            f"output={output!r} is of type {type(output).__name__}",
            remedy="pass a position (int), a key or field name (str), or None",
        ) from None


def _check_reduce(reduce: Any) -> Any:
    if reduce is None or callable(reduce):
        return reduce
    if reduce in _REDUCTIONS:
        return reduce
    raise SpecError(
        f"reduce={reduce!r} is not a reduction",
        nearest=[repr(r) for r in _REDUCTIONS],
        remedy="pass 'last', 'mean', one of fxcapture.reductions, or a "
        "callable tensor -> tensor",
    )


def _check_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(
            f"device={device!r} is not a device",
            why=str(error).splitlines()[0],
            remedy="pass a device such as 'cpu' or torch.device('cuda', 0)",
        ) from error


@final
class CaptureSpec(Mapping[str, Tap]):
    """Taps under record names; frozen, hashable, and to and from JSON.

    Example::

        CaptureSpec({
            "hidden_states": Tap("layers.*", output=0, select=[0, -2], initial=True),
            "attentions": Tap(LlamaAttention, output=1),
        })

    Args:
        taps: A mapping, or pairs, of record name to :class:`Tap`.  A target alone (a
            path, glob or class) stands for ``Tap(target)``.

    Raises:
        RecordNameError: two names are equal, or differ only in characters that an
            exported program's output names cannot have.
        SpecTypeError: a name is not a string, or a value is not a tap.
    """

    __slots__ = ("_hash", "_taps")

    def __init__(
        self, taps: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
    ) -> None:
        if isinstance(taps, (str, Tap)) or callable(taps):
            raise SpecTypeError(
                f"a spec cannot be made of {taps!r}",
                remedy='name the record: CaptureSpec({"hidden_states": Tap(...)})',
            )
        pairs = taps.items() if isinstance(taps, Mapping) else taps
        made: dict[str, Tap] = {}
        plain: dict[str, str] = {}
        for name, tap in pairs:
            if not isinstance(name, str) or not name.strip():
                raise SpecTypeError(
                    f"record name {name!r} is not a name",
                    remedy="use a non-empty string",
                )
            key = re.sub(r"\W", "_", name)
            if key in plain:
                raise RecordNameError(
                    f"record names {plain[key]!r} and {name!r} collide",
                    why="they are equal"
                    if plain[key] == name
                    else f"an exported program would call both {key!r}",
                    remedy="give one of them another name",
                )
            plain[key] = name
            made[name] = tap if isinstance(tap, Tap) else Tap(tap)
        self._taps = made
        self._hash = hash(tuple(made.items()))

    def __getitem__(self, name: str) -> Tap:
        return self._taps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CaptureSpec):
            return NotImplemented
        return list(self._taps.items()) == list(other._taps.items())

    def __repr__(self) -> str:
        inner = ", ".join(f"{n!r}: {t!r}" for n, t in self._taps.items())
        return f"CaptureSpec({{{inner}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CaptureSpec, (tuple(self._taps.items()),)

    def to_json(self) -> str:
        """The spec as a JSON document.

        Raises:
            SpecError: a class, predicate or reduction cannot be imported by name.
        """
        taps = {name: tap.to_json() for name, tap in self._taps.items()}
        return json.dumps({"format": _FORMAT, "taps": taps}, indent=2)

    @staticmethod
    def from_json(text: str) -> CaptureSpec:
        """The spec that :meth:`to_json` wrote.

        Raises:
            SpecError: the text is not such a document.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise SpecError(
                    f"spec format {data['format']!r} is not known",
                    remedy=f"this version reads format {_FORMAT}",
                )
            pairs = data["taps"].items()
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                "the text is not a stored spec",
                why=f"{type(error).__name__}: {error}",
                remedy="write it with CaptureSpec.to_json",
            ) from error
        return CaptureSpec([(name, Tap.from_json(tap)) for name, tap in pairs])
