"""With keep_output=False a program ends at the last operation that a record needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import fxcapture as fxc
from fxcapture import reductions
from tests.modes import compile_in


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.linear(h).tanh()


class Model(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(8, 100)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
        self.calls.add_(1)
        return self.head(h)


class Recorder:
    """A backend that notes the graphs and the number of inputs it is given."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.num_inputs: list[int] = []

    def __call__(self, gm: fx.GraphModule, example: list[Any]) -> Any:
        self.graphs.append(gm)
        self.num_inputs.append(len(example))
        return gm.forward


def computing(gm: fx.GraphModule) -> int:
    return sum(n.op.startswith("call") for n in gm.graph.nodes)


def test_later_layers_and_their_parameters_are_gone_from_the_graph() -> None:
    model, backend = Model(), Recorder()
    captured = fxc.compile(
        model,
        {"h": fxc.Tap("layers.*", select=[1])},
        keep_output=False,
        backend=backend,
        fullgraph=True,
    )
    x = torch.randn(2, 8)
    output, records = captured(x)
    (gm,) = backend.graphs
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]

    assert output is None
    torch.testing.assert_close(records["h"][1], model.layers[1](model.layers[0](x)))
    # x, and the weights and biases of two layers; three operations each.
    assert backend.num_inputs == [5]
    assert len(names) == 5
    assert computing(gm) == 6
    assert not any("head" in n or "layers_modules_2" in n for n in names)


def test_each_selection_ends_where_it_needs_to_on_one_trace() -> None:
    model, backend = Model(), Recorder()
    captured = fxc.compile(
        model,
        {"h": fxc.Tap("layers.*", select=[3])},
        keep_output=False,
        backend=backend,
        fullgraph=True,
    )
    x = torch.randn(2, 8)
    states = [h := x] + [h := layer(h) for layer in model.layers]
    for k in (3, 0, 5, 1):
        records = captured(x, select={"h": [k]}).records

        torch.testing.assert_close(records["h"][k], states[k + 1])
    assert backend.num_inputs == [1 + 2 * (k + 1) for k in (3, 0, 5, 1)]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_sizes_may_be_dynamic(backend: str) -> None:
    model = Model()
    captured = fxc.compile(
        model,
        {"h": fxc.Tap("layers.*", select=[0], reduce=reductions.last())},
        keep_output=False,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for length in (3, 4, 7):
        x = torch.randn(2, length, 8)

        torch.testing.assert_close(
            captured(x).records["h"][0], model.layers[0](x)[:, -1]
        )


def test_gradients_reach_the_parameters_that_are_left() -> None:
    model = Model()
    captured = fxc.compile(
        model,
        {"h": fxc.Tap("layers.*", select=[1])},
        keep_output=False,
        backend="aot_eager",
        fullgraph=True,
    )
    captured(torch.randn(2, 8)).records["h"][1].sum().backward()

    assert model.layers[1].linear.weight.grad is not None
    assert model.layers[2].linear.weight.grad is None
    assert model.head.weight.grad is None


def test_a_write_behind_the_last_needed_operation_does_not_run() -> None:
    model = Model()
    spec = {"h": fxc.Tap("layers.*", select=[1])}
    captured = fxc.compile(
        model, spec, keep_output=False, backend="aot_eager", fullgraph=True
    )
    captured(torch.randn(2, 8))
    assert model.calls == 0

    fxc.compile(model, spec, backend="aot_eager", fullgraph=True)(torch.randn(2, 8))
    assert model.calls == 1


def test_parameters_of_a_lost_layer_still_guard_the_trace_of_all_selections() -> None:
    """Their guards stay: another selection of the same trace may read them."""
    model, backend = Model(), Recorder()
    captured = fxc.compile(
        model,
        {"h": fxc.Tap("layers.*", select=[0])},
        keep_output=False,
        backend=backend,
        fullgraph=True,
    )
    x = torch.randn(2, 8)
    captured(x)
    model.layers[5].linear = nn.Linear(8, 8, bias=False)
    h = x
    for layer in model.layers:
        h = layer(h)

    got = captured(x, select={"h": [5]}).records["h"][5]
    torch.testing.assert_close(got, h)


def test_a_model_in_pieces_returns_no_output_either() -> None:
    model = Model()
    captured = compile_in("pieces", model, {"h": "layers.*"}, regions="layers.*")
    captured._fxc_parts()[2].keep_output = False

    assert captured(torch.randn(2, 8)).output is None


def test_the_pruned_graph_reads_like_a_model_cut_after_the_layer() -> None:
    backend = Recorder()
    captured = fxc.compile(
        Model(2),
        {"h": fxc.Tap("layers.0", reduce="last")},
        keep_output=False,
        backend=backend,
        fullgraph=True,
    )
    captured(torch.randn(2, 3, 8))
    lines = [
        f"{n.op} {n.target if isinstance(n.target, str) else n.target.__name__}"
        for n in backend.graphs[0].graph.nodes
        if n.op != "placeholder"
    ]

    assert lines == [
        "call_function linear",
        "call_method tanh",
        "call_function add",
        "call_function getitem",
        "call_method clone",
        "output output",
    ]
