"""A recording: every call of the model runs the captured program, whoever makes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.errors import CaptureError, SpecTypeError
from tests.integrations.small_models import TEXT


class Denoiser(nn.Module):
    """A model with a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, time: float = 0.0) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + time
        return x

    def denoise(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = x - 0.1 * self(x)
        return x


class Broken(Denoiser):
    def forward(self, x: torch.Tensor, time: float = 0.0) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x) + time


SPEC = {"b": Tap("blocks.*"), "whole": ""}
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def denoiser(kind: type[Denoiser] = Denoiser, **settings: Any) -> fxc.CapturedModule:
    torch.manual_seed(0)
    return fxc.compile(kind().eval(), SPEC, backend="eager", **settings)


@pytest.mark.parametrize("kind", [Denoiser, Broken])
def test_a_loop_of_the_models_own_is_recorded_unchanged(kind: type[Denoiser]) -> None:
    captured = denoiser(kind)
    model = captured._fxc_model
    expected, state = model.denoise(X, 4), dict(model.__dict__)
    with captured.recording() as run:
        assert torch.equal(captured.denoise(X, 4), expected)
        assert torch.equal(model.denoise(X, 4), expected)

    assert model.__dict__ == state
    assert [c.step for c in run.calls] == list(range(8))
    assert {c.phase for c in run.calls} == {None}
    assert run.calls[0].shapes == {"x": (2, 4)}
    x = X
    for call in run.calls[:4]:
        output, records = captured(x)
        for name in SPEC:
            for got, wanted in zip(call.records[name], records[name], strict=True):
                assert torch.equal(got, wanted)
        x = x - 0.1 * output
    torch.testing.assert_close(x, expected)


@torch.no_grad()
@pytest.mark.parametrize("spec", [{"b": "blocks.*"}, SPEC])
def test_recordings_compile_nothing_anew(spec: Any) -> None:
    captured = fxc.compile(Denoiser().eval(), spec, backend="eager", fullgraph=True)
    captured(X)
    for _ in range(2):
        with captured.recording():
            captured.denoise(X, 3)
        captured(X)

    assert len(captured.graphs) == 1


def test_hooks_of_the_model_run_once() -> None:
    captured = denoiser()
    seen: list[str] = []
    captured._fxc_model.register_forward_pre_hook(lambda m, a: seen.append("before"))
    captured._fxc_model.register_forward_hook(lambda m, a, o: seen.append("after"))
    with captured.recording() as run:
        captured.denoise(X, 2)

    assert len(run.calls) == 2
    assert seen == ["before", "after"] * 2


def test_a_model_that_is_compiled_in_place_is_recorded() -> None:
    torch.manual_seed(0)
    model = Denoiser().eval()
    model.compile(backend="eager")
    captured = fxc.compile(model, SPEC, backend="eager")
    with captured.recording() as run:
        model(X)
        model.denoise(X, 2)

    assert len(run.calls) == 3
    assert "_compiled_call_impl" in model.__dict__


def test_a_call_of_the_captured_model_counts_too() -> None:
    captured = denoiser()
    with captured.recording() as run:
        output, records = captured(X)

    assert run.calls[0].records is records
    assert torch.equal(output, records["whole"][0])


@pytest.mark.parametrize(("keep", "left"), [(None, 5), ("last", 1), (2, 2), (9, 5)])
def test_keep_bounds_what_stays(keep: Any, left: int) -> None:
    captured = denoiser()
    with captured.recording(keep=keep) as run:
        captured.denoise(X, 5)

    assert [c.step for c in run.calls] == list(range(5))[-left:]


def test_keep_may_take_each_call_as_it_comes() -> None:
    captured, steps = denoiser(), []
    with captured.recording(keep=lambda call: steps.append(call.step)) as run:
        captured.denoise(X, 3)

    assert steps == [0, 1, 2]
    assert run.calls == []


@pytest.mark.parametrize("keep", [0, -1, True, "first", 1.5])
def test_another_keep_is_refused(keep: Any) -> None:
    with pytest.raises(SpecTypeError, match="keep="):
        denoiser().recording(keep=keep)


