"""Calls that run at the same time, inside one another, or that raise."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.trace.real_scope import hold_by
from tests.regimes.blocks import Stack, left_behind

REGIMES = [{"fullgraph": True}, {"regions": "layers.*"}]


@pytest.mark.parametrize("settings", REGIMES)
def test_threads_do_not_see_each_other_s_records(settings):
    model = Stack().eval()
    reference = copy.deepcopy(model)
    captured = fxc.compile(model, {"l": "layers.*"}, backend="aot_eager", **settings)
    wrong: list[object] = []

    def work(number):
        try:
            for k in range(15):
                x, at = torch.randn(2, 8), (number + k) % 3
                with torch.no_grad():
                    records = captured(x, select={"l": at}).records
                    states = reference.hidden_states(x)
                kept = [i for i, v in enumerate(records["l"]) if v is not None]
                if kept != [at] or not torch.equal(records["l"][at], states[at]):
                    wrong.append((number, k, kept))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert left_behind(model) == []


def test_a_selection_compiled_late_does_not_disturb_calls_of_other_threads():
    """fx tells of its tracing by a flag of the process, and a late variant traces."""
    model = Stack().eval()
    outcomes: list[object] = []

    def in_another_thread():
        try:
            outcomes.append(captured(x, select={"l": 0}).records["l"])
        except Exception as error:
            outcomes.append(error)

    def backend(graph_module, inputs):
        class Tracer(torch.fx.Tracer):
            def create_arg(self, value):
                if late and not outcomes:
                    thread = threading.Thread(target=in_another_thread)
                    thread.start()
                    thread.join(timeout=60)
                return super().create_arg(value)

        torch.fx.GraphModule(graph_module, Tracer().trace(graph_module))
        return graph_module

    captured = fxc.compile(model, {"l": "layers.*"}, backend=backend, fullgraph=True)
    x, late = torch.randn(2, 8), False
    expected = captured(x, select={"l": 0}).records["l"]
    late = True
    captured(x, select={"l": 1})

    assert len(outcomes) == 1
    assert not isinstance(outcomes[0], Exception), outcomes[0]
    torch.testing.assert_close(outcomes[0][0], expected[0])


def test_two_programs_on_one_model_leave_in_any_order():
    model = Stack().eval()
    first = fxc.compile(model, {"a": "layers.*"}, backend="eager", regions="head")
    second = fxc.compile(model, {"b": "layers.0"}, backend="eager", regions="head")
    scopes = [c._fxc_parts()[2].capture._scope for c in (first, second)]
    holders = [hold_by(), hold_by()]  # as two calls that are under way
    x = torch.randn(2, 8)

    scopes[0].enter(holders[0])
    scopes[1].enter(holders[1])
    scopes[0].leave(holders[0])
    assert left_behind(model) != []
    assert len(first(x).records["a"]) == 3
    assert len(second(x).records["b"]) == 1
    scopes[1].leave(holders[1])
    assert left_behind(model) == []


def test_tasks_have_frames_of_their_own():
    model = Stack().eval()
    captured = fxc.compile(model, {"l": "layers.*"}, backend="eager")

    async def one(value):
        x = torch.full((1, 8), value)
        await asyncio.sleep(0)
        records = captured(x).records
        await asyncio.sleep(0)
        return torch.equal(records["l"][0], model.layers[0](x))

    async def every():
        return await asyncio.gather(*[one(float(i)) for i in range(8)])

    assert asyncio.run(every()) == [True] * 8


@pytest.mark.parametrize("settings", [{}, {"regions": "model.layers.*"}])
def test_a_model_that_raises_leaves_nothing_and_the_next_call_is_clean(settings):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.fail = Stack(), False

        def forward(self, x):
            y = self.model(x)
            if self.fail:
                raise ValueError("from the model")
            return y

    model = Model()
    captured = fxc.compile(model, {"l": "model.layers.*"}, backend="eager", **settings)
    x = torch.randn(2, 8)
    captured(x)
    model.fail = True
    with pytest.raises(ValueError, match="from the model"):
        captured(x)
    assert left_behind(model) == []
    model.fail = False
    assert len(captured(x).records["l"]) == 3
    assert settings or captured.sites[0].graph is not None


@pytest.mark.parametrize("settings", REGIMES)
def test_copies_of_a_captured_model_have_records_of_their_own(settings):
    captured = fxc.compile(
        Stack().eval(), {"l": "layers.*"}, backend="eager", **settings
    )
    x = torch.randn(2, 8)
    before = captured(x).records
    twin = copy.deepcopy(captured)
    stored = pickle.loads(pickle.dumps(captured))
    with torch.no_grad():
        twin.layers[0].out.bias.add_(1.0)
    for other in (twin, stored):
        assert len(other(x).records["l"]) == 3
    assert torch.equal(stored(x).records["l"][0], before["l"][0])
    assert not torch.equal(twin(x).records["l"][0], before["l"][0])


def test_a_captured_model_inside_a_captured_model():
    inner = fxc.compile(
        Stack(), {"l": fxc.Tap("layers.*", select=[1])}, backend="eager"
    )

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), inner

        def forward(self, x):
            output, records = self.inner(self.first(x))
            return output + records["l"][1]

    model = Outer().eval()
    outer = fxc.compile(model, {"f": "first"}, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8)
    output, records = outer(x)
    y = model.first(x)

    torch.testing.assert_close(records["f"][0], y)
    torch.testing.assert_close(output, inner(y).output + inner(y).records["l"][1])


@pytest.mark.parametrize("settings", [{}, {"regions": "1"}])
def test_records_survive_a_backend_that_writes_into_its_outputs_again(settings):
    def backend(gm, inputs):
        buffers: list[torch.Tensor] = []

        def run(*args):
            made = gm(*args)
            if not buffers:
                buffers.extend(m.clone() for m in made)
            for buffer, m in zip(buffers, made, strict=True):
                buffer.copy_(m)
            return tuple(buffers)

        return run

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with torch.no_grad():
        broken = fxc.compile(model, {"h": "1.0"}, backend=backend, **settings)
        x, y = torch.randn(2, 2, 4)
        first = broken(x).records["h"][0]
        kept = first.clone()
        broken(y)
        assert not torch.equal(first, kept), "the backend was to write over it"

        backend.reuses_outputs = True
        captured = fxc.compile(model, {"h": "1.0"}, backend=backend, **settings)
        first = captured(x).records["h"][0]
        kept = first.clone()
        captured(y)
        assert torch.equal(first, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_records_survive_the_next_replay_of_a_cuda_graph():
    model = Stack().cuda().eval()
    captured = fxc.compile(
        model, {"l": "layers.*"}, mode="reduce-overhead", fullgraph=True
    )
    with torch.no_grad():
        for _ in range(3):
            captured(torch.randn(2, 8, device="cuda"))
        x = torch.randn(2, 8, device="cuda")
        first = captured(x).records["l"][0]
        kept = first.clone()
        captured(torch.randn(2, 8, device="cuda"))
        assert torch.equal(first, kept)
