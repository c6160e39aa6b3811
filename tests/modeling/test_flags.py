"""Which entries a flag selects, in eager runs and compiled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from fxcapture.modeling.decorators import capture_outputs
from fxcapture.spec.flags import request
from tests.modeling.toys import (
    LAYERS,
    LENGTH,
    Block,
    Model,
    NoConfig,
    Output,
    Untied,
    assert_same,
    config,
    expected,
    overrides,
    picked,
)

ALL = list(range(LENGTH))
X = torch.randn(2, 3, 8)

SELECTIONS = [
    (None, None),
    (False, None),
    ([], None),
    ((), None),
    (True, ALL),
    (0, [0]),
    (1, [1]),
    (4, [4]),
    (-1, [4]),
    (-5, [0]),
    ([0, -2], [0, 3]),
    ((1, 1, -4), [1]),
    ({1, 2}, [1, 2]),
    (range(2), [0, 1]),
    ([True], [1]),
    ([False], [0]),
    (5, []),
    (-6, []),
    ([99], []),
    ([-99, 2], [2]),
]
#: Spellings that Dynamo would turn into tensors.
EAGER_SELECTIONS = [
    (np.int64(1), [1]),
    ([np.int64(1)], [1]),
    (np.array([1, 2]), [1, 2]),
    (torch.tensor(2), [2]),
    (torch.tensor([1, -1]), [1, 4]),
    ([torch.tensor(0)], [0]),
    ([np.bool_(True), np.bool_(False)], [0, 1]),
    (np.bool_(True), ALL),
    (np.bool_(False), None),
    (torch.tensor(True), ALL),
    (iter([0, 2]), [0, 2]),
]


def words(value: Any) -> str:
    """Its ``repr`` without addresses: test names are the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.mark.parametrize(
    ("value", "want"), SELECTIONS + EAGER_SELECTIONS, ids=lambda v: words(v)[:30]
)
def test_a_flag_selects_positions_of_the_full_tuple(value: Any, want: Any) -> None:
    model = Model()
    states = expected(model, X)

    record = model(X, output_hidden_states=value).hidden_states

    assert picked(record) == want
    if want is not None:
        assert_same(record, [h if i in want else None for i, h in enumerate(states)])


@torch._dynamo.config.patch(recompile_limit=64)
def test_every_selection_in_a_row_compiled_cold_with_fullgraph() -> None:
    model = Model()
    states = expected(model, X)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for value, want in SELECTIONS:
        record = compiled(X, output_hidden_states=value).hidden_states
        assert picked(record) == want, value
        if want is not None:
            assert_same(
                record, [h if i in want else None for i, h in enumerate(states)]
            )
    graphs = counter.frame_count
    for value, _ in SELECTIONS:
        compiled(X, output_hidden_states=value)
    assert counter.frame_count == graphs
    assert graphs <= len(SELECTIONS)
    assert overrides(model) == []


def test_seven_selections_are_seven_graphs_at_most_and_none_on_a_repeat() -> None:
    model = Model()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seven = [None, True, [1], [2], [1, 2], [0, -2], -1]
    for value in seven:
        compiled(X, output_hidden_states=value)
    assert counter.frame_count <= 7
    before = counter.frame_count
    for value in seven:
        compiled(X, output_hidden_states=value)
    assert counter.frame_count == before


def test_one_warning_before_the_users_recompile_limit_is_reached() -> None:
    class Warned(Model):
        pass

    compiled = torch.compile(Warned(), backend="eager", fullgraph=True)
    for i in range(6):
        compiled(X, output_hidden_states=[i])
    compiled(X, output_hidden_states=[0, 1])
    with pytest.warns(UserWarning, match="compiled for") as caught:
        compiled(X, output_hidden_states=[0, 2])
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "recompile_limit is 8" in text
    assert "Compile with fxcapture.compile" in text


@pytest.mark.filterwarnings("ignore:.*has been compiled for:UserWarning")
def test_past_the_users_recompile_limit_values_stay_right() -> None:
    model = Model()
    states = expected(model, X)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    wants = [[i] for i in range(5)] + [[i, i + 1] for i in range(4)] + [[0, 4], [1, 4]]
    for want in wants * 2:
        record = compiled(X, output_hidden_states=want).hidden_states
        assert_same(record, [h if i in want else None for i, h in enumerate(states)])
    assert overrides(model) == []


@pytest.mark.parametrize(
    "value",
    ["1", "all", ["1"], 1.0, [1.5], [1.0], [[1]], [None], {1: "a"}, slice(1), object()],
    ids=words,
)
@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_what_is_no_selection_is_refused_by_name(flag: str, value: Any) -> None:
    with pytest.raises(TypeError) as error:
        Model()(X, **{flag: value})
    text = str(error.value)
    assert text.startswith(f"{flag}={value!r} is not a selection")
    assert "what to do: pass True, False, an int, or a list of ints" in text


@pytest.mark.parametrize("flag", ["hidden_states", "attentions"])
def test_none_falls_back_to_the_config_and_false_does_not(flag: str) -> None:
    model = Model(config(**{f"output_{flag}": True}))
    for kwargs in ({}, {f"output_{flag}": None}):
        assert getattr(model(X, **kwargs), flag) is not None
    assert getattr(model(X, **{f"output_{flag}": False}), flag) is None
    assert getattr(model(X, **{f"output_{flag}": []}), flag) is None


