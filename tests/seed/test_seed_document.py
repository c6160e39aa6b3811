"""Every code block of "Tracing model intermediate outputs", run.

Only the names of classes that the document leaves open are filled in, and a model of
random weights stands in for a download.  Values are those of transformers' own
implementation where that is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeModel,
    Qwen3Config,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPastAndCrossAttentions,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.utils import generic, output_capturing

from fxcapture.integrations import transformers as integration
from fxcapture.modeling import decorators as modeling
from fxcapture.modeling.patching import (
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from tests.modeling.toys import assert_same, picked

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
RECORDS = ("hidden_states", "attentions", "cross_attentions")


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def direct(model: nn.Module) -> Any:
    return model


RUNS = pytest.mark.parametrize("run", [direct, compiled])


# ------------------------------------------- Capture only the hidden states you need


def qwen3(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        **fields,
    )
    return AutoModel.from_config(config).eval()


@pytest.fixture(scope="module")
def reference() -> Any:
    with torch.no_grad():
        return qwen3()(input_ids=IDS, output_hidden_states=True).hidden_states


IDS = torch.arange(6).view(2, 3)


@RUNS
@torch.no_grad()
def test_capture_only_the_hidden_states_you_need(run: Any, reference: Any) -> None:
    inputs = {"input_ids": IDS}
    with integration.install():
        model = run(qwen3())
        outputs = model(**inputs, output_hidden_states=[0, -2])
    assert len(outputs.hidden_states) == 29
    assert [i for i, h in enumerate(outputs.hidden_states) if h is not None] == [0, 27]
    assert_same(
        outputs.hidden_states,
        [h if i in (0, 27) else None for i, h in enumerate(reference)],
    )


@torch.no_grad()
def test_the_rules_below_it(reference: Any) -> None:
    with integration.install():
        model = qwen3()
        assert picked(model(IDS, output_hidden_states=5).hidden_states) == [5]
        assert picked(model(IDS, output_hidden_states=[29, -30]).hidden_states) == []
        model.config.output_hidden_states = True
        assert_same(model(IDS).hidden_states, reference)
        model.config.output_hidden_states = False
        vars(model.config)["num_hidden_layers"] = None  # past its validation
        assert picked(
            model(IDS, output_hidden_states=[1], use_cache=False).hidden_states
        ) == [1]
        with pytest.raises(ValueError, match="negative indices"):
            model(IDS, output_hidden_states=[-1], use_cache=False)


# ------------------------------- Map output fields to submodules, and OutputRecorder


class MyConfig(PreTrainedConfig):
    model_type = "my"

    def __init__(self, num_hidden_layers: int = 3, **kwargs: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class MyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, h: torch.Tensor, other: torch.Tensor) -> Any:
        weights = torch.softmax(h @ other.transpose(1, 2), -1)
        return self.project(weights @ other), weights


class MyDecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MyAttention()
        self.crossattention = MyAttention()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(hidden_states, hidden_states)[0]
        memory = hidden_states.flip(1)
        return hidden_states + self.crossattention(hidden_states, memory)[0]


def document_model(source: Any, merge_with_config_defaults: Any) -> Any:
    """The document's block, with decorators from ``source``."""
    capture_outputs, OutputRecorder = source.capture_outputs, source.OutputRecorder

    class MyPreTrainedModel(PreTrainedModel):
        config_class = MyConfig
        _can_record_outputs = {  # noqa: RUF012
            "hidden_states": MyDecoderBlock,
            "attentions": OutputRecorder(MyAttention, layer_name="attention", index=1),
            "cross_attentions": OutputRecorder(
                MyAttention, layer_name="crossattention", index=1
            ),
        }

    # transformers keys its registry on the class's name, so each version needs its own.
    MyPreTrainedModel.__qualname__ = f"MyPreTrainedModel of {source.__name__}"

    class MyModel(MyPreTrainedModel):
        def __init__(self, config: MyConfig) -> None:
            super().__init__(config)
            self.embed_tokens = nn.Embedding(16, 8)
            self.layers = nn.ModuleList(
                [MyDecoderBlock() for _ in range(config.num_hidden_layers)]
            )
            self.norm = nn.LayerNorm(8)
            self.post_init()

        @merge_with_config_defaults
        @capture_outputs
        def forward(
            self,
            input_ids: torch.LongTensor | None = None,
            past_key_values: Cache = None,
            **kwargs: Any,
        ) -> BaseModelOutputWithPast:
            hidden_states = self.embed_tokens(input_ids)
            for layer in self.layers:
                hidden_states = layer(hidden_states, **kwargs)
            return BaseModelOutputWithPastAndCrossAttentions(
                last_hidden_state=self.norm(hidden_states),
                past_key_values=past_key_values,
            )

    MyModel.__qualname__ = f"MyModel of {source.__name__}"
    torch.manual_seed(0)
    return MyModel(MyConfig()).eval()


