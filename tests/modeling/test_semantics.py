"""What a declaration means, what the output object holds, and what stays alive."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import fxcapture as fxc
from fxcapture.modeling.decorators import (
    OutputRecorder,
    capture_outputs,
    convert_outputs,
    declared_spec,
    merge_with_config_defaults,
    select_hidden_states,
)
from tests.modeling.toys import (
    DIM,
    LAYERS,
    LENGTH,
    Attention,
    Base,
    Block,
    DictModel,
    InPlaceBlock,
    Model,
    Named,
    Output,
    PlainModel,
    Untied,
    assert_same,
    config,
    expected,
    picked,
)
from tests.reference import difference

X = torch.randn(2, 3, DIM)
BOTH = {"output_hidden_states": True, "output_attentions": True}


def both(model: nn.Module) -> list[Any]:
    return [model, torch.compile(model, backend="eager", fullgraph=True)]


def declaring(**declared: Any) -> type[Base]:
    class Declared(Base):
        _can_record_outputs = declared

        @capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            return {"last_hidden_state": self.run(x)}

    return Declared


# ---------------------------------------------------------------- declarations


class SubBlock(Block):
    pass


@pytest.mark.parametrize(
    "declared",
    [
        Block,
        "Block",
        "layers.0",
        OutputRecorder(Block),
        OutputRecorder(class_name="Block"),
        [Block],
        [OutputRecorder(Block, index=0)],
        (SubBlock, "SubBlock"),
        SimpleNamespace(target_class=Block, index=0),
    ],
    ids=str,
)
def test_a_declaration_may_take_any_form(declared: Any) -> None:
    block = SubBlock if "SubBlock" in str(declared) else Block
    model = declaring(hidden_states=declared)(block=block)
    states = expected(model, X)
    twice = isinstance(declared, tuple)
    for call in both(model):
        record = call(X, output_hidden_states=True)["hidden_states"]
        if declared == "layers.0":
            assert len(record) == 2
            torch.testing.assert_close(record[0], states[0])
        else:
            assert len(record) == 1 + LAYERS * (1 + twice)
            torch.testing.assert_close(record[1], states[1])


def test_a_class_name_matches_the_class_and_not_the_end_of_a_path() -> None:
    model = declaring(attentions="Attention")()
    assert len(model(X, output_attentions=True)["attentions"]) == LAYERS
    # No class of this name: whole trailing components of the path.
    model = declaring(attentions="attention")()
    assert len(model(X, output_attentions=True)["attentions"]) == LAYERS
    model = declaring(attentions="tention")()
    assert model(X, output_attentions=True)["attentions"] == ()


@pytest.mark.parametrize(
    ("layer_name", "calls"),
    [
        ("crossattention", LAYERS),
        (".crossattention.", LAYERS),
        ("0.crossattention", 1),
        ("layers.0", 2),
        ("layers", 2 * LAYERS),
        ("cross", 0),
        ("", 0),
    ],
)
def test_layer_name_means_whole_components(layer_name: str, calls: int) -> None:
    class Narrow(Named):
        _can_record_outputs = {  # noqa: RUF012
            "attentions": OutputRecorder(Attention, index=1, layer_name=layer_name)
        }

    record = Narrow()(X, output_attentions=True)["attentions"]
    assert len(record) == calls


def test_two_attentions_of_one_class_are_told_apart() -> None:
    model = Named()
    for call in both(model):
        output = call(X, output_attentions=True)
        h = X * 1.0
        for i, layer in enumerate(model.layers):
            h = h + layer.attention(h)[0]
            weights = layer.crossattention(h.flip(1))[1]
            torch.testing.assert_close(output["cross_attentions"][i], weights)
            h = layer(expected(model, X)[i])
        # A recorder for "attention" does not reach "crossattention".
        assert len(output["attentions"]) == LAYERS
        # cross_attentions follow output_attentions, alone they do nothing.
        assert "cross_attentions" not in call(X, output_cross_attentions=True)


def test_an_index_that_the_output_does_not_have_is_named() -> None:
    model = declaring(attentions=OutputRecorder(Attention, index=2))()
    with pytest.raises(IndexError, match=r"index=2 of the recorder of 'attentions'"):
        model(X, output_attentions=True)
    assert picked(model(X, output_attentions=False).get("attentions")) is None


def test_a_declaration_of_the_wrong_kind_is_refused() -> None:
    model = declaring(attentions=3)()
    with pytest.raises(TypeError, match=r"_can_record_outputs\['attentions'\] holds 3"):
        model(X, output_attentions=True)


def test_a_list_of_recorders_keeps_its_layer_count_key_and_initial_flag() -> None:
    recorder = OutputRecorder(
        Block, capture_initial_hidden_state=False, num_hidden_layers_key="depth"
    )
    for declared in (recorder, [recorder]):
        model = declaring(hidden_states=declared)(
            SimpleNamespace(num_hidden_layers=99, depth=LAYERS)
        )
        states = expected(model, X)[1:]
        for call in both(model):
            record = call(X, output_hidden_states=[0, -1])["hidden_states"]
            assert len(record) == LAYERS
            assert_same(record, [states[0], None, None, states[-1]])


def test_an_empty_list_and_a_missing_declaration() -> None:
    record = declaring(hidden_states=[])()(X, output_hidden_states=True)
    assert record["hidden_states"] == ()

    class Silent(Base):
        _can_record_outputs = None

        @capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            return Output(self.run(x))

    assert Silent()(X, output_hidden_states=True).hidden_states is None


def test_any_other_key_is_asked_for_by_its_own_flag() -> None:
    model = declaring(router_logits=OutputRecorder(Attention, index=0))()
    output = model(X, output_router_logits=[0])
    assert picked(output["router_logits"]) == [0]
    assert output["router_logits"][0].shape == X.shape
    model.config.output_router_logits = True
    assert len(model(X)["router_logits"]) == LAYERS


# ----------------------------------------------------------------- the entries


class KeywordModel(Untied):
    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = x * 1.0
        for layer in self.layers:
            h = layer(h=h)
        return self.norm(h)


def test_the_initial_state_is_the_first_parameter_however_passed() -> None:
    model = KeywordModel()
    for call in both(model):
        record = call(X, output_hidden_states=True).hidden_states
        assert_same(record, expected(model, X, tie=False))


class Optional(Block):
    give = True

    def forward(self, h: torch.Tensor, **kwargs: Any) -> Any:
        return (super().forward(h) if self.give else None), "extra"


def test_none_keeps_its_position() -> None:
    class Skipping(Untied):
        def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = x
            for layer in self.layers:
                new = layer(h)[0]
                h = h if new is None else new
            return self.norm(h)

    model = Skipping(block=Optional)
    model.layers[1].give = False
    for call in both(model):
        record = call(X, output_hidden_states=True).hidden_states
        assert len(record) == LENGTH
        assert picked(record) == [0, 1, 3, 4]
        assert picked(call(X, output_hidden_states=[2, 3]).hidden_states) == [3]


def test_weights_that_a_kernel_does_not_give_make_an_empty_record() -> None:
    class Fused(Attention):
        def forward(self, h: torch.Tensor) -> Any:
            return super().forward(h)[0], None

    model = Model()
    for layer in model.layers:
        layer.attention = Fused()
    for call in both(model):
        assert call(X, output_attentions=True).attentions == ()


@pytest.mark.parametrize("tie", [None, True, False])
def test_the_last_state_is_tied_to_the_output_unless_told_otherwise(tie: Any) -> None:
    for cls, default in ((Model, True), (Untied, False)):
        model = cls(config(tie_last_hidden_states=tie))
        tied = default if tie is None else tie
        for call in both(model):
            output = call(X, output_hidden_states=[-1])
            same = torch.equal(output.hidden_states[-1], output.last_hidden_state)
            assert same == tied
            assert call(X, output_hidden_states=[1]).hidden_states[-1] is None
        if not tied:
            torch.testing.assert_close(
                model.norm(output.hidden_states[-1]), output.last_hidden_state
            )


# ------------------------------------------------------------ the output object


@dataclasses.dataclass(frozen=True)
class Frozen:
    last_hidden_state: Any
    hidden_states: Any = None


class Mapping(OrderedDict):  # type: ignore[type-arg]
    pass


def returning(make: Any) -> Base:
    class Returning(Base):
        @capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            return make(self.run(x))

    return Returning()


@pytest.mark.parametrize(
    "make",
    [
        Output,
        Frozen,
        lambda h: {"last_hidden_state": h},
        lambda h: Mapping(last_hidden_state=h),
    ],
    ids=["dataclass", "frozen", "dict", "mapping"],
)
def test_records_stand_in_the_output_and_return_dict_false_gives_a_tuple(
    make: Any,
) -> None:
    model = returning(make)
    for call in both(model):
        output = call(X, output_hidden_states=[1])
        held = output if isinstance(output, dict) else vars(output)
        assert picked(held["hidden_states"]) == [1]
        values = call(X, output_hidden_states=[1], return_dict=False)
        assert type(values) is tuple
        assert len(values) == 2
        assert picked(values[1]) == [1]
        assert len(call(X, return_dict=False)) == 1


def test_an_output_that_cannot_hold_records_is_refused() -> None:
    model = returning(lambda h: (h,))
    assert isinstance(model(X), tuple)
    with pytest.raises(TypeError, match="returned a tuple, which cannot hold") as error:
        model(X, output_hidden_states=True)
    assert "return a ModelOutput, a dataclass" in str(error.value)

    @dataclasses.dataclass
    class Narrow:
        last_hidden_state: Any

    with pytest.raises(TypeError, match="has no field 'hidden_states'"):
        returning(Narrow)(X, output_hidden_states=True)


def test_return_dict_none_means_the_config() -> None:
    model = Model(config(return_dict=False))
    assert isinstance(model(X), tuple)
    assert isinstance(model(X, return_dict=None), tuple)
    assert isinstance(model(X, return_dict=True), Output)
    assert isinstance(Model()(X, return_dict=None), Output)


class Head(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.config = cfg
        self.model = Model(cfg)

    def score(self, x: torch.Tensor, **kwargs: Any) -> Any:
        output = self.model(x, **kwargs)
        return Output(
            output.last_hidden_state.sum(-1), hidden_states=output.hidden_states
        )


class CapturingHead(Head):
    forward = capture_outputs(Head.score)


class ConvertingHead(Head):
    forward = convert_outputs(Head.score)


@pytest.mark.parametrize("head", [CapturingHead, ConvertingHead])
@pytest.mark.parametrize("said", [False, True, None])
@pytest.mark.parametrize("passed", [False, True, None])
def test_only_the_outermost_decorated_call_converts(
    head: type[Head], said: Any, passed: Any
) -> None:
    model = head(config(return_dict=said))
    wants = said if passed is None else passed
    for call in both(model):
        output = call(X, output_hidden_states=[1], return_dict=passed)
        if wants is False:
            assert isinstance(output, tuple)
            assert picked(output[1]) == [1]
        else:
            assert picked(output.hidden_states) == [1]


# -------------------------------------------------------------- what stays alive


class Watch(TorchDispatchMode):
    """Counts the tensors of one shape that are alive, after each operation."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.refs: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.refs.append(weakref.ref(out))
        alive = [t for ref in self.refs if (t := ref()) is not None]
        self.most = max(self.most, len({t.data_ptr() for t in alive}))
        return out