def test_the_config_may_hold_a_selection_and_the_call_overrules_it() -> None:
    model = Model(config(output_hidden_states=(0, -1)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (model, compiled):
        assert picked(call(X).hidden_states) == [0, 4]
        assert picked(call(X, output_hidden_states=2).hidden_states) == [2]


@pytest.mark.parametrize(
    ("value", "want"),
    [(True, [0, 1, 2, 3]), ([0], [0]), (-1, [3]), ([1, -4, 9], [0, 1]), (0, [0])],
)
def test_attentions_take_selections_with_a_count_of_their_own(
    value: Any, want: list[int]
) -> None:
    model = Model()
    full = model(X, output_attentions=True).attentions
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (model, compiled):
        record = call(X, output_attentions=value).attentions
        assert len(record) == LAYERS
        assert picked(record) == want
        assert_same(record, [a if i in want else None for i, a in enumerate(full)])


def test_a_positional_flag_counts() -> None:
    class Positional(Model):
        @capture_outputs
        def forward(self, x: Any, output_hidden_states: Any = None) -> Any:
            return Output(self.run(x))

    assert picked(Positional()(X, [1, -1]).hidden_states) == [1, 4]


def test_a_forward_without_kwargs_is_not_handed_the_flag() -> None:
    class Strict(Model):
        @capture_outputs
        def forward(self, x: Any) -> Any:
            return Output(self.run(x))

    assert picked(Strict()(X, output_hidden_states=[1]).hidden_states) == [1]
    assert Strict()(X, output_hidden_states=None).hidden_states is None


def test_an_iterator_is_handed_on_as_something_that_can_be_read_again() -> None:
    seen = []

    class Inner(Model):
        @capture_outputs
        def forward(self, x: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["output_hidden_states"])
            return Output(self.run(x))

    Inner()(X, output_hidden_states=iter([2, 0]))
    assert seen == [(0, 2)]


def test_without_a_config_the_call_alone_decides() -> None:
    model = NoConfig()
    assert model(X).hidden_states is None
    assert picked(model(X, output_hidden_states=[0, 2]).hidden_states) == [0, 2]
    with pytest.raises(ValueError, match="NoConfig cannot select hidden states"):
        model(X, output_hidden_states=-1)


def test_a_negative_index_needs_the_layer_count_and_the_error_says_which() -> None:
    cfg = config()
    del cfg.num_hidden_layers
    model = Model(cfg)
    with pytest.raises(ValueError, match="negative indices") as error:
        model(X, output_hidden_states=[1, -1])
    assert "[-1, 1]" in str(error.value)
    assert "does not define `num_hidden_layers`" in str(error.value)
    assert "use positive indices" in str(error.value)
    assert picked(model(X, output_hidden_states=[1, 99]).hidden_states) == [1]


@pytest.mark.parametrize(("said", "run"), [(2, 3), (6, 3), (1, 3)])
def test_where_config_and_modules_differ_the_modules_decide(
    said: int, run: int
) -> None:
    class Unequal(Untied):
        pass

    Unequal.__qualname__ = f"Unequal{said}{run}"
    model = Unequal(config(num_hidden_layers=said), layers=run)
    states = expected(model, X, tie=False)
    with pytest.warns(UserWarning, match="negative indices were counted from the end"):
        record = model(X, output_hidden_states=[-1, -3]).hidden_states
    want = [None, states[1], None, states[3]]
    assert_same(record, want)
    # Said once.
    assert_same(model(X, output_hidden_states=[-1, -3]).hidden_states, want)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(compiled(X, output_hidden_states=[-1, -3]).hidden_states, want)


def test_a_reused_block_counts_its_calls_without_a_warning() -> None:
    class Shared(Untied):
        def run(self, x: Any, **kwargs: Any) -> Any:
            h = x
            for _ in range(LAYERS):
                h = self.layers[0](h)
            return h

    model = Shared(layers=1)
    full = model(X, output_hidden_states=True).hidden_states
    assert len(full) == LENGTH
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (model, compiled):
        record = call(X, output_hidden_states=[-1, 0]).hidden_states
        assert picked(record) == [0, 4]
        assert_same(record, [full[0], None, None, None, full[4]])


INTS = st.integers(-8, 8)


@given(positions=st.lists(INTS, min_size=1, max_size=5), spelling=st.integers(0, 3))
def test_every_spelling_of_a_selection_is_one_request(
    positions: list[int], spelling: int
) -> None:
    forms = [list, tuple, set, lambda p: iter(p + p)]
    assert request("f", forms[spelling](positions)) == frozenset(positions)


@given(positions=st.lists(INTS, min_size=1, max_size=4))
def test_a_selection_is_what_indexing_the_full_tuple_gives(
    positions: list[int],
) -> None:
    model = Model()
    full = model(X, output_hidden_states=True).hidden_states
    record = model(X, output_hidden_states=positions).hidden_states
    kept = {p % LENGTH for p in positions if -LENGTH <= p < LENGTH}
    assert set(picked(record) or []) == kept
    for p in kept:
        assert torch.equal(record[p], full[p])


def test_blocks_are_found_in_the_live_tree() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    model.layers.append(Block())
    model.layers[0] = Block()
    assert_same(model(X, output_hidden_states=True).hidden_states, expected(model, X))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(X, output_hidden_states=True)
    model.layers.append(Block())
    assert_same(
        compiled(X, output_hidden_states=True).hidden_states, expected(model, X)
    )
