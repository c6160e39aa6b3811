"""Estimates: kept bytes and peaks against what a real run takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxcapture as fxc
from fxcapture.errors import CaptureError, SpecError, SpecTypeError, TraceError
from fxcapture.inspect.estimate import Estimate, estimate, format_bytes
from fxcapture.inspect.fake_run import Fakes
from fxcapture.inspect.liveness import Timeline, timeline_of

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks and a head; every size below can be worked out by hand."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama(**changes: Any) -> nn.Module:
    sizes = {
        "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    }  # fmt: skip
    config = transformers.LlamaConfig(**(sizes | changes))
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, vocab_size=500,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


HIDDEN = fxc.Tap("model.layers.*", output=0, select=[0, -2], initial=True)
IDS = torch.ones(2, 64, dtype=torch.int64)


def measured(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, Any]:
    """Peak of the bytes that a call allocates, and its result."""
    call(*args, **kwargs)  # compiles
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call(*args, **kwargs)
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, result


def record_bytes(records: fxc.Records) -> int:
    return sum(t.nbytes for values in records.values() for t in values if t is not None)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any, Any]] = {
    "llama with a cache": (llama, {"hidden": HIDDEN}, (IDS,), {}),
    "llama, last token in half precision": (
        llama,
        {"h": fxc.Tap("model.layers.*", output=0, reduce="last", dtype=torch.bfloat16)},
        (IDS,),
        {"use_cache": False},
    ),
    "bert, mean": (
        bert, {"h": fxc.Tap("encoder.layer.*", select=-1, reduce="mean")}, (IDS,), {},
    ),
    "stack": (
        Stack, {"h": fxc.Tap("blocks.*", select=[1])}, (torch.randn(64, 8),), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_equal_and_peaks_within_a_tenth_of_the_measured(
    case: str,
) -> None:
    make, spec, args, kwargs = CASES[case]
    model = make()
    expected = estimate(model, spec, args, kwargs)

    for keep_output, line in ((True, expected.captured), (False, expected.early_stop)):
        captured = fxc.compile(
            model, spec, backend="aot_eager", fullgraph=True, keep_output=keep_output
        )
        with torch.no_grad():
            peak, result = measured(captured, args, kwargs)

            assert record_bytes(result.records) == expected.kept_bytes
            assert line.peak_bytes == pytest.approx(peak, rel=0.1)
            every = captured.select(**dict.fromkeys(spec))(*args, **kwargs)
            assert record_bytes(every.records) == expected.full_bytes


def test_peak_without_capture_is_that_of_the_plain_model() -> None:
    model = llama()
    expected = estimate(model, {"hidden": HIDDEN}, (IDS,), {"use_cache": False})
    plain = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        peak, _ = measured(plain, (IDS,), {"use_cache": False})

    assert expected.plain.peak_bytes == pytest.approx(peak, rel=0.1)


def of_stack(spec: Mapping[str, Any], **kwargs: Any) -> Estimate:
    return estimate(Stack(), spec, (torch.randn(16, 8),), **kwargs)


def test_bytes_by_hand() -> None:
    made = of_stack({"h": fxc.Tap("blocks.*", select=[1, 2])})
    one = 16 * 8 * 4

    assert made.kept_bytes == made.records[0].kept_bytes == 2 * one
    assert made.full_bytes == made.records[0].full_bytes == 4 * one
    assert [p.selected for p in made.records[0].positions] == [False, True, True, False]
    assert made.records[0].positions[1].path == "blocks.1"


def test_early_stop_counts_what_the_records_need() -> None:
    made = of_stack({"h": fxc.Tap("blocks.*", select=[1])})
    block = 2 * 16 * (8 * 32 + 32 * 8)

    assert made.flops == 4 * block + 2 * 16 * 8 * 100
    assert made.early_stop_flops == 2 * block
    weights = 4 * (8 * 32 + 32 + 32 * 8 + 8)
    assert made.early_stop_weight_bytes == 2 * weights
    assert made.weight_bytes == 4 * weights + 4 * (8 * 100 + 100)


def test_a_tensor_that_two_records_want_counts_once() -> None:
    made = of_stack({"a": fxc.Tap("blocks.1"), "b": fxc.Tap("blocks.*", select=[1])})

    assert made.kept_bytes == 16 * 8 * 4
    assert [r.kept_bytes for r in made.records] == [16 * 8 * 4] * 2


def test_nothing_selected_costs_nothing() -> None:
    made = of_stack({"h": fxc.Tap("blocks.*", select=[])})

    assert made.kept_bytes == 0
    assert made.captured.live_bytes == made.plain.live_bytes
    assert made.early_stop_flops == 0


def test_the_peak_names_the_module() -> None:
    made = of_stack({"h": fxc.Tap("blocks.*", select=[0])})

    assert made.plain.peak_path == "blocks.0" or made.plain.peak_path == "head"
    assert made.captured.peak_path == "head"
    assert "head" in str(made)
    assert "1 of 4" in str(made)


def test_a_view_keeps_its_base_alive() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = (x + 1)[:1]
            return torch.cat([first, x * 2])

    fakes = Fakes(None)
    from fxcapture.inspect.fake_run import trace

    graph = trace(fakes.model(Views()), fakes, (torch.zeros(8),), {}, (), {})
    line = timeline_of(graph)

    # x + 1 (32 bytes) is alive through its first element until the concatenation.
    assert line.peak_bytes == 32 + 32 + 36
    assert repr(line) == f"Timeline({len(line.live_bytes)} nodes, peak 100 bytes)"
    assert Timeline(live_bytes=(), paths=()).peak_path == ""


def test_a_large_model_on_meta_is_neither_allocated_nor_changed() -> None:
    with torch.device("meta"):
        model = llama(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=4,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        ).to(torch.bfloat16)  # fmt: skip
    before = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")

    made = estimate(model, {"hidden": HIDDEN}, (ids,), {"use_cache": False})

    assert made.kept_bytes == 2 * 8192 * 8192 * 2
    assert made.full_bytes == 5 * 8192 * 8192 * 2
    assert made.peak_bytes < 8 * 2**30
    assert {k: id(v) for k, v in model.state_dict(keep_vars=True).items()} == before
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_tied_weights_count_once() -> None:
    model = Stack()
    before = estimate(model, {"h": "blocks.0"}, (torch.randn(16, 8),))
    model.blocks[1].up.weight = model.blocks[0].up.weight
    after = estimate(model, {"h": "blocks.0"}, (torch.randn(16, 8),))

    assert before.weight_bytes - after.weight_bytes == 4 * 8 * 32


def test_a_model_that_reads_values_is_refused_with_a_reason() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(TraceError, match="depends on the data"):
        estimate(Reads(), {"h": "layer"}, (torch.ones(2, 4),))


def test_a_model_that_cannot_be_copied_is_refused_with_a_reason() -> None:
    class Locked(Stack):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    with pytest.raises(CaptureError, match=r"cannot be copied[\s\S]*no copies"):
        estimate(Locked(), {"h": "blocks.0"}, (torch.ones(2, 8),))


def test_wrong_types_are_refused() -> None:
    with pytest.raises(SpecTypeError, match="model is of type function"):
        estimate(lambda x: x, {"h": "blocks.0"}, ())  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build has CUDA")
def test_a_device_that_the_build_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be imitated"):
        of_stack({"h": "blocks.0"}, device="cuda")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40 * 3, "3 TiB")],
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert format_bytes(count) == text
