"""The scripts in ``examples/`` run, and find what they say they find."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


@of("probe")
def test_a_probe_finds_the_layer_that_knows_who_did_it(example: ModuleType) -> None:
    scores = example.main(backend="aot_eager")

    assert len(scores) == 7
    assert max(scores[1:]) > scores[0]
    assert max(scores) == 1.0


@of("distil")
def test_distillation_lowers_the_loss(example: ModuleType) -> None:
    before, after = example.main(backend="aot_eager", steps=11)

    assert after < before / 2


@of("generate")
def test_states_of_each_new_token(example: ModuleType) -> None:
    found = example.main(backend="eager", tokens=5)

    assert found.shape == (5, 5, 64)
    assert (found[1:] != found[:-1]).any(dim=-1).all()


@of("activation_map")
def test_maps_peak_on_what_is_drawn(example: ModuleType) -> None:
    right, found = example.main(backend="aot_eager")

    assert min(right, found) > 0.9


@of("steer")
def test_a_direction_moves_the_sentences(example: ModuleType) -> None:
    before, after = example.main(backend="aot_eager")

    assert after > before + 0.2


def test_the_list_of_examples_names_each() -> None:
    scripts = {p.name for p in FOLDER.glob("*.py")} - {"minilm.py"}
    text = (FOLDER / "README.md").read_text()

    assert len(scripts) == 5
    assert all(f"({name})" in text for name in scripts)
