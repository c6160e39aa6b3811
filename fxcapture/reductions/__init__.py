"""What a tap can make of a tensor before anything of it is kept.

Example::

    Tap("layers.*", reduce=reductions.mean(mask="attention_mask"))
    Tap("layers.*", reduce=reductions.gather("positions"))
    Tap("lm_head", reduce=reductions.topk(5))

    captured(ids, attention_mask=mask, capture_inputs={"positions": positions})

Terms
    input of a reduction: a tensor that the call supplies under a name: an argument of
        the model, or an entry of ``capture_inputs`` that the model does not see.

Invariants
    A reduction is frozen, hashable and to and from JSON.  It runs inside the graph, at
    the tap, so that the unreduced tensor lives no longer than the model needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import torch

from fxcapture.errors import SpecError, SpecTypeError, nearest

__all__ = ["Reducers", "Reduction", "bind_inputs", "gather", "last", "mean", "topk"]

_KINDS = ("last", "mean", "topk", "gather")
_PARTS = ("values", "indices")
_MAX_INT = 2**63 - 1

Reducers = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A named reduction; made by the functions of this module.

    Attributes:
        kind: Which one.
        source: Name of its input; ``None`` if it has none.
        k: Number of values of ``topk``.
        dim: Dimension of ``topk``.
        part: ``topk``: the values or their indices.
    """

    kind: Literal["last", "mean", "topk", "gather"]
    source: str | None = None
    k: int = 0
    dim: int = -1
    part: Literal["values", "indices"] = "values"

    def __post_init__(self) -> None:
        _check_member("Reduction", "kind", self.kind, _KINDS)
        _name(self.source, "source")
        if self.kind == "gather" and self.source is None:
            raise SpecTypeError("gather(None) names no input", remedy="pass its name")
        if self.kind != "topk":
            if (self.k, self.dim, self.part) != (0, -1, "values"):
                raise SpecError(
                    f"{self.kind} takes no k, dim or part",
                    remedy="leave them out; they are topk's",
                )
            return
        if self.source is not None:
            raise SpecError(
                f"topk(source={self.source!r}) takes no input", remedy="leave it out"
            )
        if type(self.k) is not int or not 0 < self.k <= _MAX_INT:
            raise SpecError(
                f"topk(k={self.k!r}) is not a count", remedy="pass an int above zero"
            )
        if type(self.dim) is not int or abs(self.dim) > _MAX_INT:
            raise SpecError(
                f"topk(dim={self.dim!r}) is not a dimension", remedy="pass an int"
            )
        _check_member("topk", "part", self.part, _PARTS)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Reduce without an input.

        Raises:
            SpecError: it needs one.
        """
        if self.source is not None:
            raise SpecError(
                f"reduce={self!r} needs the input {self.source!r}",
                why="there is no call here that could supply it",
                remedy="capture with fxcapture.compile, or use one without input",
            )
        return self.apply(value, None)

    def apply(self, value: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """Reduce.

        Args:
            value: Of shape (batch, length, ...), except for ``topk``.
            source: The input's value; a mask may be ``None`` (nothing is masked).
        """
        if self.kind == "topk":
            found = torch.topk(value, self.k, dim=self.dim)
            return found.values if self.part == "values" else found.indices
        if self.kind == "gather":
            return _gather(value, source)
        if self.kind == "last":
            return value[:, -1] if source is None else _last(value, source)
        return value.mean(dim=1) if source is None else _mean(value, source)

    def check_input(self, source: Any) -> None:
        """Raise where the input's value cannot be used.

        Raises:
            SpecTypeError: it is no tensor of a usable shape and dtype.
        """
        if self.kind == "gather":
            right = isinstance(source, torch.Tensor) and source.dim() in (1, 2)
            right = right and not (
                source.is_floating_point() or source.dtype is torch.bool
            )
            wanted = "integers of shape (batch,) or (batch, n)"
        else:
            right = source is None or (
                isinstance(source, torch.Tensor) and source.dim() == 2
            )
            wanted = "a mask of shape (batch, length), nonzero where a token counts"
        if not right:
            shown = (
                f"a {source.dtype} tensor of shape {tuple(source.shape)}"
                if isinstance(source, torch.Tensor)
                else f"of type {type(source).__name__}"
            )
            raise SpecTypeError(
                f"the input {self.source!r} of reduce={self!r} is {shown}",
                why=f"it takes {wanted}",
                remedy="name another input, or pass it in capture_inputs",
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; those at their default are left out."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Reduction:
        """What :meth:`to_json` wrote.

        Raises:
            SpecError: it is something else.
        """
        known = [f.name for f in dataclasses.fields(Reduction)]
        if unknown := [name for name in data if name not in known]:
            raise SpecError(
                f"{str(unknown[0])[:80]!r} is no field of a reduction",
                nearest=nearest(str(unknown[0]), known),
                remedy="write it with CaptureSpec.to_json",
            )
        return Reduction(**data)

    def __repr__(self) -> str:
        fields = self.to_json()
        kind = fields.pop("kind")
        name = {"gather": "positions"}.get(kind, "mask")
        parts = [
            f"{name if key == 'source' else key}={value!r}"
            for key, value in fields.items()
        ]
        return f"{kind}({', '.join(parts)})"


def last(mask: str | None = None) -> Reduction:
    """The last position along dimension 1.

    Args:
        mask: Name of an input of shape (batch, length): the last position where it is
            not zero, whichever side the padding is on.

    Returns:
        A reduction (batch, length, ...) to (batch, ...).
    """
    return Reduction(kind="last", source=_name(mask, "mask"))


def mean(mask: str | None = None) -> Reduction:
    """The mean over dimension 1.

    Args:
        mask: Name of an input of shape (batch, length): positions where it is zero do
            not count.  A longer mask (of a key-value cache) counts from its end.

    Returns:
        A reduction (batch, length, ...) to (batch, ...); zero where nothing counts.
    """
    return Reduction(kind="mean", source=_name(mask, "mask"))


def topk(
    k: int, dim: int = -1, part: Literal["values", "indices"] = "values"
) -> Reduction:
    """The k largest values along a dimension, or their indices.

    Two records of one target, one of each part, share the computation once compiled.

    Args:
        k: How many.
        dim: Along which dimension.
        part: ``"values"`` or ``"indices"``.
    """
    return Reduction(kind="topk", k=k, dim=dim, part=part)


def gather(positions: str) -> Reduction:
    """The tokens at positions that each call supplies.

    Args:
        positions: Name of an integer input of shape (batch, n), or (batch,).  Negative
            positions count from the end.

    Returns:
        A reduction (batch, length, ...) to (batch, n, ...), or to (batch, ...).
    """
    return Reduction(kind="gather", source=_name(positions, "positions"))


def bind_inputs(
    reducers: Reducers, inputs: Mapping[str, Any] | None
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The reducers with their inputs at hand; can be traced.

    Args:
        reducers: Record name to reducer.
        inputs: Name to value; values may be ``None``.
    """
    if not inputs:
        return dict(reducers)
    return {name: _bound(reduce, inputs) for name, reduce in reducers.items()}