@RUNS
@pytest.mark.parametrize(
    "asked",
    [
        {"output_hidden_states": True, "output_attentions": True},
        {"output_hidden_states": [0, -1]},
        {"output_hidden_states": 2, "output_attentions": True},
        {"output_attentions": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_decorators_declarations_and_recorders(run: Any, asked: Any) -> None:
    theirs = document_model(output_capturing, generic.merge_with_config_defaults)
    ours = document_model(modeling, modeling.merge_with_config_defaults)
    want = theirs(IDS, **asked)
    model = run(ours)
    got = model(IDS, **asked)
    for name in RECORDS:
        assert_same(got.get(name), want.get(name))
    values = model(IDS, **asked, return_dict=False)
    assert isinstance(values, tuple)
    assert len(values) == len(theirs(IDS, **asked, return_dict=False))


# ----------------------------------- Capture only the hidden states a method uses


class MyVisionLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = MyConfig()
        self.vision_tower = document_model(
            modeling, modeling.merge_with_config_defaults
        )
        self.multi_modal_projector = nn.Linear(8, 4)
        self.extract_layers = [0, 2]

    @modeling.select_hidden_states("vision_feature_layer")
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        vision_feature_layer: int | list[int] = -2,
        **kwargs: Any,
    ) -> Any:
        asked.append(kwargs["output_hidden_states"])
        image_outputs = self.vision_tower(pixel_values, return_dict=True, **kwargs)
        image_features = image_outputs.hidden_states[vision_feature_layer]
        kept.append(picked(image_outputs.hidden_states))
        return self.multi_modal_projector(image_features)

    @modeling.merge_with_config_defaults
    @modeling.select_hidden_states("vision_feature_layer")
    def from_config(
        self, pixel_values: Any, vision_feature_layer: Any = None, **kwargs: Any
    ) -> Any:
        return self.vision_tower(pixel_values, **kwargs)

    @modeling.select_hidden_states(lambda self: [i + 1 for i in self.extract_layers])
    def extracted(self, pixel_values: Any, **kwargs: Any) -> Any:
        return self.vision_tower(pixel_values, **kwargs)

    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        return self.get_image_features(pixel_values, **kwargs)


asked: list[Any] = []
kept: list[Any] = []


@pytest.fixture(autouse=True)
def fresh_lists() -> None:
    asked.clear()
    kept.clear()


@RUNS
@torch.no_grad()
def test_a_method_captures_what_it_uses(run: Any) -> None:
    torch.manual_seed(0)
    model = MyVisionLanguageModel()
    full = model.vision_tower(IDS, output_hidden_states=True).hidden_states
    for kwargs, layer in [({}, -2), ({"vision_feature_layer": 0}, 0)]:
        features = run(model)(IDS, **kwargs)
        torch.testing.assert_close(features, model.multi_modal_projector(full[layer]))
    assert asked[:1] == [-2]
    assert kept[:1] == [[2]]
    assert kept[-1] == [0]


@torch.no_grad()
def test_indices_from_the_config_from_the_model_and_from_the_caller() -> None:
    model = MyVisionLanguageModel()
    model.config.vision_feature_layer = 1
    assert picked(model.from_config(IDS).hidden_states) == [1]
    assert picked(model.extracted(IDS).hidden_states) == [1, 3]
    model.get_image_features(IDS, output_hidden_states=True)
    assert kept == [[0, 1, 2, 3]]


# --------------------------------------------------------------- Patch layer classes


class SequentialExperts(Qwen2MoeExperts):
    pass


class FusedAttention(nn.Module):
    pass


class CustomLlamaAttention(nn.Module):
    pass


@pytest.fixture
def clean_registry() -> Iterator[None]:
    clear_patch_mapping()
    yield
    clear_patch_mapping()


def test_patch_layer_classes(clean_registry: None) -> None:
    # Exact name - replaces only Qwen2MoeExperts
    register_patch_mapping({"Qwen2MoeExperts": SequentialExperts})
    # Regex - replaces every class whose name ends in "Attention"
    register_patch_mapping({".*Attention$": FusedAttention})
    # Anchored version - only matches Llama2Attention, Llama3Attention, ...
    register_patch_mapping({"^Llama\\d+Attention$": CustomLlamaAttention})
    with pytest.raises(ValueError, match="Use overwrite=True"):
        register_patch_mapping({"Qwen2MoeExperts": SequentialExperts})

    unregister_patch_mapping(["Qwen2MoeExperts", ".*Attention$"])
    assert list(get_patch_mapping()) == ["^Llama\\d+Attention$"]


class CustomExperts(nn.Module):
    """Does not derive from what it replaces."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = [experts]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.experts[0](*args, **kwargs)


@RUNS
@torch.no_grad()
def test_patch_output_recorders(run: Any, clean_registry: None) -> None:
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with integration.install():
        model = Qwen2MoeModel(config).eval()
        model._can_record_outputs = model._can_record_outputs | {
            "expert_outputs": Qwen2MoeExperts
        }
        want = model(IDS, output_expert_outputs=True)["expert_outputs"]
        assert len(want) == 2
        for layer in model.layers:
            layer.mlp.experts = CustomExperts(layer.mlp.experts)
        assert run(model)(IDS, output_expert_outputs=True)["expert_outputs"] == ()

        register_patch_mapping({"Qwen2MoeExperts": CustomExperts})
        patch_output_recorders(model)
        got = run(model)(IDS, output_expert_outputs=True)["expert_outputs"]
        assert_same(got, want)
