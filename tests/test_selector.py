"""The selector grammar: what each form matches, and which form wins."""

from __future__ import annotations

import fnmatch
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from fxcapture import CaptureSpec
from fxcapture.errors import NeverCalledError, SpecTypeError, TargetNotFoundError
from fxcapture.plan.match import match
from fxcapture.spec.globs import escape
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.selector import Selector
from tests.models import Attention, Layer, encoder, mlp


def matched(target: Any, model: nn.Module, layer_name: str | None = None) -> list[str]:
    return list(Selector.of(target, layer_name).match(ModuleTable(model)))


def tree(paths: list[str]) -> nn.Module:
    """A module tree with an identity at each path."""
    root = nn.Module()
    for path in paths:
        at = root
        for name in path.split("."):
            if name not in at._modules:
                at.add_module(name, nn.Module())
            at = at._modules[name]
    return root


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("", [""]),
        ("norm", ["norm"]),
        ("layers.1.attn", ["layers.1.attn"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("layers.*.mlp", [f"layers.{i}.mlp" for i in range(4)]),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("layers.[!02]", ["layers.1", "layers.3"]),
        ("layers.?.attn.key", [f"layers.{i}.attn.key" for i in range(4)]),
        ("**.key", [f"layers.{i}.attn.key" for i in range(4)]),
        ("layers.**.query", [f"layers.{i}.attn.query" for i in range(4)]),
        ("layers.3.**", ["layers.3", *[f"layers.3.{n}" for n in
                         ("attn", "attn.query", "attn.key", "mlp")]]),
        ("n*", ["norm"]),
        ("re:layers\\.[0-1]", ["layers.0", "layers.1"]),
        ("re:.*norm", ["norm"]),
        ("Attention", [f"layers.{i}.attn" for i in range(4)]),
        (Attention, [f"layers.{i}.attn" for i in range(4)]),
        (nn.LayerNorm, ["norm"]),
        (["norm", "tokens"], ["tokens", "norm"]),
        (("norm", "norm", nn.LayerNorm), ["norm"]),
        (lambda path, m: path.endswith("2.mlp"), ["layers.2.mlp"]),
        (["norm", ["tokens", ("layers.0",)]], ["tokens", "layers.0", "norm"]),
    ],
)  # fmt: skip
def test_each_form_of_the_grammar(target: Any, wanted: list[str]) -> None:
    assert matched(target, encoder()) == wanted


@pytest.mark.parametrize(
    ("target", "layer_name", "wanted"),
    [
        (nn.Linear, "mlp", [f"layers.{i}.mlp" for i in range(4)]),
        (nn.Linear, "attn.key", [f"layers.{i}.attn.key" for i in range(4)]),
        ("Linear", "query", [f"layers.{i}.attn.query" for i in range(4)]),
        (lambda path, m: True, "2", ["layers.2"]),
    ],
)
def test_a_layer_name_is_the_end_of_the_path_in_whole_segments(
    target: Any, layer_name: str, wanted: list[str]
) -> None:
    assert matched(target, encoder(), layer_name) == wanted


def test_a_layer_name_is_no_substring() -> None:
    model = tree(["attn", "cross_attn"])

    assert matched(nn.Module, model, "attn") == ["attn"]


def test_a_path_wins_over_a_glob_and_a_class_name() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Linear = nn.Identity()
            self.other = nn.Linear(2, 2)

    assert matched("Linear", Both()) == ["Linear"]
    weird = nn.ModuleDict({"a*": nn.Identity(), "ab": nn.Identity()})
    assert matched("a*", weird) == ["a*"]


def test_a_class_name_means_subclasses_too() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(2, 2), nn.Linear(2, 2))

    assert matched("Linear", model) == ["0", "1"]
    assert matched("Special", model) == ["0"]


def test_a_prefix_of_a_number_is_another_layer() -> None:
    model = tree([f"layers.{i}" for i in range(12)])

    assert matched("layers.1", model) == ["layers.1"]
    assert matched("layers.1*", model) == ["layers.1", "layers.10", "layers.11"]


def test_a_shared_module_is_matched_once_under_its_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "z": nn.Identity()})
    model["b"] = model["a"]

    assert matched("b", model) == ["a"]
    assert matched(["b", "a"], model) == ["a"]
    assert matched(nn.Linear, model) == ["a"]
    assert matched("*", model) == ["a", "z"]


def test_a_module_inside_itself_ends() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.root = model

    assert matched("inner", model) == ["inner"]


WRAPPERS: list[tuple[str, Callable[[nn.Module], nn.Module]]] = [
    ("module.", nn.DataParallel),
    ("_orig_mod.", lambda m: torch.compile(m, backend="eager")),
    ("_checkpoint_wrapped_module.", checkpoint_wrapper),
]


@pytest.mark.parametrize(("prefix", "wrap"), WRAPPERS, ids=[p for p, _ in WRAPPERS])
def test_wrappers_are_looked_through_at_the_root_and_inside(prefix, wrap) -> None:
    assert matched("2", wrap(mlp())) == ["2"]
    inside = encoder()
    inside.layers[1] = wrap(inside.layers[1])
    assert matched("layers.1.mlp", inside) == ["layers.1.mlp"]
    assert matched(f"layers.1.{prefix}mlp", inside) == ["layers.1.mlp"]
    assert matched("layers.*", inside) == [f"layers.{i}" for i in range(4)]
    assert matched(Layer, inside) == [f"layers.{i}" for i in range(4)]


def test_an_attribute_called_module_is_no_wrapper() -> None:
    model = tree(["module.linear"])

    assert matched("module.linear", model) == ["module.linear"]
    with pytest.raises(TargetNotFoundError):
        matched("linear", model)


