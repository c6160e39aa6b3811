"""A captured model compared with the eager reference: its records and its output.

Terms
    difference: of two tensors, the largest absolute difference of an element; NaNs in
        the same places and equal infinities are no difference.

Invariants
    What a number cannot say (another length, structure, shape, dtype) is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, final

import torch

from fxcapture.errors import VerificationError
from fxcapture.inspect.nothing import Nothing, find_nothing
from fxcapture.plan.printing import preformatted
from fxcapture.plan.sites import format_table
from fxcapture.runtime.captured_module import CapturedModule
from fxcapture.testing.reference import eager_reference, snapshot

__all__ = ["TOLERANCES", "Verification", "assert_parity", "verify"]

#: Largest difference that ``assert_parity`` allows by default, relative and absolute.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification:
    """How far a captured model is from the eager reference.

    Attributes:
        differences: Record name to the largest absolute difference of any element of
            any of its tensors; 0.0 where all are bitwise equal.
        output_difference: The same of the model's output; ``None`` if it was not kept.
        scales: Record name to the largest absolute value in the reference.
        output_scale: The same of the model's output; 0.0 if it was not kept.
        nothing: The records that hold nothing but ``None``, in which the two cannot
            differ; each prints as a sentence that says why.
    """

    differences: Mapping[str, float]
    output_difference: float | None
    scales: Mapping[str, float]
    output_scale: float = 0.0
    nothing: Mapping[str, Nothing] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Verification\n{self}"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        rows = [("record", "largest difference", "largest value")]
        rows += [
            (name, f"{d:.3g}", f"{self.scales[name]:.3g}")
            for name, d in self.differences.items()
        ]
        if self.output_difference is not None:
            rows.append(("(output)", f"{self.output_difference:.3g}", ""))
        return "\n\n".join([format_table(rows), *map(str, self.nothing.values())])


def verify(captured: CapturedModule, *args: Any, **kwargs: Any) -> Verification:
    """Run a captured model and the eager reference beside it.

    Args:
        captured: What :func:`fxcapture.compile` returned.
        *args: The model's arguments.
        **kwargs: The model's keyword arguments.

    Returns:
        The largest difference per record, and of the output.

    Raises:
        VerificationError: a record or the output differs in length, structure, shape
            or dtype.
    """
    model, spec, _ = captured._fxc_parts()
    with torch.random.fork_rng():
        reference = eager_reference(model, spec, args, kwargs)
    output, records = captured(*args, **kwargs)
    differences: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name in spec:
        expected, got = reference.records[name], records[name]
        if len(expected) != len(got):
            raise VerificationError(
                f"record {name!r} has {len(got)} positions",
                why=f"the eager reference has {len(expected)}",
                remedy="report it, with the model and the spec",
            )
        pairs = [
            _difference(e, g, f"{name}[{i}]")
            for i, (e, g) in enumerate(zip(expected, got, strict=True))
        ]
        differences[name] = max((d for d, _ in pairs), default=0.0)
        scales[name] = max((s for _, s in pairs), default=0.0)
    program = captured._fxc_program
    plan = program.plan_of(program.last_sites, captured._fxc_selection)
    kept, size = None, 0.0
    if captured._fxc_settings["keep_output"]:
        kept, size = _difference(snapshot(reference.output), output, "the output")
    return Verification(
        differences=differences,
        output_difference=kept,
        scales=scales,
        output_scale=size,
        nothing=find_nothing(plan.records, captured.graphs),
    )


def _difference(expected: Any, got: Any, where: str) -> tuple[float, float]:
    """Largest absolute difference and largest absolute expected value."""
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        return _tensor_difference(expected, got, where)
    parts = _parts(expected)
    if parts is None:
        same = expected == got or (expected != expected and got != got)
        compares = "__eq__" in {k for c in type(expected).__mro__[:-1] for k in vars(c)}
        if not same and compares:
            raise _differs(where, expected, got)
        return 0.0, 0.0
    others = _parts(got)
    if others is None or list(parts) != list(others) or type(expected) is not type(got):
        raise _differs(where, type(expected).__name__, type(got).__name__)
    pairs = [_difference(v, others[k], f"{where}[{k!r}]") for k, v in parts.items()]
    return (
        max((d for d, _ in pairs), default=0.0),
        max((s for _, s in pairs), default=0.0),
    )


def _tensor_difference(expected: Any, got: Any, where: str) -> tuple[float, float]:
    if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)):
        raise _differs(where, type(expected).__name__, type(got).__name__)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise _differs(
            where,
            f"{expected.dtype}{list(expected.shape)}",
            f"{got.dtype}{list(got.shape)}",
        )
    if not expected.numel():
        return 0.0, 0.0
    left, right = (
        t.detach().to("cpu", torch.float64) if not t.is_complex() else t.detach().cpu()
        for t in (expected, got)
    )
    # Equal infinities and NaNs in the same places are no difference.
    apart = (left - right).abs().masked_fill((left == right), 0)
    apart = apart.masked_fill(left.isnan() & right.isnan(), 0)
    size = left.abs().nan_to_num(0.0, posinf=0.0)
    value = float(apart.max())
    return (math.inf if math.isnan(value) else value), float(size.max())


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _differs(where: str, expected: Any, got: Any) -> VerificationError:
    return VerificationError(
        f"{where} is {got!r}",
        why=f"the eager reference has {expected!r}",
        remedy="report it, with the model and the spec",
    )


def assert_parity(
    captured: CapturedModule, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> Verification:
    """Raise unless a captured model agrees with the eager reference.

    Args:
        captured: What :func:`fxcapture.compile` returned.
        *args: The model's arguments.
        tolerance: Largest difference allowed, absolute and relative to the largest
            value of the record, or of the output; by default the one of the model's
            dtype in ``TOLERANCES``.
        **kwargs: The model's keyword arguments.

    Raises:
        VerificationError: a record or the output is further away.
    """
    result = verify(captured, *args, **kwargs)
    if tolerance is None:
        dtypes = {p.dtype for p in captured.parameters()} or {torch.float32}
        tolerance = max(TOLERANCES.get(d, 0.0) for d in dtypes)
    found = [
        (f"record {name!r}", difference, result.scales[name])
        for name, difference in result.differences.items()
    ]
    if result.output_difference is not None:
        found.append(("the output", result.output_difference, result.output_scale))
    for what, difference, scale in found:
        limit = tolerance * max(1.0, scale)
        if not difference <= limit:
            raise VerificationError(
                f"{what} is {difference:.3g} away from the eager reference",
                why=f"the tolerance is {limit:.3g}",
                remedy="pass a wider tolerance= if the backend may round differently",
            )
    return result
