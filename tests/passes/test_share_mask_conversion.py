"""A boolean mask that several layers share is made additive once, bit for bit."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxcapture as fxc
from fxcapture.passes import share_mask_conversion
from fxcapture.passes.share_mask_conversion import ADDITIVE_MASK


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(h).view(2, 6, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return h + out.transpose(1, 2).reshape(2, 6, 8)


class Model(nn.Module):
    def __init__(self, layers: int = 3, write: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.write = write

    def forward(self, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6)
        mask = (places[:, None] >= places) & keep[:, None, None]
        for i, layer in enumerate(self.layers):
            if self.write and i == 1:
                mask.logical_not_()
            h = layer(h, mask)
        return h


KEEP = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()


def dynamo_graph(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example: list[Any]) -> Any:
        found.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    return found[0]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the sizes of these tests are large."""
    module = importlib.import_module("fxcapture.passes.share_mask_conversion")
    monkeypatch.setattr(module, "MIN_ELEMENTS", 0)


def conversions(gm: fx.GraphModule) -> int:
    return sum(n.target is ADDITIVE_MASK for n in gm.graph.nodes)


def test_a_small_mask_is_left_to_inductor() -> None:
    gm = dynamo_graph(Model(), torch.randn(2, 6, 8), KEEP)
    assert not share_mask_conversion(gm).modified

    large = torch.ones(2, 6, dtype=torch.bool)
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            node.kwargs["attn_mask"].meta["example_value"] = large.new_ones(2, 512, 256)
    assert share_mask_conversion(gm).modified


@pytest.mark.usefixtures("any_size")
def test_one_conversion_serves_every_layer() -> None:
    gm = dynamo_graph(Model(), torch.randn(2, 6, 8), KEEP)
    assert share_mask_conversion(gm).modified
    gm.graph.lint()

    assert conversions(gm) == 1
    (shared,) = [n for n in gm.graph.nodes if n.target is ADDITIVE_MASK]
    assert [n.target for n in shared.users] == [F.scaled_dot_product_attention] * 3
    assert not share_mask_conversion(gm).modified


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_the_same_bit_for_bit_also_of_rows_that_read_nothing(
    dtype: torch.dtype,
) -> None:
    model = Model().to(dtype)
    x = torch.randn(2, 6, 8, dtype=dtype)
    gm = dynamo_graph(model, x, KEEP)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = dict(model.named_parameters())
    args = []
    for node in placeholders:
        name = node.name
        if "parameters" in name:
            i = int(name.split("layers_modules_")[1][0])
            args.append(tensors[f"layers.{i}.qkv.{name.strip('_').rsplit('_')[-1]}"])
        else:
            args.append(x if name == "l_h_" else KEEP)
    with torch.no_grad():
        expected = gm(*args)[0]
        shared = copy.copy(gm)
        share_mask_conversion(shared)
        shared.recompile()
        got = shared(*args)[0]

    assert torch.equal(expected, got)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    "model", [Model(1), Model(3, write=True)], ids=["one layer", "written in between"]
)
def test_a_mask_that_cannot_be_shared_is_left(model: Model) -> None:
    gm = dynamo_graph(model, torch.randn(2, 6, 8), KEEP)

    assert not share_mask_conversion(gm).modified
    assert conversions(gm) == 0


@pytest.mark.usefixtures("any_size")
def test_it_runs_under_inductor_only() -> None:
    for backend, expected in (("aot_eager", 0), ("inductor", 1)):
        captured = fxc.compile(Model(), {"h": "layers.1"}, backend=backend)
        program = captured._fxc_parts()[2]
        program.inner = lambda gm, example: gm.forward
        captured(torch.randn(2, 6, 8), KEEP)

        assert conversions(captured.graphs[0]) == expected


@pytest.mark.usefixtures("any_size")
@pytest.mark.inductor
def test_records_and_output_are_right_under_inductor() -> None:
    captured = fxc.compile(Model(), {"h": "layers.*"}, fullgraph=True)
    with torch.no_grad():
        found = fxc.verify(captured, torch.randn(2, 6, 8), KEEP)

    assert found.differences["h"] < 1e-5
    assert found.output_difference is not None
    assert found.output_difference < 1e-5