@pytest.mark.parametrize("selected", [[0], [1], [0, -2], [3, 5, 7], True])
def test_only_selected_states_stay_alive(selected: Any) -> None:
    layers = 10
    model = Untied(config(num_hidden_layers=layers), layers=layers)
    x = torch.randn(2, 5, DIM)
    with torch.no_grad():
        with Watch(x.shape) as plain:
            model(x)
        with Watch(x.shape) as captured:
            record = model(x, output_hidden_states=selected).hidden_states
    k = layers + 1 if selected is True else len(selected)
    assert len(picked(record) or []) == k
    assert k <= captured.most - plain.most + 1
    assert captured.most - plain.most <= k + 1


# --------------------------------------------------------- the other decorators


class Merging(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)
        self.gradient_checkpointing = False

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, x: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        return {"use_cache": use_cache, **kwargs}


def test_arguments_come_from_the_config_unless_they_are_given() -> None:
    model = Merging(use_cache=True, vision_feature_layer=-2)
    assert model(X) == {"use_cache": True, "vision_feature_layer": -2}
    assert model(X, use_cache=False)["use_cache"] is False
    assert model(X, False)["use_cache"] is False
    assert model(X, None)["use_cache"] is True
    assert model(X, use_cache=None)["use_cache"] is True
    assert Merging()(X) == {"use_cache": None}


