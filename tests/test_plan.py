"""A spec bound to sites: positions, elements, initial inputs, and what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxcapture import CaptureSpec, Tap
from fxcapture.errors import (
    NeverCalledError,
    SelectionError,
    TargetNotFoundError,
    UnsupportedOutputError,
)
from fxcapture.plan.match import match
from fxcapture.plan.plan import Plan
from fxcapture.plan.resolve import canonical_selection, resolve
from fxcapture.plan.sites import Site, SiteTable, Value
from fxcapture.trace.structure_text import encode
from tests.models import Attention, encoder

MODEL = nn.Sequential(*[nn.Identity() for _ in range(3)])


def site(path: str, structure: str = "T", entries: str = "t(T)") -> Site:
    return Site(path=path, structure=structure, entry=Value(entries))


def plan_of(tap: Tap, called: Sequence[str], **select: Any) -> Plan:
    """The plan of record ``r`` for calls of ``MODEL``'s modules, in this order."""
    spec = CaptureSpec({"r": tap})
    sites = SiteTable([site(path) for path in called])
    chosen = canonical_selection(spec, select)
    return resolve(spec, match(spec, MODEL), sites, chosen)


def chosen(plan: Plan) -> list[tuple[int, bool] | None]:
    """For each position its site and whether it is the input; ``None`` if not kept."""
    (record,) = plan.records
    return [s and (s.site, s.entry) for s in record.slots]


@given(
    calls=st.lists(st.sampled_from("012"), max_size=8),
    select=st.none()
    | st.lists(st.integers(-10, 10), max_size=4)
    | st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2),
    initial=st.booleans(),
)
def test_positions_count_the_calls_in_order(
    calls: list[str], select: Any, initial: bool
) -> None:
    tap = Tap("*", select=select, initial=initial, optional=True)

    got = chosen(plan_of(tap, calls))

    full: list[tuple[int, bool]] = [(i, False) for i in range(len(calls))]
    if initial and calls:
        full.insert(0, (0, True))
    places = range(len(full))
    if isinstance(select, slice):
        places = places[select]
    elif select is not None:
        places = [i % len(full) for i in select if -len(full) <= i < len(full)]
    assert got == [entry if i in set(places) else None for i, entry in enumerate(full)]


@given(length=st.integers(1, 6), position=st.integers(-9, 9), initial=st.booleans())
def test_a_position_is_an_error_exactly_where_indexing_would_be(
    length: int, position: int, initial: bool
) -> None:
    tap = Tap("0", select=position, initial=initial)
    calls = ["0"] * length
    positions = length + initial
    if -positions <= position < positions:
        kept = [i for i, s in enumerate(chosen(plan_of(tap, calls))) if s is not None]
        assert kept == [range(positions)[position]]
    else:
        with pytest.raises(SelectionError, match=f"position {position} does not exist"):
            plan_of(tap, calls)


@given(a=st.lists(st.integers(-4, 3), max_size=4), b=st.lists(st.integers(-4, 3)))
def test_a_selection_of_a_call_replaces_that_of_the_spec(a: Any, b: Any) -> None:
    calls = ["0", "1", "0", "2"]

    assert plan_of(Tap("*", select=a), calls, r=b) == plan_of(Tap("*", select=b), calls)


def test_a_record_lists_the_path_behind_each_position() -> None:
    plan = plan_of(Tap(["0", "2"], initial=True), ["2", "1", "0", "2"])

    assert plan.records[0].paths == ("2", "2", "0", "2")


def test_sites_of_other_modules_do_not_count() -> None:
    assert chosen(plan_of(Tap("1"), ["0", "1", "2", "1"])) == [(1, False), (3, False)]


@pytest.mark.parametrize("calls", [[], ["0"], ["0", "1", "0"]])
def test_each_matched_module_has_to_be_called(calls: list[str]) -> None:
    with pytest.raises(NeverCalledError, match="'2' \\(Identity\\)"):
        plan_of(Tap("*"), calls)
    plan_of(Tap("*", optional=True), calls)


