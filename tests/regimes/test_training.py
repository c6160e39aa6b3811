"""Gradients through records, detached records, mixed precision, memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from tests.regimes.blocks import Stack, left_behind

REGIMES = [{"fullgraph": True}, {"regions": "layers.*"}]


def eager_loss(model, x):
    states = model.hidden_states(x)
    return (
        model(x).pow(2).sum() + states[0].pow(2).sum() + states[1].sin().sum(),
        states,
    )


def captured_loss(captured, x):
    output, records = captured(x)
    states = records["l"]
    return output.pow(2).sum() + states[0].pow(2).sum() + states[1].sin().sum(), states


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("settings", REGIMES)
def test_a_loss_of_records_and_output_trains_like_eager(settings):
    model = Stack()
    spec = {"l": fxc.Tap("layers.*", select=[0, 1])}
    captured = fxc.compile(model, spec, backend="aot_eager", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        batches = [torch.randn(2, 8), torch.randn(2, 8)]
        model.zero_grad()
        for x in batches:  # gradients of two batches add up
            captured_loss(captured, x)[0].backward()
        got = gradients(model)
        model.zero_grad()
        for x in batches:
            eager_loss(model, x)[0].backward()
        torch.testing.assert_close(got, gradients(model))
        optimizer.step()
    before = counters["stats"]["unique_graphs"]
    captured_loss(captured, torch.randn(2, 8))[0].backward()
    assert counters["stats"]["unique_graphs"] == before


def test_train_and_eval_are_two_graphs_whatever_the_order():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    captured = fxc.compile(model, {"d": "1"}, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 8)
    for i in range(10):
        captured.train(i % 2 == 0)
        records = captured(x).records
        dropped = (records["d"][0] == 0).float().mean().item()
        assert (dropped > 0.2) == model.training
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("settings", REGIMES)
def test_detach_adds_no_backward_work(settings):
    model = Stack()
    spec = {"l": fxc.Tap("layers.*", detach=True)}
    captured = fxc.compile(model, spec, backend="eager", **settings)
    output, records = captured(torch.randn(2, 8))

    assert output.requires_grad
    assert not any(v.requires_grad for v in records["l"])


def test_an_integer_record_takes_no_part_in_autograd():
    class Top(torch.nn.Module):
        def forward(self, x):
            return x.topk(2, dim=-1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.top = torch.nn.Linear(8, 8), Top()

        def forward(self, x):
            return self.top(self.linear(x)).values.sum()

    spec = {"i": fxc.Tap("top", output="indices"), "v": fxc.Tap("top", output=0)}
    captured = fxc.compile(Model(), spec, backend="aot_eager", fullgraph=True)
    output, records = captured(torch.randn(3, 8))
    output.backward()

    assert records["i"][0].dtype == torch.int64
    assert records["v"][0].requires_grad


def test_a_record_keeps_its_value_for_backward_when_the_next_layer_writes_over_it():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).mul_(0).sum()

    model = Model()
    captured = fxc.compile(model, {"l": "linear"}, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    captured(x).records["l"][0].pow(2).sum().backward()
    got = model.linear.weight.grad.clone()
    model.zero_grad()
    model.linear(x).pow(2).sum().backward()

    torch.testing.assert_close(got, model.linear.weight.grad)


def test_mixed_precision_records_what_the_caller_received():
    model = Stack()
    captured = fxc.compile(model, {"l": "layers.*"}, backend="aot_eager")
    x = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, records = captured(x)
        states = model.hidden_states(x)
    for got, expected in zip(records["l"], states, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)
    output.float().sum().backward()


class Checkpointed(Stack):
    """Runs each layer in a checkpoint that no graph contains."""

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


SAVING = {
    "state": fxc.Tap("layers.*"),
    "detached": fxc.Tap("layers.*", detach=True),
    "inside": fxc.Tap("layers.*.attention", output=1),
    "reduced": fxc.Tap("layers.*.out", reduce=lambda t: (t * t).sum(1)),
    "argument": fxc.Tap("layers.*.out", point="input"),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("settings", [{"regions": "layers.*"}, {}])
@pytest.mark.parametrize("what", SAVING)
def test_a_checkpoint_outside_of_the_graphs_computes_anew_what_it_saved(
    what, settings, backend
):
    model, plain = Checkpointed(), Stack()
    plain.load_state_dict(model.state_dict())
    spec = {"l": SAVING[what]}
    captured = fxc.compile(model, spec, backend=backend, **settings)
    whole = fxc.compile(plain, spec, backend="eager", fullgraph=True)
    for seed in range(2):
        x = torch.randn(2, 8, generator=torch.manual_seed(seed))
        for run in (captured, whole):
            output, records = run(x)
            assert len(records["l"]) == 3
            loss = output.sum()
            if what != "detached":
                loss = loss + sum(v.pow(2).sum() for v in records["l"])
            run.zero_grad()
            loss.backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        assert left_behind(model) == []


def test_a_checkpoint_outside_of_the_graphs_retains_no_record():
    model = Checkpointed()
    # Detached: other records are the model's own tensors, which its graph may hold.
    tap = fxc.Tap("layers.*", detach=True)
    captured = fxc.compile(model, {"l": tap}, backend="aot_eager", regions="layers.*")
    output, records = captured(torch.randn(2, 8))
    alive = [weakref.ref(v) for v in records["l"]]
    del records
    gc.collect()

    assert [r() for r in alive] == [None] * 3
    output.sum().backward()


def test_nothing_is_retained_once_records_are_dropped():
    model = Stack()
    captured = fxc.compile(model, {"l": "layers.*"}, backend="aot_eager")
    output, records = captured(torch.randn(2, 8))
    alive = [weakref.ref(v) for v in records["l"]]
    del output, records
    gc.collect()

    assert [r() for r in alive] == [None, None, None]
