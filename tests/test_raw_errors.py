"""What torch or Python would raise in their own words is told in ours: one cause."""

from __future__ import annotations

import logging
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import (
    CaptureError,
    SpecTypeError,
    TargetNotFoundError,
    TraceError,
    install_extra,
    nearest,
)
from fxcapture.integrations import transformers as integration
from tests.models import WIDTH, mlp, rows

X = rows()
SPEC = {"h": "0"}


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((X,), {"inputs": X}, "got an unexpected keyword argument 'inputs'"),
        ((X, X), {}, "too many positional arguments"),
        ((), {}, "missing a required argument: 'input'"),
    ],
)
def test_arguments_that_the_model_does_not_take(args, kwargs, what: str) -> None:
    captured = fxc.compile(mlp(), SPEC, backend="eager", fullgraph=True)

    with pytest.raises(SpecTypeError, match="does not take these arguments") as caught:
        captured(*args, **kwargs)

    assert isinstance(caught.value, TypeError)  # as an eager call raises
    assert what in caught.value.why
    assert "forward(input)" in caught.value.why
    assert "fullgraph" not in str(caught.value)
    assert caught.value.nearest == (("input",) if kwargs else ())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.part(h)
        if h.sum() > 0:
            h = h + 1
        return self.part(h)


def test_a_model_that_cannot_be_traced_still_says_that() -> None:
    captured = fxc.compile(Branching(), {"h": "part"}, backend="eager", fullgraph=True)

    with pytest.raises(TraceError, match="cannot be traced as one graph"):
        captured(X)


def test_the_reason_of_a_break_is_one_line_and_the_rest_on_request() -> None:
    captured = fxc.compile(Branching(), {"h": "part"}, backend="eager")
    captured(X)

    text = captured.explain()

    [line] = [x for x in text.splitlines() if x.startswith("not one graph, because: ")]
    where = r"\(test_raw_errors.py, line \d+: if h.sum\(\) > 0:\)"
    assert re.search(rf"because: Data-dependent branching {where}$", line)
    assert "Explanation" not in text
    assert "Explanation" in captured.explain(full=True)
    assert line in captured.explain("text")


@pytest.mark.parametrize("select", [[0], 0, "h"])
def test_a_selection_without_the_name_of_its_record(select: object) -> None:
    captured = fxc.compile(mlp(), SPEC, backend="eager")

    with pytest.raises(SpecTypeError, match=r"select=.* is of type") as caught:
        captured(X, select=select)

    assert f"select={{'h': {select!r}}}" in caught.value.remedy


def test_one_tensor_stands_for_one_argument() -> None:
    assert fxc.sites(mlp(), X)[0].shapes == ((3, WIDTH),)
    assert fxc.estimate(mlp(), SPEC, X).kept_bytes == X.nbytes
    assert fxc.export(mlp(), X, spec=SPEC)(X).records["h"][0].shape == X.shape


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ({"input": X}, None, "kwargs="),
        (3, None, "pass a tuple"),
        (None, None, "pass a tuple"),
        ("text", None, "pass a tuple"),
        ((X,), X, "pass a mapping"),
    ],
)
def test_what_is_no_tuple_of_arguments_is_refused(args, kwargs, what: str) -> None:
    for call in (
        lambda: fxc.sites(mlp(), args, kwargs),
        lambda: fxc.estimate(mlp(), SPEC, args, kwargs),
        lambda: fxc.export(mlp(), args, kwargs, spec=SPEC),
    ):
        with pytest.raises(SpecTypeError, match=what):
            call()


def test_an_exported_program_with_another_batch_size_names_dynamic_shapes(
    tmp_path: Path,
) -> None:
    program = fxc.export(mlp(), (X,), spec=SPEC)
    program.save(tmp_path / "m.pt2")

    for made in (program, fxc.load(tmp_path / "m.pt2")):
        with pytest.raises(CaptureError, match="not exported for such") as caught:
            made(rows(5, WIDTH))
        assert "input.size()[0] == 3" in caught.value.why
        assert "dynamic_shapes=" in caught.value.remedy
        with pytest.raises(CaptureError, match="does not take these arguments"):
            made()


@pytest.mark.parametrize("read", [fxc.load, fxc.load_package])
def test_a_file_that_is_not_there_or_no_program(
    read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "model.pt2").write_text("hello")

    with pytest.raises(FileNotFoundError, match=r"there is no such file; .*model.pt2"):
        read(tmp_path / "modell.pt2")
    with pytest.raises(CaptureError, match=r"no \.pt2 archive"):
        read(tmp_path / "model.pt2")
    assert caplog.records == []


@pytest.mark.parametrize("extra", ["transformers", "cli", "onnx"])
def test_the_remedy_for_a_missing_extra_names_its_packages(extra: str) -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    packages = tomllib.loads(text)["project"]["optional-dependencies"][extra]

    words = install_extra(extra).split(" (")[0]

    assert words == "pip install " + " ".join(f"'{p}'" for p in packages)


def test_a_missing_extra_is_told_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = fxc.export(mlp(), X, spec=SPEC)
    for module in ("transformers", "onnxscript"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ModuleNotFoundError, match=r"needs onnxscript.*\n.*'onnx>="):
        program.onnx()
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers.*\n.*5\.23"):
        integration.install()
    assert not integration.is_installed()


def test_nearest_matches_stand_in_natural_order() -> None:
    paths = [f"model.layers.{i}" for i in range(12)] + ["model.norm"]

    assert nearest("model.layer.3", paths)[:2] == ["model.layers.3", "model.layers.0"]
    assert nearest("layers", [f"layers.{i}" for i in (10, 9, 2)]) == [
        "layers.2", "layers.9", "layers.10",
    ]  # fmt: skip


@pytest.mark.parametrize("spec", [["0", "2"], [fxc.Tap("0")], ["layers.*"], 3, ["ab"]])
def test_a_list_in_place_of_a_spec(spec: object) -> None:
    with pytest.raises(SpecTypeError, match="a spec cannot be made of") as caught:
        fxc.compile(mlp(), spec)

    assert "name the record" in caught.value.remedy


def test_a_model_that_declares_nothing_says_what_a_declaration_and_a_spec_are() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    with pytest.raises(TargetNotFoundError) as caught:
        fxc.compile(Net())

    text = str(caught.value)
    assert "Net declares nothing that can be captured" in text
    assert "a dict of record names to the classes of modules" in text
    assert """a dict such as {"states": fxcapture.Tap('blocks.*')}""" in text
    assert '_can_record_outputs = {"states": Linear}' in text
    fxc.compile(Net(), {"states": fxc.Tap("blocks.*")})  # what it says works
    Net._can_record_outputs = {"states": nn.Linear}  # type: ignore[attr-defined]
    fxc.compile(Net())
