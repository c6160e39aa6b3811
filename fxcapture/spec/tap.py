"""One record's source: which modules, which value of theirs, which positions.

Invariants
    A tap holds no module, tensor or graph node.  It is checked and normalised when it
    is made, and never again; it is frozen and hashable.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, final

import torch

from fxcapture.errors import SpecError, SpecTypeError, nearest
from fxcapture.reductions import Reduction
from fxcapture.spec.attention import Attention
from fxcapture.spec.documents import Reader, shorten
from fxcapture.spec.function import Function, split_target
from fxcapture.spec.positions import Positions, Slice, as_chosen
from fxcapture.spec.recorded import Recorded
from fxcapture.spec.selector import Selector
from fxcapture.spec.stored import Trust, import_name, trusting

__all__ = ["Tap"]

_REDUCTIONS = ("last", "mean")


@final
@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Tap:
    """One record's source: which modules, which value of theirs, which positions.

    Example::

        Tap("layers.*", output=0, select=[0, -2], initial=True)

    Args:
        target: See :mod:`fxcapture.spec.selector` for the grammar.  With a function
            call behind it (``"layers.*.mlp::silu"``, ``"layers.*::add[0]"``), the
            values are what that function returned inside of the module, see
            :mod:`fxcapture.spec.function`.
        function: The same for a class, a predicate or a list:
            ``Tap(LlamaAttention, function="scaled_dot_product_attention")``.
        output: Element of a tuple or list (int), key of a dict, field of a dataclass or
            named tuple (str).  What is not a container is taken whole by 0 alone.
            ``None``: the whole output, its structure kept.  With ``point="input"``: the
            parameter of ``forward`` (or of the function), by position or name, however
            it was passed; ``None`` means the first.
        select: Positions among the ordered hits of the record: int, ints, slice;
            negative from the end; ``None`` all.
        layer_name: With a class, class name or predicate: the trailing path segments
            that a match must end with (``"cross_attn"``).
        point: ``"output"`` or ``"input"``.
        initial: The first hit's first input stands before the outputs, as position 0.
        detach: Cut the record from autograd.
        reduce: ``"last"`` (``h[:, -1]``), ``"mean"`` (mean over dimension 1), one of
            :mod:`fxcapture.reductions`, each applied to every tensor of the value; or
            a traceable callable, which gets the value as it is, a container too.
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
    select: Positions
    point: Literal["output", "input"]
    initial: bool
    detach: bool
    reduce: str | Callable[[torch.Tensor], torch.Tensor] | None
    dtype: torch.dtype | None
    device: torch.device | None
    optional: bool
    attention: Attention | None
    recorded: Recorded | None
    function: Function | None

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
        function: str | Function | None = None,
    ) -> None:
        put = object.__setattr__
        target, written = split_target(target)
        if written is not None and function is not None:
            raise SpecError(
                f"the target names the function '{written}' and function={function!r}",
                remedy="drop one of the two",
            )
        function = written if function is None else Function.of(function)
        put(self, "function", function)
        if layer_name is None and isinstance(target, Selector):
            layer_name = target.layer_name
        put(self, "target", Selector.of(target, layer_name))
        put(self, "output", _check_output(output))
        put(self, "select", as_chosen(select))
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
        if attention is not None and function is not None:
            raise SpecError(
                f"the function '{function}' in a tap for attention weights",
                why="the weights are those of the module's one fused call",
                remedy="name the attention module alone",
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

    @property
    def written(self) -> str:
        """The target in words, its function calls included."""
        if self.function is None:
            return str(self.target)
        return f"{self.target}::{self.function}"

    def to_json(self) -> dict[str, Any]:
        """The tap as JSON values; fields at their default are left out.

        Raises:
            SpecError: a class, predicate or reduction cannot be imported by name.
        """
        out: dict[str, Any] = {"target": self.target.to_json()}
        if self.target.layer_name is not None:
            out["layer_name"] = self.target.layer_name
        if self.function is not None:
            out["function"] = str(self.function)
        if self.output is not None:
            out["output"] = self.output
        if isinstance(self.select, Slice):
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
    def from_json(data: Mapping[str, Any], trust: Iterable[str] | Trust = ()) -> Tap:
        """The tap that :meth:`to_json` wrote.

        Args:
            data: JSON values.
            trust: Modules whose objects the tap may name, as for
                :meth:`CaptureSpec.from_json`; of others nothing is imported.

        Raises:
            SpecError: they are no tap, or name an object that is not trusted.
        """
        reader = Reader(
            data
            if isinstance(data, dict)
            else dict(data)
            if isinstance(data, Mapping)
            else {},
            "",
            f"{shorten(data)} is not a stored tap",
            SpecError,
            "write it with CaptureSpec.to_json",
        )
        if not isinstance(data, Mapping):
            reader.fail(f"it is of type {type(data).__name__}; expected an object")
        fields = dict(reader.data)
        if "target" not in fields:
            reader.fail("KeyError: 'target': the field is missing; expected a target")
        for name in fields:
            if name not in _FIELDS:
                near = nearest(str(name), _FIELDS)
                reader.fail(
                    f"unexpected keyword argument {shorten(name)}: a tap has no such "
                    "field" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        trusted = trusting(trust)
        targets = fields.pop("target")
        if not isinstance(targets, (str, list)):
            reader.wrong("target", targets, "a string or a list")
        target = Selector.from_json(
            [targets] if isinstance(targets, str) else targets, trusted
        )
        if isinstance(fields.get("select"), Mapping):
            fields["select"] = _slice_from_json(fields["select"], reader)
        if isinstance(fields.get("reduce"), Mapping):
            fields["reduce"] = _reduce_from_json(fields["reduce"], trusted, reader)
        if "attention" in fields:
            fields["attention"] = Attention.from_json(fields["attention"])
        if fields.get("dtype") is not None:
            fields["dtype"] = _dtype_from_json(fields["dtype"], reader)
        return Tap(target, **fields)

    def __repr__(self) -> str:
        parts = [str(self.target)]
        if self.target.layer_name is not None:
            parts.append(f"layer_name={self.target.layer_name!r}")
        name = "Tap"
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or value is False or value == "output":
                continue
            if isinstance(value, Attention):
                scores = value.scores
                name = "AttentionScores" if scores else "AttentionWeights"
                parts += value.written()
            else:
                parts.append(f"{field.name}={value!r}")
        return f"{name}({', '.join(parts)})"


_FIELDS = ("layer_name", *(field.name for field in dataclasses.fields(Tap)))


def _slice_from_json(stored: Mapping[str, Any], reader: Reader) -> slice:
    parts = stored.get("slice")
    if len(stored) != 1 or not isinstance(parts, list) or len(parts) != 3:
        reader.wrong("select", stored, 'integers, or {"slice": [start, stop, step]}')
    return slice(*parts)


def _reduce_from_json(stored: Mapping[str, Any], trust: Trust, reader: Reader) -> Any:
    if "kind" in stored:
        return Reduction.from_json(stored)
    if stored.keys() != {"object"}:
        reader.wrong("reduce", stored, 'a name, {"kind": ...} or {"object": ...}')
    return trust.load(stored["object"])


def _dtype_from_json(name: Any, reader: Reader) -> torch.dtype:
    # Not with getattr: torch imports parts of itself for a name that it lacks.
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        reader.fail(
            f"field 'dtype': torch has no attribute {shorten(name)} that is a dtype; "
            "expected a name such as 'bfloat16'"
        )
    return found


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
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(
            f"device={device!r} is not a device",
            why=str(error).splitlines()[0],
            remedy="pass a device such as 'cpu' or torch.device('cuda', 0)",
        ) from error