def test_a_slice_beyond_the_end_is_no_error() -> None:
    assert chosen(plan_of(Tap("0", select=slice(1, 99)), ["0"])) == [None]


def test_inputs_are_taken_where_the_tap_says_input() -> None:
    plan = plan_of(Tap("0", point="input"), ["0", "0"])

    assert chosen(plan) == [(0, True), (1, True)]


def test_the_wanted_leaves_are_listed_once_for_each_site() -> None:
    spec = CaptureSpec(
        {"a": Tap("0"), "b": Tap("*", select=0), "c": Tap("0", detach=True)}
    )
    sites = SiteTable([site("0"), site("1"), site("2")])

    wanted = resolve(spec, match(spec, MODEL), sites).wanted()

    assert {s: len(leaves) for s, leaves in wanted.items()} == {0: 2}


def test_an_unselected_position_may_hold_what_cannot_be_recorded() -> None:
    class Other:
        pass

    opaque = encode((Other(),), [], [])
    spec = CaptureSpec({"r": Tap("0", select=1)})
    bound = match(spec, MODEL)

    resolve(spec, bound, SiteTable([site("0", opaque), site("0")]))

    with pytest.raises(UnsupportedOutputError, match="Other"):
        resolve(spec, bound, SiteTable([site("0"), site("0", opaque)]))


def test_a_selection_is_canonical() -> None:
    spec = CaptureSpec({"a": "0", "b": "1"})

    assert canonical_selection(spec, None) == ()
    assert canonical_selection(spec, {}) == ()
    one = canonical_selection(spec, {"b": [1, 0], "a": 0})
    other = canonical_selection(spec, {"a": [0], "b": (0, 1, 1)})
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(TargetNotFoundError, match="'c'"):
        canonical_selection(spec, {"c": 0})


def test_a_match_lists_paths_and_classes() -> None:
    spec = CaptureSpec({"w": Tap(Attention), "all": Tap("layers.*.attn"), "n": "norm"})

    bound = match(spec, encoder(2))

    assert bound.paths["w"] == bound.paths["all"] == ("layers.0.attn", "layers.1.attn")
    assert bound.classes == {
        "layers.0.attn": "Attention",
        "layers.1.attn": "Attention",
        "norm": "LayerNorm",
    }
    assert [t.path for t in bound.targets] == ["layers.0.attn", "layers.1.attn", "norm"]


def test_containers_that_a_glob_swept_up_are_left_out() -> None:
    spec = CaptureSpec({"r": Tap("**")})

    assert "layers" not in match(spec, encoder(2)).paths["r"]


# --------------------------------------------------------------------------------------
# Sites
# --------------------------------------------------------------------------------------


def test_a_site_table_numbers_the_calls_of_each_module() -> None:
    table = SiteTable([site("a"), site("b"), site("a"), site("a")])

    assert [(s.path, s.call) for s in table] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert len(table) == 4
    assert table[1].path == "b"
    assert [s.call for s in table[2:]] == [1, 2]
    assert table == SiteTable(list(table))
    assert hash(table) == hash(SiteTable(list(table)))


def test_a_site_table_prints_one_line_for_each_site() -> None:
    table = SiteTable(
        [
            Site(
                path="layers.0",
                structure="t(T,N)",
                graph=0,
                shapes=((2, "s0"),),
                dtypes=("float32",),
                class_name="Layer",
            ),
            site(""),
        ]
    )

    lines = str(table).splitlines()

    heading = "site class call where output shape dtype"
    assert " ".join(lines[0].split()) == heading
    assert "layers.0" in lines[1]
    assert "tuple(tensor, None)" in lines[1]
    assert "(2, s0)" in lines[1]
    assert "graph 0" in lines[1]
    assert lines[2].startswith("(model)")
    assert "eager" in lines[2]