def test_a_match_that_is_optional_may_be_empty() -> None:
    selector = Selector.of(["norm", "absent"])

    assert selector.match(ModuleTable(encoder()), optional=True) == ("norm",)


def test_selectors_are_frozen_hashable_and_equal_by_value() -> None:
    assert Selector.of("a.*") == Selector.of(["a.*"])
    assert hash(Selector.of(nn.Linear, "q")) == hash(Selector.of(nn.Linear, "q"))
    with pytest.raises((AttributeError, TypeError)):
        Selector.of("a").parts = ()
    with pytest.raises(SpecTypeError):
        Selector.of(None)


# --------------------------------------------------------------------------------------
# Random trees against a grammar written a second time
# --------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "ab", "0", "1", "10", "layers", "mlp"])
paths = st.lists(names, min_size=1, max_size=4).map(".".join)
trees = st.lists(paths, min_size=1, max_size=8)
globs = st.lists(
    st.sampled_from(["a", "b", "0", "1", "*", "**", "?", "a*", "[01]", "layers"]),
    min_size=1,
    max_size=4,
).map(".".join)


def glob_matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    if not path or not re.fullmatch(fnmatch.translate(pattern[0]), path[0]):
        return False
    return glob_matches(pattern[1:], path[1:])


@given(trees, globs)
def test_a_glob_matches_segment_by_segment(built: list[str], pattern: str) -> None:
    model = tree(built)
    known = [name for name, _ in model.named_modules()]
    if pattern in known:
        wanted = [pattern]
    else:
        wanted = [
            p
            for p in known
            if glob_matches(pattern.split("."), p.split(".") if p else [])
        ]

    found = Selector.of(pattern).match(ModuleTable(model), optional=True)

    if re.search(r"[*?\[]", pattern) or pattern in known:
        assert list(found) == wanted
    else:
        assert list(found) == []


@given(trees, paths)
def test_a_path_matches_itself_alone(built: list[str], path: str) -> None:
    model = tree(built)
    known = dict(model.named_modules())

    found = Selector.of(path).match(ModuleTable(model), optional=True)

    assert list(found) == ([path] if path in known else [])


@given(trees, st.lists(globs | paths, min_size=1, max_size=3))
def test_a_list_is_the_union_in_module_order(
    built: list[str], parts: list[str]
) -> None:
    model = tree(built)
    table = ModuleTable(model)
    each = [set(Selector.of(p).match(table, optional=True)) for p in parts]

    found = Selector.of(parts).match(table, optional=True)

    order = [name for name, _ in model.named_modules()]
    assert list(found) == [p for p in order if p in set().union(*each)]


# --------------------------------------------------------------------------------------
# Names that look like something else
# --------------------------------------------------------------------------------------

ODD = ["re:x", "x", "l*", "l1", "a[0]", "a0", "b?", "b1", "c::d", "e\\f", " g"]


def odd() -> nn.Module:
    return nn.ModuleDict({name: nn.ModuleDict({"in": nn.Identity()}) for name in ODD})


@pytest.mark.parametrize("name", ODD)
def test_every_name_can_be_escaped(name: str) -> None:
    assert matched(escape(name), odd()) == [name]
    assert matched(escape(f"{name}.in"), odd()) == [f"{name}.in"]
    assert matched(escape(name) + ".*", odd()) == [f"{name}.in"]


@given(st.text(st.sampled_from("re:*?[]!\\a 1"), min_size=1, max_size=6))
def test_an_escaped_name_matches_itself_alone(name: str) -> None:
    model = nn.Module()
    for other in {name, "a", "re:a", "*", "aa", "1"}:
        model.add_module(other, nn.Identity())

    assert matched(escape(name), model) == [name]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (r"re\:x", ["re:x"]),
        (r"\re:x", ["re:x"]),
        ("re:x", ["x"]),
        (r"l\*", ["l*"]),
        ("l?", ["l*", "l1"]),
        (r"l\*.*", ["l*.in"]),
        ("a[[]0]", ["a[0]"]),
        (r"[l\\]\*", ["l*"]),
        (r"c\:\:d", ["c::d"]),
        (r"\ g", [" g"]),
    ],
)
def test_a_backslash_takes_the_next_character_as_it_is(target, wanted) -> None:
    assert matched(target, odd()) == wanted


def test_a_name_that_was_read_otherwise_is_shown_with_its_escape() -> None:
    model = nn.ModuleDict({"re:block": nn.Identity(), "x*": nn.Identity()})

    with pytest.raises(TargetNotFoundError) as caught:
        matched("re:block", model)
    assert caught.value.nearest[0] == r"'re\\:block' (Identity)"
    assert r"a backslash takes a character of a module's name" in caught.value.remedy
    assert matched(r"re\:block", model) == ["re:block"]


def test_a_container_that_was_named_by_its_escape_is_an_error() -> None:
    model = nn.Sequential(OrderedDict({"l*": nn.ModuleList([nn.Identity()])}))

    with pytest.raises(NeverCalledError, match="a ModuleList is a container"):
        match(CaptureSpec({"h": r"l\*"}), model)


def test_a_glob_takes_no_time_that_grows_with_its_stars() -> None:
    model = tree([".".join("a" * 40)])

    selector = Selector.of(".".join(["**", "a"] * 30 + ["b"]))
    assert selector.match(ModuleTable(model), optional=True) == ()


def test_a_child_that_is_none_is_no_module() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.register_module("shortcut", None)

    assert Selector.of("*").match(ModuleTable(model)) == ("0", "1")
