"""Pictures: what stands in them, in each format; and the memory timeline."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import SpecTypeError
from fxcapture.inspect.drawing.draw import draw, draw_timeline, picture_of
from fxcapture.inspect.estimate import estimate


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.proj(x), x @ x.mT


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    """Registered in another order than it runs, with a module that never does."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.embed = nn.Linear(4, 8)
        self.never = nn.Linear(8, 8)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if self.broken:
                torch._dynamo.graph_break()
        return self.head(x)


SPEC = {
    "hidden": fxc.Tap("layers.*", select=[0, -1], initial=True),
    "maps": fxc.Tap("layers.3.attention", output=1),
}


def called(model: nn.Module, spec: Any = SPEC, **kwargs: Any) -> fxc.CapturedModule:
    captured = fxc.compile(model, spec, backend="eager", **kwargs)
    captured(torch.randn(2, 6, 4))
    return captured


def labels(captured: fxc.CapturedModule) -> list[str]:
    picture = picture_of(captured)
    assert picture is not None
    return [row.label for row in picture.rows]


def test_modules_stand_in_running_order_and_like_ones_together() -> None:
    assert labels(called(Model(), fullgraph=True)) == [
        "",
        "embed",
        "layers.0",
        "layers.1 ... layers.2",
        "layers.3",
        "attention",
        "mlp",
        "layers.4",
        "head",
    ]


def test_text_says_what_is_taken_and_what_is_held() -> None:
    text = draw(called(Model(), fullgraph=True))

    one = 2 * 6 * 8 * 4
    assert re.search(
        rf"layers\.0 +Layer +hidden\[0\] \(input\) +graph 0 +2x6x8 +{one} B", text
    )
    assert re.search(r"attention +Attention +maps\[0\] +graph 0 +2x6x6 +288 B", text)
    assert re.search(rf"hidden\[5\].*{one} B +1.031 KiB", text)
    assert "hidden: 2 of 6 positions kept" in text


def test_a_tap_on_an_opened_module_stands_where_it_returns() -> None:
    spec = {"layer": fxc.Tap("layers.3"), "inner": fxc.Tap("layers.3.mlp")}
    picture = picture_of(called(Model(), spec, fullgraph=True))
    assert picture is not None

    kinds = [(r.kind, r.label) for r in picture.rows if r.path.startswith("layers.3")]
    assert kinds == [
        ("open", "layers.3"), ("module", "attention"), ("module", "mlp"),
        ("return", "layers.3"),
    ]  # fmt: skip
    assert picture.rows[-2].path == "layers.4"


def test_repeated_calls_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    text = draw(called(Twice(), {"h": "layer"}))

    assert "h[0] " in text
    assert "h[1] (call 1)" in text


def test_svg_is_well_formed_and_names_every_tap() -> None:
    root = ElementTree.fromstring(draw(called(Model(), fullgraph=True), "svg"))
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]

    assert {"hidden[0] (input)", "hidden[5]", "maps[0]", "embed", "head"} <= set(words)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("x"):
            right = float(box.get("x", 0)) + float(box.get("width", 0))
            bottom = float(box.get("y", 0)) + float(box.get("height", 0))
            assert right <= width
            assert bottom <= height


def test_dot_is_balanced_and_has_an_edge_to_each_tap() -> None:
    dot = draw(called(Model(), fullgraph=True), "dot")

    assert dot.count("{") == dot.count("}")
    assert dot.count("shape=note") == 3
    assert 'label="layers.3"' in dot


def test_a_broken_run_says_why_and_where() -> None:
    captured = called(Model(broken=True))
    text = draw(captured)

    assert "not one graph, because:" in text
    assert re.search(r"hidden\[5\] +(graph \d+|eager)", text)
    ElementTree.fromstring(draw(captured, "svg"))


def test_before_the_first_call_there_is_nothing_to_draw() -> None:
    captured = fxc.compile(Model(), SPEC, backend="eager")

    assert draw(captured) == "no call has been made yet"


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecTypeError, match=r"'png'[\s\S]*'text', 'svg' or 'dot'"):
        draw(called(Model()), "png")


def test_the_timeline_draws_three_curves_with_their_peaks() -> None:
    made = estimate(Model(), SPEC, (torch.randn(2, 6, 4),))
    root = ElementTree.fromstring(draw_timeline(made))
    words = [str(e.text) for e in root.iter("{http://www.w3.org/2000/svg}text")]

    for name in ("no capture", "this spec", "every position"):
        assert any(w.startswith(f"{name}: peak ") for w in words)
    assert "layers.0" in words
