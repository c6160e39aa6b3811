"""Outputs taken apart and put together again, and elements found in them."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxcapture as fxc
from fxcapture.errors import ElementError, UnsupportedOutputError
from fxcapture.trace.structure_text import encode, parse
from tests.reference import assert_same


class Colour(enum.Enum):
    RED = 1


class Letter(enum.StrEnum):
    A = "a"


class Point(NamedTuple):
    x: Any
    y: Any


class SizeLike(tuple):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = None

    def __post_init__(self) -> None:
        if self.first == "never twice":
            raise AssertionError


class Items(list):
    pass


class Table(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("a rebuilt container runs no code of its own")


def round_trip(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    structure = parse(encode(value, tensors, sizes))
    return structure.build(tensors.__getitem__, sizes.__getitem__)


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([Colour.RED, torch.float16, torch.device("cpu")])
    | st.integers(0, 9).map(lambda n: torch.full((2,), n))
)
odd_keys = st.sampled_from(
    [Colour.RED, Letter.A, torch.float16, torch.device("cpu"), 1.5, float("inf"), b"x",
     frozenset([1]), int, Ellipsis, True, None, ((), (Colour.RED, "a")), ("a:,)",)]
)  # fmt: skip
keys = (
    st.text(max_size=5)
    | st.integers(-5, 5)
    | st.tuples(st.integers(0, 3) | odd_keys)
    | odd_keys
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(Items)
        | st.lists(inner, max_size=3).map(SizeLike)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Frozen, inner, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_a_value_taken_apart_and_built_again_is_the_same(value: Any) -> None:
    assert_same(value, round_trip(value))


@given(st.text(), st.text())
def test_text_of_any_kind_survives_as_key_and_value(key: str, value: str) -> None:
    assert round_trip({key: value, "after": [value]}) == {key: value, "after": [value]}


@given(values)
def test_tensors_are_handed_over_in_order_and_not_copied(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    structure = parse(encode(value, tensors, []))

    assert list(structure.leaves("tensor")) == list(range(len(tensors)))
    built = structure.build(tensors.__getitem__, lambda i: 0)
    again: list[torch.Tensor] = []
    encode(built, again, [])
    assert all(a is b for a, b in zip(tensors, again, strict=True))


@pytest.mark.parametrize(
    "value",
    [
        (),
        [],
        {},
        torch.Size([2, 3]),
        torch.topk(torch.arange(4.0), 2),
        torch.max(torch.arange(6.0).view(2, 3), dim=1),
        defaultdict(list, {"a": 1}),
        {"quote'\"\\": ("it's", 'say "x"', "a\\", "{,:}()")},
        {("a", 1): 2, ((1, 2), "b:}"): None, -3: 4.5, 1.5: True},
        [[[[[1]]]]],
        (float("nan"), float("inf"), -0.0, 1e-300),
    ],
)
def test_particular_values_survive(value: Any) -> None:
    assert_same(value, round_trip(value))


def test_the_output_of_a_transformers_model_survives() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    value = BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=None)

    built = round_trip(value)

    assert type(built) is BaseModelOutputWithPast
    assert built.last_hidden_state is value["last_hidden_state"]
    assert built.hidden_states is None
    assert list(built) == list(value)
    assert built[0] is built.last_hidden_state


def test_a_rebuilt_container_runs_no_constructor_and_no_setter() -> None:
    table = Table.__new__(Table)
    dict.__setitem__(table, "a", 1)
    frozen = object.__new__(Frozen)
    object.__setattr__(frozen, "first", "never twice")
    object.__setattr__(frozen, "second", 2)

    assert dict(round_trip(table)) == {"a": 1}
    assert round_trip(frozen).first == "never twice"


def test_symbolic_sizes_come_back_as_the_numbers_of_the_run() -> None:
    sizes: list[int] = []
    structure = parse(encode((torch.Size([2, 3]), 4, True), [], sizes))

    assert sizes == [2, 3, 4]
    built = structure.build(lambda i: None, [7, 8, 9].__getitem__)
    assert built == (torch.Size([7, 8]), 9, True)
    assert type(built[0]) is torch.Size


class Opaque:
    pass


def test_an_object_of_another_class_is_refused_by_name_and_only_when_built() -> None:
    structure = parse(encode({"cache": [Opaque()], "h": torch.ones(1)}, [], []))

    assert structure.opaque() == ("['cache'][0]", Opaque)
    assert structure.element("h", "the output").opaque() is None
    with pytest.raises(UnsupportedOutputError, match="class Opaque cannot be recorded"):
        structure.build(lambda i: torch.ones(1), lambda i: 0)


def test_an_endless_container_ends_as_an_opaque_leaf() -> None:
    value: list[Any] = []
    value.append(value)

    found = parse(encode(value, [], [])).opaque()

    assert found is not None
    assert found[1] is list


# --------------------------------------------------------------------------------------
# Elements
# --------------------------------------------------------------------------------------


def element_of(value: Any, name: Any) -> Any:
    tensors: list[Any] = []
    sizes: list[Any] = []
    structure = parse(encode(value, tensors, sizes)).element(name, "the output")
    return structure.build(tensors.__getitem__, sizes.__getitem__)


@given(st.lists(st.integers(), min_size=1, max_size=5), st.data())
def test_an_int_names_an_element_as_indexing_does(items: list[int], data: Any) -> None:
    i = data.draw(st.integers(-len(items), len(items) - 1))

    assert element_of(tuple(items), i) == items[i]
    assert element_of(items, i) == items[i]


@pytest.mark.parametrize(
    ("value", "name", "wanted"),
    [
        ({"a": 1, "b": 2}, "b", 2),
        ({3: "x"}, 3, "x"),
        (Point(1, 2), "y", 2),
        (Point(1, 2), -1, 2),
        (Frozen(1, 2), "second", 2),
        (Frozen(None, 2), 0, 2),
        (Frozen(1, 2), -1, 2),
        (torch.topk(torch.arange(4.0), 2), "indices", torch.tensor([3, 2])),
        ((1, 2), None, (1, 2)),
        (7, 0, 7),
        (None, 0, None),
        ("text", 0, "text"),
        (7, None, 7),
        (torch.Size([4, 5]), 0, torch.Size([4, 5])),
    ],
)
def test_elements_by_position_key_and_field(value, name, wanted) -> None:
    assert_same(wanted, element_of(value, name))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ((1, 2), 2),
        ((1, 2), -3),
        ((), 0),
        ([1], "first"),
        (Point(1, 2), "z"),
        ({"a": 1}, "b"),
        ({"a": 1}, 0),
        (Frozen(1), "third"),
        (Frozen(1, 2), 2),
        (7, 1),
        (torch.ones(2), -1),
        (torch.ones(2), "hidden"),
        (None, 3),
        ("text", "key"),
        (torch.Size([4, 5]), 1),
        (Opaque(), "keys"),
    ],
)
def test_an_element_that_does_not_exist_is_an_error(value: Any, name: Any) -> None:
    with pytest.raises(ElementError, match=f"output={name!r} does not exist"):
        element_of(value, name)


# --------------------------------------------------------------------------------------
# Keys that are no literals
# --------------------------------------------------------------------------------------


class Keyed(nn.Module):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def forward(self, x):
        return {self.key: x + 1, "other": x}


class Broken(nn.Module):
    def __init__(self, key: Any, breaks: bool) -> None:
        super().__init__()
        self.keyed = Keyed(key)
        self.breaks = breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.keyed(x)["other"] * 2


KEYS = [Colour.RED, Letter.A, torch.float32, torch.device("cpu"), float("inf")]
KEYS += [(1, Colour.RED), frozenset([1]), Point(1, "a"), int, Frozen(1), Ellipsis]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_any_key_is_recorded_in_every_way(key: Any) -> None:
    x = torch.ones(2)
    spec = {"d": fxc.Tap("keyed")}
    model = Broken(key, False)
    function, params, buffers = fxc.functional(model, spec)
    ways = [
        fxc.compile(model, spec, backend="eager", fullgraph=True),
        fxc.compile(Broken(key, True), spec, backend="eager"),
        fxc.export(model, (x,), spec=spec),
        lambda x: function(params, buffers, x),
    ]
    for captured in ways:
        found = captured(x).records["d"][0]

        assert list(found) == [key, "other"]
        assert type(next(iter(found))) is type(key)
        assert torch.equal(found[key], x + 1)
    torch._dynamo.reset()


def test_a_tensor_is_no_key() -> None:
    with pytest.raises(UnsupportedOutputError, match="a tensor as a key"):
        round_trip({torch.ones(2): 1})
