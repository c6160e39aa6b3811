"""Methods of a model: compiled as entries, and noticed where nothing captures them."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Tower(), Tower()

    def encode_image(self, image: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.visual(image) * scale

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.encode_image(image) @ self.text(text).T

    def twice(self, image: torch.Tensor) -> torch.Tensor:
        return self(image, image) + self(image, image)

    def describe(self) -> str:
        return "a model"


SPEC = {"v": Tap("visual.blocks.*"), "out": Tap("", detach=True)}
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def clip() -> Clip:
    torch.manual_seed(0)
    return Clip().eval()


def expected(model: Clip) -> list[torch.Tensor]:
    first = model.visual.blocks[0](X)
    return [first, model.visual.blocks[1](torch.tanh(first))]


def assert_captured(model: Clip, result: Any, scale: float = 2.0) -> None:
    output, records = result
    assert torch.equal(output, model.encode_image(X, scale=scale))
    assert torch.equal(records["out"][0], output)
    for got, wanted in zip(records["v"], expected(model), strict=True):
        torch.testing.assert_close(got, wanted)
    assert records.paths("v") == ("visual.blocks.0", "visual.blocks.1")


@pytest.mark.parametrize("pieces", [False, True])
def test_a_method_is_compiled_as_an_entry(pieces: bool) -> None:
    model = clip()
    state = dict(model.__dict__)
    captured = fxc.compile(model.encode_image, SPEC, backend="eager", fullgraph=True)
    if pieces:
        captured._fxc_parts()[2].break_reason = "asked for by the test"
    assert_captured(model, captured(X, scale=2.0))
    assert_captured(model, captured(X, scale=2.0))

    assert model.__dict__ == state
    assert len(captured.graphs) == 1
    assert_captured(model, captured(X, 2.0))
    assert captured.state_dict().keys() == model.state_dict().keys()
    assert "Clip_encode_image" in repr(captured)


def test_the_mode_of_a_method_is_the_models() -> None:
    model = clip()
    captured = fxc.compile(model.encode_image, SPEC, backend="eager").train()

    assert model.training
    assert model.visual.training
    assert captured.training


def test_a_method_of_a_captured_model_can_be_compiled() -> None:
    model = clip()
    captured = fxc.compile(model, SPEC, backend="eager")
    made = fxc.compile(captured.encode_image, SPEC, backend="eager")

    assert_captured(model, made(X, 2.0))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_compiled_method_can_be_copied(copied: Any) -> None:
    captured = copied(fxc.compile(clip().encode_image, SPEC, backend="eager"))

    assert_captured(clip(), captured(X, 2.0))


def test_the_other_entry_points_take_methods() -> None:
    model = clip()
    found = [point.path for point in fxc.sites(model.encode_image, (X,))]
    assert found == ["visual.blocks.0", "visual.blocks.1", "visual", ""]
    assert fxc.estimate(model.encode_image, SPEC, (X,)).kept_bytes == 3 * 32
    fn, params, buffers = fxc.functional(model.encode_image, SPEC)
    assert_captured(model, fn(params, buffers, X, 2.0))
    program = fxc.export(model.encode_image, (X, 2.0), spec=SPEC)
    assert_captured(model, program(X, 2.0))
    captured = fxc.compile(model.encode_image, SPEC, backend="eager")
    assert fxc.verify(captured, X, 2.0).differences == {"v": 0.0, "out": 0.0}


def test_calls_of_a_compiled_method_are_recorded_whoever_makes_them() -> None:
    model = clip()
    captured = fxc.compile(model.encode_image, SPEC, backend="eager")
    with captured.recording() as run:
        output = model.encode_image(X, scale=2.0)
        model(X, X)  # which calls the method

    assert_captured(model, (output, run.calls[0].records))
    assert len(run.calls) == 2
    assert run.calls[0].shapes == {"image": (2, 4)}
    assert "encode_image" not in model.__dict__


def test_what_is_no_method_of_a_module_is_refused() -> None:
    with pytest.raises(fxc.errors.SpecTypeError, match="function"):
        fxc.compile(lambda x: x, SPEC)


# -- nothing silent --------------------------------------------------------------------


def test_a_method_that_calls_the_model_says_once_that_nothing_is_captured() -> None:
    model = clip()
    captured = fxc.compile(model, SPEC, backend="eager")
    state = [dict(m.__dict__) for m in model.modules()]
    with pytest.warns(UserWarning, match=r"(?s)twice.*captured.recording\(\)") as seen:
        output = captured.twice(X)

    assert seen[0].filename == __file__
    assert torch.equal(output, model.twice(X))
    assert [m.__dict__ for m in model.modules()] == state
    captured.twice(X)


def test_a_method_that_goes_around_the_model_names_the_other_remedy() -> None:
    captured = fxc.compile(clip(), SPEC, backend="eager")
    text = r"(?s)encode_image.*fxcapture.compile\(model.encode_image, spec\)"
    with pytest.warns(UserWarning, match=text):
        captured.encode_image(X)
    with captured.recording(), warnings.catch_warnings():
        warnings.simplefilter("error")
        captured.twice(X)


def test_in_a_recording_it_is_said_as_well_where_the_model_is_not_called() -> None:
    captured = fxc.compile(clip(), SPEC, backend="eager")
    method = r"(?s)encode_image.*fxcapture.compile\(model.encode_image, spec\)"
    empty = pytest.warns(UserWarning, match="was not called in it")
    said = pytest.warns(UserWarning, match=method)
    with empty, captured.recording(), said:
        captured.encode_image(X)


def test_a_method_that_calls_nothing_says_nothing() -> None:
    captured = fxc.compile(clip(), SPEC, backend="eager")

    assert captured.describe() == "a model"
    assert captured.get_submodule("visual") is captured.visual


def test_the_methods_stay_the_models() -> None:
    model = clip()
    captured = fxc.compile(model, SPEC, backend="eager")

    assert captured.twice.__self__ is model
    assert captured.twice.__name__ == "twice"


def test_another_threads_call_is_not_taken_for_the_methods() -> None:
    model = clip()
    captured = fxc.compile(model, SPEC, backend="eager")

    def describe(self: Clip) -> None:
        thread = threading.Thread(target=lambda: self(X, X))
        thread.start()
        thread.join(60)

    Clip.in_another_thread = describe  # type: ignore[attr-defined]
    try:
        captured.in_another_thread()
    finally:
        del Clip.in_another_thread  # type: ignore[attr-defined]


def test_an_error_leaves_nothing_behind() -> None:
    model = clip()
    captured = fxc.compile(model, SPEC, backend="eager")
    with pytest.raises(RuntimeError):
        captured.twice(torch.ones(3, 3))

    assert "_call_impl" not in model.__dict__