def test_positional_use_cache_works_in_either_order_of_decorators() -> None:
    class Other(Merging):
        @capture_outputs
        @merge_with_config_defaults
        def forward(self, x: Any, use_cache: Any = None, **kwargs: Any) -> Any:
            return {"use_cache": use_cache}

    for cls in (Merging, Other):
        for call in both(cls(use_cache=True)):
            assert call(X, False) == {"use_cache": False}


def test_a_strict_signature_is_not_handed_what_it_does_not_know() -> None:
    class Strict(Merging):
        @merge_with_config_defaults
        def forward(self, x: Any, use_cache: Any = None) -> Any:
            return use_cache

    assert Strict(use_cache=1, vision_feature_layer=-2)(X) == 1


def test_gradient_checkpointing_switches_the_cache_off_in_training() -> None:
    model = Merging(use_cache=True).train()
    model.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="incompatible with gradient checkpointing"):
        assert model(X)["use_cache"] is False
    assert model(X)["use_cache"] is False  # said once
    assert model.eval()(X)["use_cache"] is True


def test_an_unknown_feature_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="Unexpected select feature strategy: 'bogus'"):
        Merging()(X, vision_feature_select_strategy="bogus")
    assert (
        Merging(vision_feature_select_strategy="full")(X)[
            "vision_feature_select_strategy"
        ]
        == "full"
    )


