"""What prints, reads: at a prompt, and in a notebook."""

from __future__ import annotations

import pickle
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.inspect.drawing.draw import draw_timeline
from fxcapture.inspect.reasons import with_user_names
from tests.models import encoder, ids, rows
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


class Translates(nn.Module):
    """An encoder and a decoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = {"nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, **layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, **layer), 2)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.decoder(target, self.encoder(source))


def test_states_of_torchs_own_layers_are_not_copied_without_need() -> None:
    spec = {"encoder": "encoder.layers.*", "decoder": "decoder.layers.*"}
    captured = fxc.compile(Translates(), spec, backend="eager", fullgraph=True)
    captured(rows(2, 5, 8), rows(2, 4, 8))

    table = [line.split("  ")[-1].strip() for line in captured.explain().splitlines()]

    assert table[1:] == [
        *["no copy: nothing writes to it"] * 3,
        "copied: shares memory with an output of the graph",
    ]


class Passes(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Aliasing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some_part = Passes()
        self.my_bias = nn.Parameter(torch.ones(8))

    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.some_part(self.my_bias)
        self.some_part(h)
        return self.some_part(scale) * h


def test_names_in_explain_are_those_of_the_users_model() -> None:
    captured = fxc.compile(Aliasing(), {"h": "some_part"}, backend="eager")
    captured(rows(), scale=rows())

    assert "copied: shares memory with the model's 'my_bias'" in captured.explain()
    assert "copied: shares memory with the argument 0" in captured.explain()
    assert "copied: shares memory with the argument 'scale'" in captured.explain()
    assert (
        with_user_names(
            "shares memory with the input l_model_modules_layers_modules_1_modules_"
            "self_attn_modules_out_proj_parameters_bias_"
        )
        == "shares memory with the model's 'layers.1.self_attn.out_proj.bias'"
    )


def test_a_selection_prints_as_it_was_written() -> None:
    captured = fxc.compile(encoder(2), SPEC, backend="eager")

    assert "select=[0, -1]" in repr(captured)
    assert "select=-1" in repr(captured.select(h=-1))
    assert "select=[2, 0]" in repr(captured.select(h=iter([2, 0])).select(all=0))
    assert "'all': Tap('', select=0)" in repr(captured.select(all=0))


def test_records_of_an_exported_program_say_which_position_is_an_input(
    tmp_path: Path,
) -> None:
    spec = SPEC | {"in": Tap("layers.1", point="input")}
    program = fxc.export(encoder(2), (ids(),), spec=spec)
    program.save(tmp_path / "a.pt2")

    for made in (program, fxc.load(tmp_path / "a.pt2")):
        shown = repr(made(ids()).records)
        assert shown == repr(fxc.compile(encoder(2), spec, backend="eager")(ids())[1])
        assert shown.count("(input)") == 2


def test_an_estimate_says_what_makes_more_operations_than_the_model() -> None:
    spec = {"w": fxc.AttentionWeights("layers.*.self_attn"), "h": "layers.1"}
    model = nn.Transformer(8, 2, 2, 1, 8, batch_first=True).encoder

    shown = str(fxc.estimate(model, spec, torch.zeros(1, 3, 8)))

    assert shown.endswith("% (with those that compute records)")
