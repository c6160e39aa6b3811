"""What prints, reads: at a prompt, and in a notebook."""

from __future__ import annotations

import pickle
from xml.etree import ElementTree

import torch

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.inspect.drawing.draw import draw_timeline
from tests.models import encoder, ids
from tests.test_nothing import STATES, captured

SPEC = {"h": Tap("layers.*", initial=True, select=[0, -1]), "all": ""}


def called() -> fxc.CapturedModule:
    made = fxc.compile(encoder(2), SPEC, backend="eager")
    made(ids())
    return made


def test_records_say_which_position_is_an_input_and_call_the_root_model() -> None:
    assert repr(called()(ids()).records).splitlines()[1:-1] == [
        "  h: 3 positions",
        "    [0] 'layers.0' (input): float32[2, 5, 8]",
        "    [2] 'layers.1': float32[2, 5, 8]",
        "  all: 1 position",
        "    [0] (model): float32[2, 5, 8]",
    ]


def test_records_know_what_the_module_returned_as_none() -> None:
    records = captured(weights=Tap("layers.*", output=1, select=[1]))(STATES).records

    lines = repr(records).splitlines()
    assert lines[1:3] == [
        "  weights: 2 positions",
        "    [1] 'layers.1': None (the module returned None)",
    ]
    # What is stored holds the values alone.
    stored = repr(pickle.loads(pickle.dumps(records))).splitlines()
    assert stored[1].startswith("  weights: 2 positions, all None: not selected, or")


def test_in_pieces_records_say_the_same() -> None:
    whole, pieces = called(), called()
    pieces._fxc_parts()[2].break_reason = "asked for by the test"

    assert repr(whole(ids()).records) == repr(pieces(ids()).records)


def test_texts_are_shown_as_they_are_printed() -> None:
    made = called()

    for text in (made.explain(), made.explain("text"), made.explain("dot")):
        assert isinstance(text, str)
        assert repr(text) == str(text)
        assert text._repr_html_().startswith("<pre")
        assert "&lt;" in text._repr_html_() or "<" not in text
    assert repr(made.explain()).count("\n") > 3


def test_pictures_are_drawn_by_a_notebook() -> None:
    made = called()
    estimate = fxc.estimate(encoder(2), SPEC, ids())

    for picture in (made.explain("svg"), draw_timeline(estimate)):
        assert ElementTree.fromstring(picture._repr_html_()).tag.endswith("svg")


def test_what_has_a_table_shows_it_at_a_prompt_and_in_a_notebook() -> None:
    made = called()
    shown = {
        "Estimate": fxc.estimate(encoder(2), SPEC, ids()),
        "Verification": fxc.verify(made, ids()),
        "Survey": fxc.sites(encoder(2), ids()),
        "SiteTable": made.sites,
    }

    for name, value in shown.items():
        assert repr(value).startswith(name)
        assert repr(value).endswith(str(value))
        html = value._repr_html_()
        assert ElementTree.fromstring(html).text == str(value)
    assert "Records(" in made(ids()).records._repr_html_()


def test_sites_before_a_call_say_so() -> None:
    made = fxc.compile(encoder(2), SPEC, backend="eager")

    assert "nothing was called yet" in str(made.sites)
    assert "SiteTable(0 sites)" in repr(made.sites)


def test_one_is_singular() -> None:
    made = fxc.compile(torch.nn.Sequential(encoder(1)), {"h": "0"}, backend="eager")
    made(ids())

    assert "SiteTable(1 site)" in repr(made.sites)