class Vision(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)
        self.tower = Model()
        self.extract = [0, 2]

    @merge_with_config_defaults
    @select_hidden_states("vision_feature_layer")
    def features(self, x: Any, vision_feature_layer: Any = -2, **kwargs: Any) -> Any:
        return self.tower(x, **kwargs)

    @select_hidden_states(lambda self: [i + 1 for i in self.extract])
    def extracted(self, x: Any, **kwargs: Any) -> Any:
        return self.tower(x, **kwargs)

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.features(x, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        ({}, [3]),
        ({"vision_feature_layer": 0}, [0]),
        ({"vision_feature_layer": [1, -1]}, [1, 4]),
        ({"output_hidden_states": True}, [0, 1, 2, 3, 4]),
        ({"output_hidden_states": [1]}, [1]),
        ({"output_hidden_states": 0}, [0]),
        ({"output_hidden_states": False}, [3]),
        ({"output_hidden_states": None}, [3]),
        ({"output_hidden_states": []}, [3]),
    ],
)
def test_a_method_captures_the_states_it_uses(kwargs: Any, want: list[int]) -> None:
    model = Vision()
    assert picked(model.features(X, **kwargs).hidden_states) == want
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert picked(compiled(X, **kwargs).hidden_states) == want


def test_selection_by_position_by_the_config_and_by_a_function() -> None:
    model = Vision(vision_feature_layer=1)
    assert picked(model.features(X).hidden_states) == [1]
    assert picked(model.features(X, 2).hidden_states) == [2]
    assert picked(model.extracted(X).hidden_states) == [1, 3]


def test_a_selection_that_names_no_argument_is_refused_when_decorating() -> None:
    with pytest.raises(ValueError, match=r"select_hidden_states\('nope'\)"):

        @select_hidden_states("nope")
        def method(self: Any, x: Any, **kwargs: Any) -> None: ...


# ------------------------------------------------------------- declared_spec


