"""Reading the sites of a marked graph."""

from __future__ import annotations

import torch

from fxcapture import Tap, passes
from fxcapture.plan.sites import Site, pair_hooked
from tests.passes.marked import Chain, InCheckpoint, pinned, readable, trace

X = torch.ones(2, 3)


def test_each_call_is_one_site_in_call_order() -> None:
    graph, marked, *_ = trace(Chain(), {"t": "twice", "o": "over"}, X)

    assert [(s.path, s.call) for s in marked.sites] == [
        ("twice", 0),
        ("over", 0),
        ("twice", 1),
    ]
    assert marked.calls == ((0, 0), (1, 1), (2, 2))
    assert marked.sites[0].shapes == ((2, 3),)
    assert marked.sites[0].dtypes == ("float32",)
    assert readable(graph) == pinned(
        """
        x = input
        mul = mul(x, 2)
        emit_mark = emit_mark(None, [mul], [], ..., 'twice', 'result')
        add_ = add_(mul, 1)
        emit_mark_1 = emit_mark(None, [add_], [], ..., 'over', 'result')
        mul_1 = mul(add_, 2)
        emit_mark_2 = emit_mark(None, [mul_1], [], ..., 'twice', 'result')
        return ((mul_1))
        """
    )


def test_the_site_of_a_body_names_the_operator_around_it() -> None:
    _, marked, *_ = trace(InCheckpoint(), {"t": "inside.twice", "r": ""}, X)

    assert [(s.path, s.region) for s in marked.sites] == [
        ("inside.twice", ("tag_activation_checkpoint",)),
        ("inside.twice", ("tag_activation_checkpoint",)),
        ("", ()),
    ]


def test_it_reads_and_changes_nothing() -> None:
    graph, marked, *_ = trace(Chain(), {"t": Tap("twice", initial=True)}, X)
    before = str(graph.graph)

    again = passes.collect_marks(graph, graph=7, classes={"twice": "Double"})

    assert str(graph.graph) == before
    assert [s.graph for s in again.sites] == [7, 7]
    assert again.sites[0].class_name == "Double"
    assert again.calls == marked.calls


def site(path: str, structure: str, *, hooked: bool = False) -> Site:
    return Site(path=path, structure=structure, hooked=hooked)


def test_the_two_observations_of_a_hooked_call_are_one_site() -> None:
    seen = [
        site("a", "t(T)"),  # inside the call of b, and hooked
        site("a", "T", hooked=True),
        site("b", "t()"),
        site("b", "N", hooked=True),
        site("a", "l()"),  # another call of a
        site("a", "t(N)", hooked=True),
    ]

    merged, marks = pair_hooked(seen)

    assert [(s.path, s.structure) for s in merged] == [
        ("a", "T"),
        ("b", "N"),
        ("a", "t(N)"),
    ]
    assert marks == ((0, 1), (2, 3), (4, 5))


def test_a_hooked_call_inside_one_of_the_same_module_is_paired_inside_out() -> None:
    seen = [
        site("a", "t(T)"),
        site("a", "T", hooked=True),
        site("a", "l()"),
        site("a", "N", hooked=True),
    ]

    merged, marks = pair_hooked(seen)

    assert [s.structure for s in merged] == ["T", "N"]
    assert marks == ((0, 1), (2, 3))


def test_a_model_with_user_hooks_gives_one_site_a_call() -> None:
    model = Chain()
    model.twice.register_forward_hook(lambda m, a, out: out + 5)

    _, marked, *_ = trace(model, {"t": "twice"}, X)

    assert [(s.path, s.call) for s in marked.sites] == [("twice", 0), ("twice", 1)]
    assert marked.calls == ((0, 1), (2, 3))
