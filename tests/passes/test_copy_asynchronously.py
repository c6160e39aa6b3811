"""Copies to the host are queued where waiting at the graph's end is enough.

The graphs here are on a CUDA device that need not exist: no tensor has data.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxcapture as fxc
from fxcapture import _torch, passes
from fxcapture.passes.base import TAP, TapKey
from fxcapture.passes.copy_asynchronously import WAITS, copy_asynchronously
from fxcapture.plan.plan import Leaf
from fxcapture.runtime import whole_run


def graph_on(
    device: str, *, read: bool = False, stream: bool = False, **options: object
) -> fx.GraphModule:
    """``y = x.relu(); tap = y.to("cpu", ...); return y, tap``."""
    with _torch.fake_mode():
        value = torch.empty(2, 3, device=device)
    graph = fx.Graph()
    x = graph.placeholder("x")
    if stream:
        graph.call_function(torch.cuda.set_stream, (None,))
    y = graph.call_method("relu", (x,))
    x.meta["example_value"] = y.meta["example_value"] = value
    tap = graph.call_method("to", (y,), {"device": torch.device("cpu"), **options})
    tap.meta[TAP] = TapKey(0, leaf=Leaf(kind="result", index=0))
    own = graph.call_method("neg", (tap,)) if read else y
    graph.output((own, tap))
    return fx.GraphModule({}, graph)


def lines(gm: fx.GraphModule) -> list[str]:
    gm.recompile()
    body = [line.split(";")[0].strip() for line in gm.code.strip().splitlines()[1:]]
    return [line for line in body if line]


def test_the_copy_is_queued_and_waited_for() -> None:
    gm = graph_on("cuda:1")

    assert copy_asynchronously(gm).modified
    assert lines(gm) == [
        "relu = x.relu()",
        "contiguous = relu.contiguous()",
        "to = contiguous.to(device = device(type='cpu'), non_blocking = True)",
        "return (relu, to)",
    ]
    assert gm.meta[WAITS] == (torch.device("cuda:1"),)
    assert not copy_asynchronously(gm).modified
    gm.graph.lint()


def test_the_dtype_is_converted_on_the_device() -> None:
    gm = graph_on("cuda:0", dtype=torch.float16)

    assert copy_asynchronously(gm).modified
    assert lines(gm) == [
        "relu = x.relu()",
        "to_1 = relu.to(dtype = torch.float16)",
        "contiguous = to_1.contiguous()",
        "to = contiguous.to(device = device(type='cpu'), non_blocking = True)",
        "return (relu, to)",
    ]


@pytest.mark.parametrize(
    "gm",
    [
        graph_on("cpu"),
        graph_on("cuda:0", read=True),
        graph_on("cuda:0", stream=True),
        graph_on("cuda:0", non_blocking=False),
    ],
    ids=["on the host already", "read in the graph", "streams", "said otherwise"],
)
def test_elsewhere_the_copy_blocks(gm: fx.GraphModule) -> None:
    before = lines(gm)

    assert not copy_asynchronously(gm).modified
    assert lines(gm) == before
    assert gm.meta[WAITS] == ()


def test_records_are_read_only_after_the_wait(monkeypatch) -> None:
    """The graph's end waits for the stream of each device that copies come from."""
    order: list[object] = []

    class Stream:
        def __init__(self, device: object) -> None:
            self.device = device

        def synchronize(self) -> None:
            order.append(self.device)

    def backend(gm: fx.GraphModule, example_inputs: object) -> object:
        # As if the graph had been one of a CUDA device.
        gm.meta[WAITS] = ("device",)

        def run(*args: torch.Tensor) -> object:
            order.append("ran")
            return gm.forward(*args)

        return run

    records = whole_run.Records

    def made(*args: object) -> object:
        order.append("records")
        return records(*args)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(whole_run, "Records", made)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    captured = fxc.compile(model, {"h": "0"}, backend=backend, fullgraph=True)
    captured(torch.ones(2, 3))
    assert order == ["ran", "device", "records"]

    order.clear()
    broken = fxc.compile(model, {"h": "0"}, backend=backend, regions="0")
    assert broken(torch.ones(2, 3)).records["h"][0].shape == (2, 3)
    assert order == ["ran"], "the region's value is taken outside of the graph"

    order.clear()
    inner = torch.nn.Sequential(model)
    broken = fxc.compile(inner, {"h": "0.0"}, backend=backend, regions="0")
    assert broken(torch.ones(2, 3)).records["h"][0].shape == (2, 3)
    assert order == ["ran", "device"]


def test_replayed_graphs_copy_at_once() -> None:
    def compiled(**settings: object) -> bool:
        model = torch.nn.Linear(2, 2)
        captured = fxc.compile(model, {"h": ""}, **settings)  # type: ignore[arg-type]
        return captured._fxc_program.asynchronous

    def replays(gm: fx.GraphModule, example_inputs: object) -> object:
        return gm.forward

    replays.reuses_outputs = True  # type: ignore[attr-defined]
    assert compiled()
    assert compiled(backend="aot_eager")
    assert not compiled(mode="reduce-overhead")
    assert not compiled(backend="cudagraphs")
    assert not compiled(backend=replays)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_records_on_the_host_are_right_when_the_call_returns(dtype) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
    model = model.cuda().eval()
    tap = fxc.Tap("*", device="cpu", dtype=dtype)
    captured = fxc.compile(model, {"h": tap}, fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(512, 1024, device="cuda")
            records = captured(x).records["h"]
            got = [value.clone() for value in records]
            torch.cuda.synchronize()
            for value, early in zip(records, got, strict=True):
                assert torch.equal(value, early)
    assert passes.WAITS in captured.graphs[0].meta