def test_a_hundred_selections_through_compile_are_one_graph() -> None:
    model = Model()
    full = model(X, output_hidden_states=True).hidden_states
    counter = CompileCounter()
    spec = declared_spec(model)
    captured = fxc.compile(model, spec, backend=counter, fullgraph=True)
    for k in range(100):
        positions = [k % LENGTH, (k // LENGTH) % LENGTH - LENGTH]
        select = {"hidden_states": positions, "attentions": k % LAYERS}
        records = captured(X, select=select).records
        kept = sorted({p % LENGTH for p in positions})
        assert picked(records["hidden_states"]) == kept
        assert picked(records["attentions"]) == [k % LAYERS]
        # The spec records what the modules gave; the decorator ties the last state.
        for p in kept[:-1]:
            torch.testing.assert_close(records["hidden_states"][p], full[p])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_spec_of_a_declaration() -> None:
    spec = declared_spec(Model(), hidden_states=[0, -2])
    assert list(spec) == ["hidden_states", "attentions"]
    assert spec["hidden_states"].initial
    assert spec["hidden_states"].output == 0
    assert spec["hidden_states"].select == (-2, 0)
    assert spec["hidden_states"].target.parts == tuple(
        f"layers.{i}" for i in range(LAYERS)
    )
    assert spec["attentions"].output == 1
    assert not spec["attentions"].initial


def test_the_spec_of_a_head_and_of_several_sub_models() -> None:
    assert list(declared_spec(Head(config()))) == ["hidden_states", "attentions"]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Model(), Model()

    spec = declared_spec(Pair())
    assert list(spec) == [
        "encoder_hidden_states",
        "encoder_attentions",
        "decoder_hidden_states",
        "decoder_attentions",
    ]
    assert spec["decoder_attentions"].target.parts[0] == "decoder.layers.0.attention"


def test_without_a_spec_what_is_declared_stands_in_the_output_too() -> None:
    model = Model()
    full = model(X, **BOTH)
    output, records = fxc.compile(model, backend="eager")(X)

    assert list(records) == ["hidden_states", "attentions"]
    assert output.hidden_states is records["hidden_states"]
    torch.testing.assert_close(output.attentions, full.attentions)
    # A dict without such entries is left as it is.
    assert list(fxc.compile(DictModel(), backend="eager")(X).output) == [
        "last_hidden_state",
        "past",
    ]


def test_a_spec_needs_a_declaration_and_known_names() -> None:
    with pytest.raises(LookupError, match="Linear declares nothing"):
        declared_spec(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'hidden_state' is not a record of Model"):
        declared_spec(Model(), hidden_state=[0])
    assert list(declared_spec(PlainModel())) == ["hidden_states", "attentions"]
    two = declaring(x=[OutputRecorder(Attention, index=0), OutputRecorder(Block, 1)])
    with pytest.raises(ValueError, match=r"name the elements \[0, 1\]"):
        declared_spec(two())


def test_in_place_blocks_do_not_alias_entries() -> None:
    model = Untied(block=InPlaceBlock)
    with torch.no_grad():
        record = model(X, output_hidden_states=True).hidden_states
    assert len({h.data_ptr() for h in record}) == LENGTH


def test_dict_models_take_both_records() -> None:
    output = DictModel()(X, **BOTH)
    assert list(output) == ["last_hidden_state", "past", "hidden_states", "attentions"]


class Nested(nn.Module):
    """Returns one tensor in containers of several kinds."""

    def forward(self, x: torch.Tensor) -> Any:
        return [x, {"a": x, "b": "text"}, (x, None)]


def test_entries_that_a_module_returned_in_containers_are_copied_too() -> None:
    class Containers(nn.Module):
        _can_record_outputs = {"parts": Nested}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested()

        @capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            x = x * 1.0
            self.nested(x)
            x.zero_()
            return {"x": x}

    one = torch.ones(2)
    for call in both(Containers()):
        [copied] = call(one, output_parts=True)["parts"]
        assert difference([one, {"a": one, "b": "text"}, (one, None)], copied) == ""
