"""A record of nothing but ``None`` looks like a success, so all that prints says it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxcapture as fxc
from fxcapture import Tap
from tests.models import WIDTH, rows

STATES = rows(2, 3, WIDTH)


class Fused(nn.Module):
    """Returns (mixed, None), as attention modules of transformers do with SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, None]:
        heads = self.query(h)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0], None


class Model(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(part() for _ in range(2))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h, _ = layer(h)
        return h


class Empty(nn.Module):
    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, None]:
        return h + 1, None


SPEC = {"weights": Tap("layers.*", output=1), "h": Tap("layers.*", output=0)}
SENTENCE = "record 'weights' holds nothing: 'layers.0' returned None there"
REMEDY = "fxcapture.AttentionWeights('layers.0')"


def captured(part: type[nn.Module] = Fused, **changes: Tap) -> fxc.CapturedModule:
    return fxc.compile(Model(part).eval(), SPEC | changes, backend="eager")


def test_records_say_that_every_position_is_none() -> None:
    text = repr(captured()(STATES).records).splitlines()

    assert text[1] == "  weights: 2 positions"
    assert text[2].endswith("'layers.0': None (the module returned None)")
    assert text[3].endswith("'layers.1': None (the module returned None)")
    assert text[4] == "  h: 2 positions"


def test_explain_says_it_at_each_position_and_once_with_the_remedy() -> None:
    made = captured()
    made(STATES)

    assert made.explain().count("None (the module returned None)") == 2
    assert SENTENCE in made.explain()
    assert REMEDY in made.explain()
    assert "None" in made.explain("text")


def test_without_a_fused_call_attention_is_not_spoken_of() -> None:
    made = captured(Empty)
    made(STATES)

    assert SENTENCE in made.explain()
    assert "AttentionWeights" not in made.explain()


@pytest.mark.parametrize("select", [[], [0]])
def test_what_is_not_selected_does_not_count(select: list[int]) -> None:
    made = captured(weights=Tap("layers.*", output=0, select=select))
    made(STATES)

    assert "holds nothing" not in made.explain()
    assert "returned None" not in made.explain()


def test_verify_says_it() -> None:
    found = fxc.verify(captured(), STATES)

    assert list(found.nothing) == ["weights"]
    assert str(found.nothing["weights"]).startswith(SENTENCE)
    assert REMEDY in str(found)


def test_export_logs_it_and_the_program_says_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = fxc.export(Model(Fused).eval(), (STATES,), spec=SPEC)
    fxc.export(Model(Fused).eval(), (STATES,), spec={"h": SPEC["h"]})

    [message] = [r.message for r in caplog.records if r.name == "fxcapture"]
    assert SENTENCE in message
    assert REMEDY in message
    assert SENTENCE in repr(program)