def test_recordings_nest_and_the_innermost_keeps_the_call() -> None:
    captured = denoiser()
    model = captured._fxc_model
    with captured.recording() as outer:
        model(X)
        with captured.select(b=[0]).recording() as inner:
            model(X)
        model(X)

    assert (len(outer.calls), len(inner.calls)) == (2, 1)
    assert inner.calls[0].records["b"][1] is None
    assert not {"_call_impl", "forward"} & model.__dict__.keys()


def test_recordings_may_end_in_any_order() -> None:
    captured = denoiser()
    model = captured._fxc_model
    first, second = captured.recording(), captured.recording()
    with contextlib.ExitStack() as stack:
        first.__enter__()
        stack.enter_context(second)
        model(X)
        with pytest.warns(UserWarning, match="not called"):
            first.__exit__(None, None, None)
        model(X)

    assert (len(first.calls), len(second.calls)) == (0, 2)
    assert "_call_impl" not in model.__dict__


def test_two_models_are_recorded_at_once() -> None:
    one, two = denoiser(), denoiser()
    with one.recording() as first, two.recording() as second:
        one.denoise(X, 1)
        two.denoise(X, 2)

    assert (len(first.calls), len(second.calls)) == (1, 2)


def test_each_thread_has_its_own() -> None:
    captured = denoiser()
    captured(X)
    model, lengths = captured._fxc_model, {}
    barrier = threading.Barrier(3)

    def work(steps: int) -> None:
        barrier.wait()
        if steps == 0:
            model.denoise(X, 5)
            barrier.wait()
            return
        with captured.recording() as run:
            model.denoise(X, steps)
            barrier.wait()
        lengths[steps] = len(run.calls)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert lengths == {2: 2, 3: 3}
    assert "_call_impl" not in model.__dict__


def test_after_an_error_the_model_is_as_before() -> None:
    captured = denoiser()
    state = dict(captured._fxc_model.__dict__)
    with pytest.raises(RuntimeError), captured.recording():
        captured.denoise(torch.ones(3, 3), 1)

    assert captured._fxc_model.__dict__ == state


def test_an_override_that_was_left_behind_goes_with_the_next_call() -> None:
    captured = denoiser()
    run = captured.recording()
    run.__enter__()
    run._is_open = False  # an interrupt came after this, in __exit__
    output = captured._fxc_model(X)

    assert torch.equal(output, captured(X).output)
    assert run.calls == []
    assert "_call_impl" not in captured._fxc_model.__dict__


def test_a_recording_of_nothing_says_so() -> None:
    captured = denoiser()
    with pytest.warns(UserWarning, match="was not called in it"), captured.recording():
        captured.blocks[0](X)


def test_a_recording_is_one_time() -> None:
    run = denoiser().recording()
    with pytest.raises(SpecTypeError, match="open already"), run, run:
        pass


def test_a_model_without_its_output_is_refused() -> None:
    with pytest.raises(SpecTypeError, match="keep_output"):
        denoiser(keep_output=False).recording()


# -- generation ------------------------------------------------------------------------


def llama() -> Any:
    config = LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=0, eos_token_id=63)
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        pad_token_id=0, eos_token_id=63, bos_token_id=62, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


LAYERS = {llama: "model.layers.*", gpt2: "transformer.h.*"}
IDS = torch.tensor([[5, 9, 11, 3, 7], [8, 2, 4, 1, 30]])


