"""Whatever a value is, and wherever it goes, its record is that value.

Each test says what a user wanted and where that was reported.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from tests.faults.blocks import outputs_of

ROOT = Path(__file__).parents[2]


# -------------------------------------------------------------------------- sparse


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, self.linear(x))


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv1, self.conv2 = nn.Linear(4, 8), Conv(), Conv()
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = self.conv1(self.embed(x).relu(), adjacency).relu()
        return self.out(self.conv2(x, adjacency))


NAMES = ["embed", "conv1", "conv2", "out"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("settings", [{}, {"regions": "conv*"}])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_layers_that_take_a_sparse_matrix_are_all_recorded(
    layout: torch.layout, settings: dict[str, Any], optional: bool
) -> None:
    """Embeddings of a graph network's layers (pytorch_geometric#1559)."""
    model, x = GraphNetwork().eval(), torch.randn(6, 4)
    adjacency = torch.eye(6).roll(1, 0).to_sparse(layout=layout)
    spec = {"h": fxc.Tap("*", optional=optional)}
    with torch.no_grad():
        expected = outputs_of(model, NAMES, x, adjacency)
        captured = fxc.compile(model, spec, backend="eager", **settings)
        for _ in range(2):
            records = captured(x, adjacency).records
            assert records.paths("h") == tuple(NAMES)
            for got, want in zip(records["h"], expected, strict=True):
                torch.testing.assert_close(got, want)


# ------------------------------------------------------------------- jagged, DTensor


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def jagged(*lengths: int) -> torch.Tensor:
    parts = [torch.randn(length, 8) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        (None, {"fullgraph": True}),
        ("cpu", {"fullgraph": True}),
        (None, {}),
        (None, {"regions": "*"}),
    ],
)
def test_jagged_tensors_are_recorded_with_their_ragged_size(
    device: str | None, settings: dict[str, Any]
) -> None:
    """Sequences of several lengths in one batch (pytorch#137275, pytorch#138274)."""
    model = nn.Sequential(Norms(), Norms()).eval()
    spec = {"h": fxc.Tap("*", device=device)}
    captured = fxc.compile(model, spec, backend="aot_eager", **settings)
    with torch.no_grad():
        for lengths in ((2, 3, 4), (5, 1, 2, 2)):
            x = jagged(*lengths)
            output, records = captured(x)
            got, want = records["h"][0], model[0](x)
            assert got.is_nested
            assert got.shape == output.shape, "the ragged size is another one"
            assert (output + got).is_nested
            for a, b in zip(got.unbind(), want.unbind(), strict=True):
                torch.testing.assert_close(a, b)


_PARALLEL = """
    import os, sys, warnings
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    import fxcapture as fxc
    from tests.faults.blocks import outputs_of

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n, self.w1 = nn.LayerNorm(8), nn.Linear(8, 16)
            self.w2 = nn.Linear(16, 8)

        def forward(self, x):
            return x + self.w2(self.w1(self.n(x)).relu())

    def full(t):
        return t.full_tensor() if isinstance(t, DTensor) else t

    store = dist.FileStore(sys.argv[1], 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(Block(), Block()).eval()
    for block in model:
        plan = {"w1": ColwiseParallel(use_local_output=False), "w2": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    x = torch.randn(2, 5, 8)
    names = ["0.w1", "0.w2", "0", "1.w1", "1.w2", "1"]
    spec = {"h": ["*", "*.w1", "*.w2"]}
    for settings in ({"fullgraph": True}, {}, {"regions": "*"}):
        torch._dynamo.reset()
        with torch.no_grad():
            want = outputs_of(model, names, x)
            got = fxc.compile(model, spec, backend="eager", **settings)(x).records
        assert list(got.paths("h")) == names, (settings, got.paths("h"))
        for name, a, b in zip(names, got["h"], want):
            assert type(a) is type(b), (settings, name, type(a), type(b))
            assert isinstance(a, DTensor) == ("w1" in name)
            if isinstance(a, DTensor):
                assert a.placements == b.placements
            torch.testing.assert_close(full(a), full(b))
    dist.destroy_process_group()
    print("all right")
"""


def test_layers_in_tensor_parallel_are_recorded_as_they_are(tmp_path: Path) -> None:
    """Activations of parallelised layers (pytorch#175613, transformers#47579)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PARALLEL), str(tmp_path / "store")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all right" in done.stdout


# ----------------------------------------------------------------------- gradients


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.c2(self.c1(x).relu())).relu()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_gradient_at_a_region_is_eagers(backend: str) -> None:
    """A class activation map (torch-cam#217, pytorch-grad-cam#473)."""
    model, x = Pictures().eval(), torch.randn(2, 3, 8, 8)
    names = [f"layers.{i}" for i in range(3)]

    def maps(loss: torch.Tensor, values: Any) -> Any:
        return torch.autograd.grad(loss, values, retain_graph=True)

    expected = []
    for i, name in enumerate(names):
        [value] = outputs_of(model, [name], x)
        end = value
        for layer in model.layers[i + 1 :]:
            end = layer(end)
        expected += maps(model.head(end.mean((2, 3)))[:, 2].sum(), value)
    captured = fxc.compile(
        model, {"a": "layers.*"}, backend=backend, regions="layers.*"
    )
    output, records = captured(x)
    found = maps(output[:, 2].sum(), records["a"])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    output, records = captured(x)
    for value in records["a"]:
        value.retain_grad()
    output[:, 2].sum().backward()
    for value, want in zip(records["a"], expected, strict=True):
        torch.testing.assert_close(value.grad, want)


class Box:
    """Neither a container that torch knows nor a tensor."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Box:
        torch._dynamo.graph_break()
        h = self.a(x)
        torch._dynamo.graph_break()
        return Box(h)


@pytest.mark.parametrize("settings", [{}, {"regions": "a"}])
def test_what_an_object_of_any_class_gives_the_caller_is_not_the_record(
    settings: dict[str, Any],
) -> None:
    """A write of the caller's would show in it."""
    captured = fxc.compile(Boxes(), {"a": "a"}, backend="eager", **settings)
    output, records = captured(torch.randn(2, 4))
    kept = output.h.detach().clone()
    with torch.no_grad():
        output.h.zero_()
    assert torch.equal(records["a"][0], kept)


# ---------------------------------------------------------------------- containers


class TwoStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual.add_(x)
        return self.linear(self.norm(residual)), residual


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoStates() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = x * 1.0, None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {}, {"regions": "layers.*"}])
def test_a_reduction_gets_a_container_whole(settings: dict[str, Any]) -> None:
    """The state of a layer is the sum of two elements (vllm#46788)."""
    model, x, expected = Engine().eval(), torch.randn(2, 5, 8), []
    hooks = [
        layer.register_forward_hook(lambda m, a, o: expected.append(o[0] + o[1]))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(x)
        for hook in hooks:
            hook.remove()
        tap = fxc.Tap("layers.*", reduce=lambda o: o[0] + o[1])
        captured = fxc.compile(model, {"h": tap}, backend="eager", **settings)
        fn, params, buffers = fxc.functional(model, {"h": tap})
        exported = fxc.export(model, (x,), spec={"h": tap})
        ways = [captured(x), fn(params, buffers, x), exported(x)]
    for _, records in ways:
        for got, want in zip(records["h"], expected, strict=True):
            torch.testing.assert_close(got, want)