def _bound(
    reduce: Callable[[torch.Tensor], torch.Tensor], inputs: Mapping[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(reduce, Reduction) or reduce.source is None:
        return reduce
    source = inputs[reduce.source]

    def bound(value: torch.Tensor) -> torch.Tensor:  # traced, never executed
        return reduce.apply(value, source)

    return bound


def _check_member(of: str, field: str, value: Any, members: tuple[str, ...]) -> None:
    if value not in members:
        raise SpecError(
            f"{of}({field}={value!r}) is not a {field}",
            nearest=nearest(str(value), members),
            remedy=f"pass {' or '.join(map(repr, members))}",
        )


def _name(name: Any, what: str) -> str | None:
    if name is not None and not isinstance(name, str):
        raise SpecTypeError(
            f"{what}={name!r} is of type {type(name).__name__}",
            why="a spec holds no tensors: it names an input of the call",
            remedy="pass the input's name, and the tensor with the call",
        )
    return name


def _last(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask[:, -value.shape[1] :]
    places = torch.arange(value.shape[1], device=value.device)
    index = torch.where(mask != 0, places, 0).amax(dim=1)
    return value[torch.arange(value.shape[0], device=value.device), index]


def _mean(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = (mask[:, -value.shape[1] :] != 0).to(value.dtype)
    mask = mask.reshape(*mask.shape, *([1] * (value.dim() - 2)))
    return (value * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _gather(value: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    assert positions is not None
    rows = torch.arange(value.shape[0], device=value.device)
    if positions.dim() == 2:
        rows = rows.unsqueeze(1)
    return value[rows, positions]
