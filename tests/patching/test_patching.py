"""The patch registry: atomic, per instance, undone."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxcapture.modeling import patching
from fxcapture.modeling.decorators import OutputRecorder, capture_outputs
from fxcapture.modeling.patching import (
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from tests.modeling.toys import LAYERS, LENGTH, Attention, Base, Model, Output, picked

X = torch.randn(2, 3, 8)


class Experts(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2


class OtherExperts(nn.Module):
    """No sub-class of what it replaces."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * 3


class MoE(Base):
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(Experts, capture_initial_hidden_state=False),
        "by_class": Experts,
        "by_name": "Experts",
        "in_list": [Experts, OutputRecorder(Attention, index=1)],
        "unrelated": OutputRecorder(class_name="attention"),
        "nothing": None,
    }

    def __init__(self, experts: type[nn.Module] = Experts) -> None:
        super().__init__(block=experts)

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return {"out": self.run(x)}


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    clear_patch_mapping()
    yield
    clear_patch_mapping()


def test_a_replaced_class_is_recorded_after_patching_and_not_before() -> None:
    register_patch_mapping({"Experts": OtherExperts})
    model = MoE(OtherExperts)
    assert model(X, output_hidden_states=True)["hidden_states"] == ()
    patch_output_recorders(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (model, compiled):
        record = call(X, output_hidden_states=[1])["hidden_states"]
        assert len(record) == LAYERS
        torch.testing.assert_close(record[1], X * 9)
    assert model._can_record_outputs["by_class"] is OtherExperts
    assert model._can_record_outputs["by_name"] is OtherExperts
    assert model._can_record_outputs["in_list"][0] is OtherExperts
    assert model._can_record_outputs["in_list"][1].target_class is Attention
    assert model._can_record_outputs["unrelated"].target_class is None


def test_patching_is_per_instance_and_idempotent() -> None:
    other = MoE()
    register_patch_mapping({"Experts": OtherExperts, "OtherExperts": Experts})
    model = MoE(OtherExperts)
    for _ in range(3):
        patch_output_recorders(model)
        assert model._can_record_outputs["by_class"] is OtherExperts
    assert MoE._can_record_outputs["by_class"] is Experts
    assert other._can_record_outputs["by_class"] is Experts
    assert len(other(X, output_hidden_states=True)["hidden_states"]) == LAYERS


def test_unregistering_restores_and_compiled_code_notices() -> None:
    model = MoE(OtherExperts)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(X, output_by_class=True)["by_class"] == ()
    register_patch_mapping({"Experts": OtherExperts})
    patch_output_recorders(model)
    assert len(compiled(X, output_by_class=True)["by_class"]) == LAYERS
    unregister_patch_mapping(["Experts"])
    assert "_can_record_outputs" not in vars(model)
    assert model._can_record_outputs["by_class"] is Experts
    assert compiled(X, output_by_class=True)["by_class"] == ()


def test_an_instance_declaration_of_its_own_is_restored_too() -> None:
    model = MoE(OtherExperts)
    mine = {"hidden_states": Experts}
    model._can_record_outputs = mine
    register_patch_mapping({"Experts": OtherExperts})
    patch_output_recorders(model)
    assert model._can_record_outputs["hidden_states"] is OtherExperts
    clear_patch_mapping()
    assert model._can_record_outputs is mine


def test_sub_models_are_patched_and_a_copy_keeps_the_patch() -> None:
    outer = nn.Sequential(MoE(OtherExperts))
    register_patch_mapping({"^Exp": OtherExperts})
    patch_output_recorders(outer)
    copied = copy.deepcopy(outer)
    for model in (outer[0], copied[0]):
        assert len(model(X, output_hidden_states=True)["hidden_states"]) == LAYERS


def test_exact_names_come_before_patterns_and_patterns_in_order() -> None:
    class A(nn.Module): ...

    class B(nn.Module): ...

    class C(nn.Module): ...

    register_patch_mapping({".*Attention$": A, "Att": B})
    register_patch_mapping({"LlamaAttention": C})
    mapping = get_patch_mapping()
    assert patching._replacement("LlamaAttention", mapping) is C
    assert patching._replacement("BertAttention", mapping) is A
    assert patching._replacement("AttentionBlock", mapping) is B
    assert patching._replacement("Mlp", mapping) is None
    assert patching._replacement("attention", mapping) is None


def test_registration_is_all_or_nothing() -> None:
    register_patch_mapping({"A": Experts})
    with pytest.raises(ValueError, match="'A' already has a patch mapping") as error:
        register_patch_mapping({"B": Experts, "A": OtherExperts})
    assert "Use overwrite=True" in str(error.value)
    assert get_patch_mapping() == {"A": Experts}
    with pytest.raises(TypeError, match="'C' must be a class, got Linear"):
        register_patch_mapping({"B": Experts, "C": nn.Linear(1, 1)})
    with pytest.raises(
        TypeError, match=r"must be a subclass of nn\.Module, got .*Names"
    ):
        register_patch_mapping({"B": Experts, "C": SimpleNamespace})
    with pytest.raises(TypeError, match="Key 3 must be a class name"):
        register_patch_mapping({"B": Experts, 3: Experts})
    assert get_patch_mapping() == {"A": Experts}
    register_patch_mapping({"B": Experts, "A": OtherExperts}, overwrite=True)
    assert get_patch_mapping() == {"A": OtherExperts, "B": Experts}


def test_unregistering_is_all_or_nothing() -> None:
    register_patch_mapping({"A": Experts, "B": Experts})
    with pytest.raises(ValueError, match="'Z' not found in monkey patch mapping"):
        unregister_patch_mapping(["A", "Z"])
    assert list(get_patch_mapping()) == ["A", "B"]
    with pytest.raises(TypeError, match=r"is a string; pass a list of keys"):
        unregister_patch_mapping("AB")
    unregister_patch_mapping(["A", "B"])
    assert get_patch_mapping() == {}


def test_the_mapping_is_given_as_a_copy() -> None:
    get_patch_mapping()["A"] = Experts
    assert get_patch_mapping() == {}


def test_a_pattern_that_is_none_matches_its_own_name_only() -> None:
    register_patch_mapping({"Experts(": OtherExperts})
    with pytest.warns(UserWarning, match=r"'Experts\(' is not a regular expression"):
        patch_output_recorders(MoE())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clear_patch_mapping()


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    module = types.ModuleType("toy_package.modeling")
    module.Experts = Experts
    module.LlamaAttention = Attention
    module.helper = len
    sys.modules["toy_package.modeling"] = module
    yield module
    del sys.modules["toy_package.modeling"]


def test_apply_patches_replaces_and_puts_back(package: types.ModuleType) -> None:
    class Fast(nn.Module): ...

    register_patch_mapping({"Experts": OtherExperts, "Attention$": Fast})
    with apply_patches(["toy_package"]):
        assert package.Experts is OtherExperts
        assert package.LlamaAttention is Fast
    assert package.Experts is Experts
    assert package.LlamaAttention is Attention
    assert package.helper is len


def test_apply_patches_puts_back_when_the_block_raises(
    package: types.ModuleType,
) -> None:
    register_patch_mapping({"Experts": OtherExperts})
    during = []

    def build() -> None:
        with apply_patches(["toy_package"]):
            during.append(package.Experts)
            raise KeyError

    with pytest.raises(KeyError):
        build()
    assert during == [OtherExperts]
    assert package.Experts is Experts


def test_models_without_a_match_are_left_alone() -> None:
    model = Model()
    before = vars(model).copy()
    register_patch_mapping({"Nothing": OtherExperts})
    patch_output_recorders(model)
    assert vars(model) == before
    assert picked(model(X, output_hidden_states=True).hidden_states) == list(
        range(LENGTH)
    )
    assert isinstance(model(X), Output)
