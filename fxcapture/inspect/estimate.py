"""What a capture will cost, worked out on fake tensors before anything runs.

Terms
    fake model: a copy of the user's model whose parameters have shapes, dtypes and a
        device but no data; nothing is allocated for it, whatever the model's size.
    live bytes: bytes of the tensors that the run itself made and still needs; weights,
        buffers and inputs exist before the run and are not counted.
    full capture: the same spec with every position selected.
    early stop: ``keep_output=False``, which ends the graph at the last operation that a
        record needs.

How
    The fake model is traced once, with marks, into a graph of ATen operators.  The
    product's own passes turn it into the graph without capture, with it, with full
    capture, and with early stop.  In each a walk over the nodes adds a tensor's storage
    when its node runs and takes it off behind its last use.

Invariants
    The user's model is neither changed nor run.  Peaks are those of a backend that runs
    operator by operator (``eager``, ``aot_eager``), in inference; buffers that a kernel
    allocates and frees inside itself do not show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture import _torch, passes
from fxcapture.errors import SpecTypeError
from fxcapture.inspect.arguments import example_arguments
from fxcapture.inspect.fake_run import Fakes, trace
from fxcapture.inspect.liveness import (
    Timeline,
    count_flops,
    timeline_of,
    values_of,
    weight_bytes,
)
from fxcapture.passes.base import TapKey
from fxcapture.plan.inputs import find_inputs
from fxcapture.plan.match import match, reducers_of
from fxcapture.plan.plan import Plan
from fxcapture.plan.printing import preformatted
from fxcapture.plan.resolve import resolve
from fxcapture.plan.sites import SiteTable, format_table
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.trace.method_entry import as_module

__all__ = ["Estimate", "PositionCost", "RecordCost", "Timeline", "estimate"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PositionCost:
    """One position of a record.

    Attributes:
        path: The module whose call feeds it.
        num_bytes: Bytes of its value.
        selected: Whether the spec keeps it.
    """

    path: str
    num_bytes: int
    selected: bool


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordCost:
    """One record.

    Attributes:
        name: Its name.
        positions: All of them, selected or not.
    """

    name: str
    positions: tuple[PositionCost, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the selected positions."""
        return sum(p.num_bytes for p in self.positions if p.selected)

    @property
    def full_bytes(self) -> int:
        """Bytes of all positions."""
        return sum(p.num_bytes for p in self.positions)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """What a capture costs; prints as a table.

    Attributes:
        records: Cost per record.
        kept_bytes: Bytes that the records hold; a tensor that two share counts once.
        full_bytes: The same if every position were selected.
        weight_bytes: Bytes of the parameters and buffers that the run reads.
        early_stop_weight_bytes: The same under early stop.
        flops: Floating-point operations of matrix products, convolutions and attention
            in the whole run (a multiplication and an addition are two).
        early_stop_flops: Those left under early stop.
        plain: Live bytes without capture.
        captured: Live bytes with this spec.
        full: Live bytes with full capture.
        early_stop: Live bytes with this spec under early stop.
        sites: The sites that the trace found.
    """

    records: tuple[RecordCost, ...]
    kept_bytes: int
    full_bytes: int
    weight_bytes: int
    early_stop_weight_bytes: int
    flops: int
    early_stop_flops: int
    plain: Timeline
    captured: Timeline
    full: Timeline
    early_stop: Timeline
    sites: SiteTable = dataclasses.field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes with this spec."""
        return self.captured.peak_bytes

    def __repr__(self) -> str:
        return f"Estimate\n{self}"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        rows = [("record", "positions kept", "bytes kept", "bytes if all were kept")]
        for record in self.records:
            kept = sum(p.selected for p in record.positions)
            rows.append(
                (
                    record.name,
                    f"{kept} of {len(record.positions)}",
                    format_bytes(record.kept_bytes),
                    format_bytes(record.full_bytes),
                )
            )
        peaks = [("peak of live bytes", "", "at")]
        for what, line in (
            ("without capture", self.plain),
            ("with this spec", self.captured),
            ("with every position", self.full),
            ("this spec, records only", self.early_stop),
        ):
            at = line.peak_path or "(model)"
            peaks.append((what, format_bytes(line.peak_bytes), at))
        share = self.early_stop_flops / self.flops if self.flops else 1.0
        return (
            f"{format_table(rows)}\n\n{format_table(peaks)}\n\n"
            f"weights {format_bytes(self.weight_bytes)}, of which records only need "
            f"{format_bytes(self.early_stop_weight_bytes)}\n{self.flops:.3g} "
            f"operations, of which records only need {share:.1%}"
            + " (with those that compute records)"
            * (share > 1)
        )


def format_bytes(count: int) -> str:
    """A number of bytes for people, such as ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def estimate(
    model: nn.Module | Callable[..., Any],
    spec: CaptureSpec | Mapping[str, Any],
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Estimate:
    """Work out what a capture costs, without running or allocating anything.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")
        print(estimate(model, spec, (ids,), {"use_cache": False}))

    Args:
        model: The model; its weights may be on any device, ``meta`` included.
        spec: What to capture.
        args: The model's arguments, or the only one if it is a tensor; tensors count by
            shape, stride and dtype alone.
        kwargs: The model's keyword arguments.
        device: Where to pretend that it runs, which decides on the attention kernel;
            by default where its weights are (the CPU for ``meta``).

    Returns:
        Bytes per record, peaks, and what early stop would save.

    Raises:
        SpecTypeError: ``model``, ``spec`` or ``args`` is of the wrong type.
        TargetError: the spec does not fit the model, or what the run called.
        TraceError: the model reads values of tensors, which fake ones do not have.
        CaptureError: the model cannot be copied, or a value cannot be captured.
    """
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise SpecTypeError(
            f"model is of type {type(model).__name__}",
            why="sites are calls of submodules, so the model must be a torch.nn.Module",
            remedy="pass the module",
        )
    positional, named = example_arguments(args, kwargs)
    if not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    model = _torch.unwrap_optimized(model)
    fakes = Fakes(device)
    shadow = fakes.model(model)
    bound = match(spec, shadow)
    graph = trace(
        shadow,
        fakes,
        positional,
        named,
        bound.listening,
        reducers_of(spec),
        lambda args, kwargs: find_inputs(spec, shadow, args, kwargs, None),
    )
    marked = passes.collect_marks(graph, graph=0, classes=bound.classes)
    chosen = resolve(spec, bound, marked.sites)
    every = resolve(spec, bound, marked.sites, [(name, None) for name in spec])

    def variant(plan: Plan | None, *, stop: bool = False) -> fx.GraphModule:
        source = _without_outputs(graph) if stop else graph
        wanted = (plan.wanted(), plan.wanted_sizes()) if plan else ({}, {})
        return passes.rewrite(source, marked, *wanted, prune=stop)

    plain, captured = variant(None), variant(chosen)
    full, stopped = variant(every), variant(chosen, stop=True)
    sizes = _tap_bytes(full)
    return Estimate(
        records=tuple(
            RecordCost(
                name=all_of.name,
                positions=tuple(
                    PositionCost(
                        path=path,
                        num_bytes=sum(
                            sizes[TapKey(slot.site, leaf=leaf)]
                            for _, leaf in slot.leaves
                        )
                        if slot
                        else 0,
                        selected=kept is not None,
                    )
                    for path, slot, kept in zip(
                        all_of.paths, all_of.slots, some.slots, strict=True
                    )
                ),
            )
            for all_of, some in zip(every.records, chosen.records, strict=True)
        ),
        kept_bytes=sum(_tap_bytes(captured).values()),
        full_bytes=sum(sizes.values()),
        weight_bytes=weight_bytes(plain),
        early_stop_weight_bytes=weight_bytes(stopped),
        flops=count_flops(plain),
        early_stop_flops=count_flops(stopped),
        plain=timeline_of(plain),
        captured=timeline_of(captured),
        full=timeline_of(full),
        early_stop=timeline_of(stopped),
        sites=marked.sites,
    )


def _without_outputs(graph: fx.GraphModule) -> fx.GraphModule:
    made = passes.copy_graph_module(graph)
    made.graph.output_node().args = ((),)
    return made


def _tap_bytes(gm: fx.GraphModule) -> dict[TapKey, int]:
    """Bytes of each tapped tensor."""
    keys: tuple[TapKey, ...] = gm.meta[passes.OUTPUTS]
    outputs: Any = gm.graph.output_node().args[0]
    sizes = {}
    for key, node in zip(keys, outputs[len(outputs) - len(keys) :], strict=True):
        sizes[key] = sum(v.numel() * v.element_size() for v in values_of(node))
    return sizes
