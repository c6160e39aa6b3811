"""Unmodified transformers models over this package, against transformers itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from transformers import LlamaForCausalLM, LlamaModel, monkey_patching
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils import generic, output_capturing

from fxcapture.integrations import transformers as integration
from fxcapture.modeling import patching
from tests.integrations import small_models
from tests.integrations.small_models import MODELS, VISION, llama, records
from tests.modeling.toys import assert_same, overrides, picked

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
BOTH = {"output_hidden_states": True, "output_attentions": True}


def flags(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [
        BOTH,
        {"output_hidden_states": [0, -2]},
        {"output_hidden_states": (1,)},
        {},
    ]
    if name == "qwen2_moe":
        cases.append({"output_router_logits": True})
    return cases


def assert_equal_records(got: Any, want: Any) -> None:
    got, want = records(got), records(want)
    assert got.keys() == want.keys()
    for name, record in want.items():
        assert_same(got[name], record)


@pytest.fixture
def installed() -> Iterator[None]:
    with integration.install():
        yield
    assert not integration.is_installed()


def make(name: str) -> Any:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_made_before_and_after_give_what_transformers_gives(name: str) -> None:
    before, inputs = make(name)
    wants = [before(**inputs, **case) for case in flags(name)]
    assert records(wants[0]), "the reference records nothing"
    with integration.install():
        after, _ = make(name)
        for case, want in zip(flags(name), wants, strict=True):
            assert_equal_records(before(**inputs, **case), want)
            assert_equal_records(after(**inputs, **case), want)
        assert overrides(after) == []
        assert_equal_records(copy.deepcopy(after)(**inputs, **BOTH), wants[0])
        pickle.dumps(after)
    # And theirs again.
    assert_equal_records(before(**inputs, **BOTH), wants[0])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_compiled_cold_with_fullgraph_is_one_graph(name: str) -> None:
    reference, inputs = make(name)
    case = {"output_hidden_states": [0, -2], "output_attentions": True}
    want = reference(**inputs, **case)
    with integration.install():
        model, _ = make(name)
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        assert_equal_records(compiled(**inputs, **case), want)
        assert_equal_records(compiled(**inputs, **case), want)
        assert counter.frame_count == 1
        assert overrides(model) == []


def test_uninstalling_puts_every_name_and_class_back() -> None:
    def state() -> dict[str, Any]:
        monkey = monkey_patching
        found: dict[str, Any] = {
            f"{module.__name__}.{name}": value
            for module in (
                output_capturing,
                generic,
                monkey,
                transformers.modeling_utils,
            )
            for name, value in vars(module).items()
        }
        for cls in integration._classes():
            for name, value in vars(cls).items():
                if callable(value):
                    found[f"{cls.__module__}.{cls.__qualname__}.{name}"] = value
                    inner = getattr(value, "__wrapped__", None)
                    found[f"{cls.__module__}.{cls.__qualname__}.{name} inner"] = inner
        return found

    before = state()
    with integration.install():
        during = state()
        with integration.install():
            pass
        assert integration.is_installed(), "an inner uninstall ended the outer one"
    after = state()
    changed = [name for name, value in before.items() if during[name] is not value]
    assert "transformers.utils.output_capturing.capture_outputs" in changed
    assert (
        "transformers.models.llama.modeling_llama.LlamaModel.forward inner" in changed
    )
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert after.keys() == before.keys()


def test_a_class_made_while_installed_is_transformers_own_afterwards() -> None:
    with integration.install():

        class Fresh(LlamaModel):
            @generic.merge_with_config_defaults
            @output_capturing.capture_outputs(tie_last_hidden_states=False)
            def forward(self, input_ids: Any, **kwargs: Any) -> Any:
                h = self.embed_tokens(input_ids)
                for layer in self.layers:
                    h = h + layer.mlp(h)
                return BaseModelOutput(last_hidden_state=h)

        assert integration.CAPTURES in vars(Fresh.forward.__wrapped__)
    ours = [Fresh.forward, Fresh.forward.__wrapped__]
    assert all(integration.CAPTURES not in vars(f) for f in ours)
    cells = dict(
        zip(
            ours[1].__code__.co_freevars,
            [c.cell_contents for c in ours[1].__closure__],
            strict=True,
        )
    )
    assert cells["tie_last_hidden_states"] is False
    model = Fresh(small_models.llama()[0].config)
    assert model(small_models.ids()).last_hidden_state.shape == (2, 7, 32)


def test_every_name_of_the_module_it_stands_in_for_is_there(installed: None) -> None:
    from transformers.utils.output_capturing import (  # noqa: F401
        CompileableContextVar,
        OutputRecorder,
        capture_outputs,
        install_all_output_capturing_hooks,
        install_output_capuring_hook,
        maybe_install_capturing_hooks,
        recursively_install_hooks,
        resolve_hidden_states_indices,
        select_hidden_states,
        selected_hidden_states,
    )

    model, _ = llama()
    assert selected_hidden_states(True) is None
    assert selected_hidden_states(0) == [0]
    assert resolve_hidden_states_indices(model, [0, -1, 9]) == {0, 2}
    assert resolve_hidden_states_indices(model, [-1], 5) == {4}
    assert monkey_patching.get_patch_mapping is patching.get_patch_mapping


# ------------------------------------------------- where we do not follow, row by row


def test_none_falls_back_to_the_config(installed: None) -> None:
    model, inputs = llama(output_hidden_states=True)
    assert model(**inputs, output_hidden_states=None).hidden_states is not None
    assert model(**inputs, output_hidden_states=False).hidden_states is None


def test_zero_selects_the_first_state_also_as_a_vision_layer(installed: None) -> None:
    model, inputs = make("llava")
    pixels = inputs["pixel_values"]
    got = model.model.get_image_features(pixels, vision_feature_layer=0)
    want = model.model.get_image_features(pixels, vision_feature_layer=[0])
    torch.testing.assert_close(got.pooler_output, want.pooler_output)
    llm, inputs = llama()
    assert picked(llm(**inputs, output_hidden_states=0).hidden_states) == [0]


def test_attentions_take_a_selection(installed: None) -> None:
    model, inputs = llama()
    assert picked(model(**inputs, output_attentions=[-1]).attentions) == [1]


def test_whisper_counts_the_layers_of_its_decoder(installed: None) -> None:
    torch.manual_seed(0)
    model, inputs = small_models.whisper(encoder_layers=2, decoder_layers=3)
    model.eval()
    full = model(**inputs, output_hidden_states=True).decoder_hidden_states
    with pytest.warns(UserWarning, match="counted from the end of what ran"):
        got = model(**inputs, output_hidden_states=[-2]).decoder_hidden_states
    assert picked(got) == [2]
    torch.testing.assert_close(got[2], full[2])


def test_swapped_and_appended_layers_are_captured(installed: None) -> None:
    model, inputs = llama()
    model(**inputs, **BOTH)
    model.layers.append(LlamaDecoderLayer(model.config, 1))
    model.layers[0] = LlamaDecoderLayer(model.config, 0)
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3
    assert len(model(**inputs, use_cache=False, **BOTH).hidden_states) == 4


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("passed", [None, False, True])
def test_a_head_works_whatever_return_dict_the_config_has(
    installed: None, said: bool, passed: Any
) -> None:
    config = llama()[0].config
    config.return_dict = said
    model = LlamaForCausalLM(config)
    call = torch.compile(model, backend="eager", fullgraph=True)
    for run in (model, call):
        output = run(small_models.ids(), output_hidden_states=[1], return_dict=passed)
        tuple_wanted = not (said if passed is None else passed)
        assert (type(output) is tuple) == tuple_wanted
        assert output[0].shape == (2, 7, 64)


def test_positional_use_cache_works(installed: None) -> None:
    model, inputs = llama()
    output = model(inputs["input_ids"], None, None, None, None, False)
    assert output.past_key_values is None


@torch.no_grad()
def test_regional_compile_from_the_first_call(installed: None) -> None:
    model, inputs = llama()
    model.eval()
    want = model(**inputs, output_hidden_states=True).hidden_states
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    assert_same(model(**inputs, output_hidden_states=True).hidden_states, want)
    graphs = counter.frame_count
    for selection in ([1], False, [0, -1]):
        model(**inputs, output_hidden_states=selection)
    assert counter.frame_count == graphs


@torch.no_grad()
def test_a_model_that_transformers_has_hooked_before_still_compiles() -> None:
    model, inputs = make("llama")
    want = model(**inputs, **BOTH)  # leaves hooks behind
    assert model.layers[0]._forward_hooks
    with integration.install():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_equal_records(model(**inputs, **BOTH), want)
        assert_equal_records(compiled(**inputs, **BOTH), want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side")
@torch.no_grad()
def test_export(installed: None, strict: bool) -> None:
    model, inputs = make("bert")
    kwargs = inputs | {"output_hidden_states": [0, -2]}
    program = torch.export.export(model, (), kwargs, strict=strict)
    got = program.module()(**kwargs)
    assert_same(tuple(got["hidden_states"]), model(**kwargs).hidden_states)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(installed: None, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, inputs = llama()
    model.train()

    def gradients(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        output = call(**inputs, output_hidden_states=[1], use_cache=False)
        assert len(output.hidden_states) == 3
        loss = output.last_hidden_state.sum() + output.hidden_states[1].pow(2).sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        for got, expected in zip(gradients(call), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_generate_records_at_each_step(installed: None) -> None:
    model = LlamaForCausalLM(llama()[0].config).eval()
    output = model.generate(
        small_models.ids(),
        attention_mask=torch.ones(2, 7, dtype=torch.long),
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_hidden_states=[0, -2],
        return_dict_in_generate=True,
    )
    assert [picked(step) for step in output.hidden_states] == [[0, 1]] * 3
    lengths = [step[0].shape[1] for step in output.hidden_states]
    assert lengths == [7, 1, 1]


@torch.no_grad()
def test_a_backbone(installed: None) -> None:
    from transformers import Dinov2Backbone, Dinov2Config

    config = Dinov2Config(
        **{k: v for k, v in VISION.items() if k != "intermediate_size"},
        out_indices=[1, 3],
    )
    model = Dinov2Backbone(config).eval()
    pixels = torch.randn(1, 3, 16, 16)
    assert overrides(model) == []
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (model, compiled):
        output = call(pixels)
        assert len(output.feature_maps) == 2
        assert output.hidden_states is None
        assert picked(call(pixels, output_hidden_states=[-1]).hidden_states) == [3]


def test_an_untested_release_is_warned_of(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    with pytest.warns(RuntimeWarning, match=r"transformers 5\.99\.0 was not tested"):
        integration.install()
    integration.uninstall()


# -- weights beside fused attention ----------------------------------------------------

WEIGHTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def fused(name: str) -> Any:
    model, inputs = make(name)
    model.set_attn_implementation("sdpa")
    return model, inputs


def assert_weights_of_eager_attention(got: Any, want: Any) -> None:
    names = [n for n in WEIGHTS if getattr(want, n, None)]
    assert names
    for name in names:
        assert_same(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("asked", [True, [0, -1]])
@torch.no_grad()
def test_fused_attention_gives_the_weights_of_eager_attention(
    installed: None, name: str, asked: Any
) -> None:
    model, inputs = fused(name)
    want = make(name)[0](**inputs, output_attentions=asked)

    assert_weights_of_eager_attention(model(**inputs, output_attentions=asked), want)
    assert overrides(model) == []


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
@torch.no_grad()
def test_fused_weights_are_part_of_one_cold_graph(installed: None, name: str) -> None:
    model, inputs = fused(name)
    want = make(name)[0](**inputs, output_attentions=[0, -1])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(**inputs, output_attentions=[0, -1])
    assert_weights_of_eager_attention(got, want)
    # Eager runs of a model that was traced stay out of sight of Dynamo's guards.
    again = model(**inputs, output_attentions=[0, -1])
    assert_weights_of_eager_attention(again, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_weights_inside_checkpoints_train(
    installed: None, compiled: bool
) -> None:
    model, inputs = fused("llama")
    eager, _ = make("llama")
    inputs = {**inputs, "use_cache": False, "output_attentions": [1]}
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    run = (
        torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    )
    gradients = []
    for call, owner in ((run, model), (eager.train(), eager)):
        output = call(**inputs)
        loss = output.last_hidden_state.sum() + output.attentions[1].pow(2).sum()
        loss.backward()
        gradients.append([p.grad for p in owner.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=5e-5)
