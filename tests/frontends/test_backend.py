"""The Dynamo backend: records of code that calls torch.compile itself."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap, reductions
from fxcapture.errors import CaptureError, SpecTypeError
from fxcapture.foreign.backend import backend, dynamo_backend, recording
from tests.reference import assert_records, eager_records


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(self.layers(x))[0].mul_(2)


SPEC = fxc.CaptureSpec(
    {"linear": Tap(nn.Linear, select=[-1]), "first": Tap("layers.0", reduce=torch.sin)}
)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_records_are_those_of_eager_hooks(inner: str) -> None:
    model = Model()
    compiled = torch.compile(model, backend=backend(SPEC, inner=inner), fullgraph=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        with recording() as records:
            output = compiled(x)
        expected, want = eager_records(model, SPEC, lambda x=x: model(x))

        assert_records(want, records.calls[0], 1e-6)
        torch.testing.assert_close(output, expected)
        assert records["first"][0].shape == (3, 4)
        assert records.paths("linear") == ("layers.0", "layers.2")


def test_every_call_of_a_recording_is_kept_and_none_outside_of_it() -> None:
    compiled = torch.compile(Model(), backend=backend(SPEC, inner="eager"))
    compiled(torch.randn(3, 4))
    with recording() as outer:
        compiled(torch.randn(3, 4))
        with recording() as inner:
            compiled(torch.randn(3, 4))
            compiled(torch.randn(3, 4))

    assert (len(outer.calls), len(inner.calls)) == (1, 2)
    with (
        pytest.warns(UserWarning, match="no graph compiled with"),
        recording() as empty,
        pytest.raises(CaptureError, match="nothing was recorded"),
    ):
        empty["linear"]


def test_threads_do_not_see_each_others_records() -> None:
    compiled = torch.compile(Model(), backend=backend(SPEC, inner="eager"))
    compiled(torch.randn(3, 4))
    counts = {}

    def work(number: int) -> None:
        with recording() as records:
            for _ in range(number):
                compiled(torch.randn(3, 4))
        counts[number] = len(records.calls)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts == {2: 2, 5: 5}


def test_the_registered_backend_takes_its_spec_from_the_options() -> None:
    compiled = torch.compile(
        Model(), backend=dynamo_backend, options={"spec": SPEC, "inner": "eager"}
    )
    with recording() as records:
        compiled(torch.randn(3, 4))

    assert set(records) == {"linear", "first"}
    assert len(records) == 2
    assert repr(records) == "Recording(1 calls)"
    with pytest.raises(SpecTypeError, match="no spec"):
        dynamo_backend(torch.fx.symbolic_trace(Model()), [])


@pytest.mark.parametrize(
    ("tap", "why"),
    [
        (Tap("pair"), "returns one tensor or a container"),
        (Tap(""), "flat tuple of tensors"),
        (Tap("layers.0", point="input"), "which values were its arguments"),
    ],
)
def test_what_the_graph_does_not_determine_is_refused(tap: Tap, why: str) -> None:
    compiled = torch.compile(Model(), backend=backend({"x": tap}, inner="eager"))

    with pytest.raises(Exception, match=why) as caught:  # Dynamo's, with ours in it
        compiled(torch.randn(3, 4))

    assert "AmbiguousSiteError" in str(caught.value)


class Reuses:
    """A backend whose compiled graphs write into the same memory at every call."""

    reuses_outputs = True

    def __call__(self, gm: torch.fx.GraphModule, inputs: object) -> object:
        memory: list[torch.Tensor] = []

        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            outputs = gm(*args)
            if not memory:
                memory.extend(torch.empty_like(o) for o in outputs)
            for place, value in zip(memory, outputs, strict=True):
                place.copy_(value)
            return list(memory)

        return run


@torch.no_grad()
def test_records_survive_the_next_call_of_a_backend_that_reuses_outputs() -> None:
    model = Model()
    compiled = torch.compile(
        model, backend=backend(SPEC, inner=Reuses()), fullgraph=True
    )
    x = torch.randn(3, 4)
    with recording() as records:
        compiled(x)
        compiled(torch.randn(3, 4))
    want = eager_records(model, SPEC, lambda: model(x))[1]

    assert_records(want, records.calls[0], 1e-6)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduce", ["last", reductions.mean(), lambda h: h[:, -1]])
def test_a_reduction_of_any_kind_stands_in_the_graph(inner, reduce) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 3, 4)
    spec = fxc.CaptureSpec({"h": Tap("0", reduce=reduce)})
    compiled = torch.compile(model, backend=backend(spec, inner=inner), fullgraph=True)

    for length in (3, 5):
        x = torch.randn(2, length, 4)
        with recording() as records:
            compiled(x)
        want = eager_records(model, spec, lambda x=x: model(x))[1]

        assert_records(want, records.calls[0], 1e-6)


def test_a_reduction_cannot_have_an_input_that_the_graph_does_not_name() -> None:
    spec = {"h": Tap("layers.0", reduce=reductions.gather("positions"))}
    compiled = torch.compile(Model(), backend=backend(spec, inner="eager"))

    with pytest.raises(Exception, match="needs the input 'positions'"):
        compiled(torch.randn(3, 4))


def test_a_capturing_backend_can_be_the_inner_one_of_another() -> None:
    inner = backend({"tanh": Tap("layers.1")}, inner="eager")
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend=backend(SPEC, inner=inner), fullgraph=True)

    with recording() as records:
        output = compiled(x)

    within, around = records.calls
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(within["tanh"], (model.layers[0](x).tanh(),))
    assert_records(eager_records(model, SPEC, lambda: model(x))[1], around, 1e-6)


# -- nothing silent --------------------------------------------------------------------


class Looping(nn.Module):
    """A model with a method that calls it again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


@torch.no_grad()
def test_a_loop_whose_records_are_dropped_says_so_once() -> None:
    model = Looping()
    model.compile(backend=fxc.backend({"l": "linear"}, "eager"))
    model.generate(torch.ones(2, 4), 1)  # a warm-up
    text = r"(?s)outside of a recording.*with fxcapture.recording\(\) as run: "
    with pytest.warns(UserWarning, match=text):
        model.generate(torch.ones(2, 4), 3)
    model.generate(torch.ones(2, 4), 3)
    with fxc.recording() as run:
        model.generate(torch.ones(2, 4), 3)

    assert len(run.calls) == 3


@torch.no_grad()
def test_what_was_recorded_once_may_run_without() -> None:
    model = Looping()
    model.compile(backend=fxc.backend({"l": "linear"}, "eager"))
    with fxc.recording():
        model.generate(torch.ones(2, 4), 2)
    model.generate(torch.ones(2, 4), 3)


@torch.no_grad()
def test_a_method_that_runs_uncompiled_is_told_of_when_the_recording_ends() -> None:
    compiled = torch.compile(Looping(), backend=fxc.backend({"l": "linear"}, "eager"))
    text = r"(?s)no graph .* ran in it: .*generate.*model.compile\(backend=...\)"
    with pytest.warns(UserWarning, match=text) as told, fxc.recording():
        compiled.generate(torch.ones(2, 4), 2)

    assert told[0].filename == __file__