def generating(make: Callable[[], Any], **more: Any) -> tuple[Any, fxc.CapturedModule]:
    torch.manual_seed(0)
    model = make().eval()
    spec = {"h": Tap(LAYERS[make], output=0, initial=True), **more}
    return model, fxc.compile(model, spec, backend="eager")


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_steps_of_a_generation_are_one_full_pass(make: Callable[[], Any]) -> None:
    model, captured = generating(make)
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **settings)
    with captured.recording() as run:
        tokens = captured.generate(IDS, **settings)

    assert torch.equal(tokens, expected)
    assert [c.phase for c in run.calls] == ["prefill", *["decode"] * 5]
    assert [c.step for c in run.calls] == list(range(6))
    assert [c.past for c in run.calls] == [0, 5, 6, 7, 8, 9]
    joined = run.joined()
    with torch.no_grad():
        full = captured(tokens[:, :-1], use_cache=False).records
    for got, wanted in zip(joined["h"], full["h"], strict=True):
        assert got.shape == (2, 10, 32)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_beams_follow_the_ones_that_won() -> None:
    _, captured = generating(llama)
    with captured.recording() as run:
        made = captured.generate(
            IDS, max_new_tokens=5, num_beams=3, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    joined = run.joined(made.beam_indices)["h"][-1]
    with torch.no_grad():
        full = captured(made.sequences[:, :-1], use_cache=False).records["h"][-1]

    torch.testing.assert_close(joined, full, rtol=1e-4, atol=1e-5)


def test_a_static_cache_and_two_generations() -> None:
    _, captured = generating(llama)
    settings: Any = {"max_new_tokens": 4, "cache_implementation": "static"}
    with captured.recording() as run:
        captured.generate(IDS[:, :3], do_sample=False, **settings)
        tokens = captured.generate(IDS, do_sample=False, **settings)
    with torch.no_grad():
        full = captured(tokens[:, :-1], use_cache=False).records["h"][-1]

    assert [c.phase for c in run.calls] == ["prefill", *["decode"] * 3] * 2
    torch.testing.assert_close(run.joined()["h"][-1], full, rtol=1e-4, atol=1e-5)


def test_reductions_are_stacked_and_attention_weights_refused() -> None:
    more = {"last": Tap("model.norm", reduce="last")}
    _, captured = generating(llama, **more)
    with captured.recording() as run:
        captured.generate(IDS, max_new_tokens=3, do_sample=False)

    assert run.joined()["last"][0].shape == (2, 3, 32)

    more = {"w": Tap("**.self_attn", output=1)}
    _, captured = generating(llama, **more)
    with captured.recording() as run:
        captured.generate(IDS, max_new_tokens=3, do_sample=False)
    with pytest.raises(CaptureError, match=r"(?s)steps of w\[0\].*run.calls"):
        run.joined()


def test_a_draft_that_was_rejected_stands_once() -> None:
    _, captured = generating(llama)
    torch.manual_seed(3)
    draft = llama().eval()
    with captured.recording() as run:
        tokens = captured.generate(
            IDS[:1], max_new_tokens=8, do_sample=False, assistant_model=draft
        )
    with torch.no_grad():
        full = captured(tokens, use_cache=False).records["h"][-1]
    joined = run.joined()["h"][-1]

    assert joined.shape[1] >= tokens.shape[1] - 1
    same = tokens.shape[1] - 1
    torch.testing.assert_close(joined[:, :same], full[:, :same], rtol=1e-4, atol=1e-5)


def test_what_keep_has_let_go_of_cannot_be_joined() -> None:
    captured = denoiser()
    with captured.recording(keep=2) as run:
        captured.denoise(X, 3)

    with pytest.raises(CaptureError, match="keep= has let go"):
        run.joined()
    with pytest.raises(CaptureError, match="nothing was recorded"):
        captured.recording().joined()


def test_as_many_graphs_as_without() -> None:
    counts = []
    for recorded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = llama().eval(), []

        def backend(gm: Any, inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(gm)
            return gm.forward

        settings: Any = {"max_new_tokens": 6, "do_sample": False}
        if recorded:
            spec = {"h": Tap("model.layers.*", output=0)}
            captured = fxc.compile(model, spec, backend=backend)
            with captured.recording():
                captured.generate(IDS, **settings)
        else:
            model.forward = torch.compile(model.forward, backend=backend)
            model.generate(IDS, **settings)
        counts.append(len(graphs))

    assert counts[1] <= counts[0]
