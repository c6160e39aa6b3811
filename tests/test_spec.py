"""Taps and specs: normalised when made, frozen, hashable, to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxcapture import AttentionWeights, CaptureSpec, Tap
from fxcapture.spec.positions import normalise_select
from tests.models import Attention


def second_half(h: torch.Tensor) -> torch.Tensor:
    return h[:, h.shape[1] // 2 :]


class Index:
    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (None, None),
        (0, (0,)),
        (-1, (-1,)),
        ([2, 0, 2], (0, 2)),
        ((), ()),
        ({3, 1}, (1, 3)),
        (range(0, 6, 2), (0, 2, 4)),
        (iter([1, 0]), (0, 1)),
        (Index(), (2,)),
        ([Index(), 1], (1, 2)),
        (torch.tensor(3), (3,)),
    ],
)
def test_positions_are_kept_sorted_and_once(written: Any, kept: Any) -> None:
    assert normalise_select(written) == kept


@given(
    st.tuples(*[st.none() | st.integers(-9, 9)] * 2, st.sampled_from([None, 1, 2, -1])),
    st.integers(0, 9),
)
def test_a_slice_selects_what_slicing_would(parts: Any, length: int) -> None:
    kept = normalise_select(slice(*parts))

    assert list(kept.indices(length)) == list(range(length))[slice(*parts)]
    hash(kept)


RICH = CaptureSpec(
    {
        "hidden": Tap("layers.*", output=0, select=[0, -2], initial=True),
        "sliced": Tap(["a", "b.**"], select=slice(None, -1, 2), optional=True),
        "attention": Tap(Attention, output="weights", layer_name="cross", detach=True),
        "inputs": Tap("re:.*mlp", point="input", output="h", dtype=torch.bfloat16),
        "last": Tap("norm", reduce="last", device="cpu"),
        "custom": Tap(nn.Linear, reduce=second_half),
    }
)


def test_a_spec_survives_json() -> None:
    text = RICH.to_json()

    again = CaptureSpec.from_json(text, trust=[__name__, "tests.models", "torch.nn"])

    assert again == RICH
    assert hash(again) == hash(RICH)
    assert list(again) == list(RICH)
    assert json.loads(text)["format"] == 1


def test_a_spec_survives_pickle() -> None:
    again = pickle.loads(pickle.dumps(RICH))

    assert again == RICH
    assert hash(again) == hash(RICH)


def test_what_cannot_be_imported_cannot_be_stored() -> None:
    for tap in (Tap(lambda p, m: True), Tap("a", reduce=lambda h: h)):
        with pytest.raises(ValueError, match="cannot be written to JSON"):
            CaptureSpec({"r": tap}).to_json()


def test_specs_are_equal_by_value_and_order() -> None:
    assert CaptureSpec({"a": "x"}) == CaptureSpec([("a", Tap("x"))])
    assert CaptureSpec({"a": "x", "b": "y"}) != CaptureSpec({"b": "y", "a": "x"})
    assert CaptureSpec({"a": "x"}) != {"a": Tap("x")}
    assert len({CaptureSpec({"a": "x"}), CaptureSpec({"a": Tap("x")})}) == 1


def test_a_tap_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tap("a").optional = True


def test_a_tap_can_be_changed_into_another() -> None:
    tap = Tap(Attention, output=1, select=slice(1, None), layer_name="x", detach=True)

    changed = dataclasses.replace(tap, output=0)

    assert changed == Tap(
        Attention, output=0, select=slice(1, None), layer_name="x", detach=True
    )
    assert tap.output == 1


def test_a_tap_prints_as_it_could_be_written() -> None:
    assert repr(Tap("a.*", select=[0, -1], initial=True)) == (
        "Tap('a.*', select=[0, -1], initial=True)"
    )
    for written in ("-1", "[-1]", "[3, 0, -2, 3]", "slice(0, None, 2)"):
        tap = Tap("a.*", select=eval(written))
        assert repr(tap) == f"Tap('a.*', select={written})"
        assert repr(dataclasses.replace(tap, initial=True)).count(f"select={written}")
        assert repr(pickle.loads(pickle.dumps(tap))) == repr(tap)
    assert Tap("a", select=[0, -1]) == Tap("a", select=(-1, 0, 0))
    assert hash(Tap("a", select=1)) == hash(Tap("a", select=[1]))
    assert repr(AttentionWeights("a.*", select=-1, heads=[3, 0], queries=-1)) == (
        "AttentionWeights('a.*', select=-1, heads=[3, 0], queries=[-1])"
    )
    assert "Attention" in repr(Tap(Attention))


def test_a_spec_holds_no_module_and_reads_as_a_mapping() -> None:
    assert set(RICH) == set(RICH.keys())
    assert RICH["last"].reduce == "last"
    assert len(RICH) == 6
    assert "absent" not in RICH


def test_a_one_shot_iterable_of_pairs_is_read_once() -> None:
    spec = CaptureSpec((name, "layers.0") for name in ("a", "b"))

    assert list(spec) == ["a", "b"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"float16"', '"float17"', "no attribute 'float17'"),
        ('"dtype"', '"dytpe"', "unexpected keyword argument 'dytpe'"),
        ('"target"', '"traget"', "KeyError: 'target'"),
    ],
)
def test_a_stored_tap_that_cannot_be_read_is_quoted(old, new, why) -> None:
    text = CaptureSpec({"r": Tap("a", dtype=torch.float16)}).to_json()

    with pytest.raises(ValueError, match=f"is not a stored tap(?s:.*){why}"):
        CaptureSpec.from_json(text.replace(old, new))
