"""Surveys: what a run would call, without running it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxcapture.errors import SpecTypeError, TraceError
from fxcapture.inspect.survey import sites
from tests.reference import footprint


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.lin(self.lin(x)), x.shape[0]


def test_points_have_calls_structure_shape_and_bytes() -> None:
    model = Twice()
    untouched = footprint(model)

    found = sites(model, (torch.zeros(3, 8),))

    assert [(p.path, p.class_name, p.num_calls) for p in found] == [
        ("lin", "Linear", 2),
        ("", "Twice", 1),
    ]
    assert found[0].shapes == ((3, 8),)
    assert found[0].num_bytes == 2 * 3 * 8 * 4
    assert found[1].output == "tuple(tensor, int)"
    assert len(found.sites) == 3
    assert untouched == footprint(model)


def test_it_prints_as_a_table() -> None:
    text = str(sites(Twice(), (torch.zeros(3, 8),)))

    assert text.splitlines()[0].split() == [
        "path", "class", "calls", "output", "shape", "dtype", "bytes"
    ]  # fmt: skip
    assert "(model)" in text
    assert "192 B" in text


def test_it_shows_its_table_where_it_is_typed() -> None:
    found = sites(Twice(), (torch.zeros(3, 8),))

    assert len(found) == 2
    assert repr(found) == f"Survey(2 points)\n{found}"
    assert repr(found.sites) == f"SiteTable(3 sites)\n{found.sites}"


def test_a_model_of_70_billion_parameters_needs_no_memory() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = transformers.LlamaModel(config)

    found = sites(model, (torch.zeros(1, 2048, dtype=torch.long),))

    by_path = {point.path: point for point in found}
    layers = [p for p in found if p.class_name == "LlamaDecoderLayer"]
    assert len(layers) == 80
    assert by_path["layers.79"].shapes == ((1, 2048, 8192),)


def test_a_model_that_reads_a_value_is_refused_with_the_reason() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="reads the value of a tensor"):
        sites(Asks(), (torch.ones(2),))
    with pytest.raises(SpecTypeError, match="type str"):
        sites("model")  # type: ignore[arg-type]
