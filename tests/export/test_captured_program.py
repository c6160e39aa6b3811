"""Captured programs: names, manifest, saving without the model's classes, errors."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.errors import (
    CaptureError,
    NeverCalledError,
    SelectionError,
    SpecTypeError,
    TargetNotFoundError,
)
from fxcapture.exporting.export import export
from fxcapture.exporting.manifest import Manifest
from fxcapture.exporting.package import load_package
from fxcapture.exporting.program import load
from tests.reference import assert_same, footprint

Scores = collections.namedtuple("Scores", "best rest")


@dataclasses.dataclass
class Parts:
    mixed: torch.Tensor
    scores: Scores
    table: dict[str, Any]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Parts:
        y = self.proj(x)
        rows = y.shape[0]
        return Parts(y, Scores(y.amax(-1), None), {"rows": rows, 3: [y.sum(), "tag"]})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.tail = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, int]:
        y = self.part(x * scale).mixed
        self.count.add_(1)
        return self.tail(y), 7


class Holder(nn.Module):
    """Uses what its part returns, which an export could not return."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)[0]["x"]


ROWS = ({0: torch.export.Dim("rows", min=2)}, None)


def test_outputs_are_named_after_record_position_and_element() -> None:
    spec = {"add": Tap("part.proj"), "whole": Tap("part"), "again": Tap("part.proj")}
    program = export(Model(), (torch.ones(3, 4), 2.0), spec=spec, dynamic_shapes=ROWS)
    names = [output.name for output in program.manifest.outputs]
    nodes = program.program.graph.output_node().args[0]
    added = [n.name for n in nodes[-len(names) :]]

    assert names == [
        "add_0",
        "whole_0_mixed",
        "whole_0_scores_best",
        "whole_0_table_3_0",
        "whole_0_table_rows",
        "again_0",
    ]
    assert added == names
    assert program.output_names == ("0", "1", *names)


def test_a_structure_is_put_together_again() -> None:
    model = Model()
    x = torch.randn(3, 4)
    program = export(model, (x, 1.0), spec={"p": Tap("part")}, dynamic_shapes=ROWS)

    for rows in (3, 5):
        x = torch.randn(rows, 4)
        assert_same(model.part(x), program(x, 1.0).records["p"][0])


def test_exporting_leaves_the_model_as_it_was() -> None:
    model = Model()
    untouched = footprint(model)

    export(model, (torch.ones(3, 4),), spec={"p": Tap("part")})
    with pytest.raises(TargetNotFoundError, match="'prat'"):
        export(model, (torch.ones(3, 4),), spec={"p": Tap("prat")})

    assert untouched == footprint(model)
    assert model.count == 0


def test_records_alone_end_the_program_early() -> None:
    program = export(
        Model(), (torch.ones(3, 4),), spec={"p": Tap("part.proj")}, keep_output=False
    )

    output, records = program(torch.ones(3, 4))

    assert output is None
    assert records["p"][0].shape == (3, 4)
    assert set(program.program.state_dict) == {"part.proj.weight", "part.proj.bias"}
    targets = [str(n.target) for n in program.program.graph.nodes]
    assert targets.count("aten.linear.default") == 1
    assert program.output_names == ("p_0",)


RUN_ELSEWHERE = """
import sys, torch
from fxcapture.exporting.program import load
part = load(sys.argv[1])(torch.ones(3, 4), 1.0).records["part"][0]
assert type(part).__name__ == "Parts", part
assert type(part.scores).__name__ == "Scores", part
assert part.scores.best.shape == (3,) and part.scores.rest is None
assert part.table["rows"] == 3 and part.table[3][1] == "tag"
assert not [m for m in sys.modules if m.split(".")[0] == "tests"]
"""


def test_classes_that_are_not_loaded_have_stand_ins(tmp_path: Path) -> None:
    program = export(
        Model(),
        (torch.ones(3, 4), 1.0),
        spec={"part": Tap("part")},
        dynamic_shapes=ROWS,
    )
    program.save(tmp_path / "program.pt2")

    done = subprocess.run(
        [sys.executable, "-c", RUN_ELSEWHERE, str(tmp_path / "program.pt2")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(fxc.__file__).parents[1],
    )
    here = load(tmp_path / "program.pt2")(torch.ones(3, 4), 1.0).records["part"][0]

    assert done.returncode == 0, done.stderr
    assert type(here) is Parts
    assert type(here.scores) is Scores


class Side(enum.Enum):
    LEFT = 1
    PAIR = (2, 3)


class Named(dict):
    pass


@dataclasses.dataclass
class Nothing:
    pass


class Constants(nn.Module):
    def forward(self, x):
        table = Named(kind=torch.float16, place=torch.device("cpu"), x=x * 2)
        return table, (Side.LEFT, Side.PAIR), Nothing()


def test_constants_and_their_classes_survive_being_written() -> None:
    model, x = nn.Sequential(Constants()), torch.ones(3)
    text = export(Holder(model), (x,), spec={"r": Tap("part")}).manifest.to_json()
    here, elsewhere = (
        Manifest.from_json(t).records[0].slots[0].structure.build(lambda i: x, int)  # type: ignore[union-attr]
        for t in (text, text.replace(__name__, "not_loaded"))
    )

    for table, _, _ in (here, elsewhere):
        assert table["kind"] is torch.float16
        assert table["place"] == torch.device("cpu")
    assert type(here[0]) is Named
    assert type(elsewhere[0]) is dict
    assert here[1] == (Side.LEFT, Side.PAIR)
    assert elsewhere[1] == (1, "PAIR")  # an enum's number, else its name
    assert here[2] == Nothing()
    assert elsewhere[2] == ()


def test_a_manifest_survives_being_written(tmp_path: Path) -> None:
    spec = fxc.CaptureSpec({"p": Tap("part.proj", select=[0], detach=True)})
    program = export(Model(), (torch.ones(3, 4),), spec=spec)
    program.save(tmp_path / "program.pt2")

    loaded = load(tmp_path / "program.pt2")

    assert loaded.manifest == program.manifest
    assert loaded.spec == spec
    assert json.loads(program.manifest.to_json())["versions"]["torch"]


def test_a_spec_that_cannot_be_stored_is_said_so(tmp_path: Path) -> None:
    program = export(
        Model(),
        (torch.ones(3, 4),),
        spec={"p": Tap("part.proj", reduce=lambda h: h[:, 0])},
    )
    program.save(tmp_path / "program.pt2")

    loaded = load(tmp_path / "program.pt2")

    assert loaded(torch.ones(3, 4)).records["p"][0].shape == (3,)
    with pytest.raises(CaptureError, match="was not stored"):
        _ = loaded.spec


def test_files_without_a_manifest_are_refused(tmp_path: Path) -> None:
    plain = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(plain, tmp_path / "plain.pt2")

    with pytest.raises(CaptureError, match=r"(?s)no captured program.*instrument"):
        load(tmp_path / "plain.pt2")
    with pytest.raises(FileNotFoundError):
        load_package(tmp_path / "absent.pt2")
    with pytest.raises(CaptureError, match="format 99"):
        Manifest.from_json('{"format": 99}')
    with pytest.raises(CaptureError, match="cannot be read"):
        Manifest.from_json("{")


def test_a_spec_that_does_not_fit_is_an_error() -> None:
    x = (torch.ones(3, 4),)

    with pytest.raises(SelectionError, match="position 4 does not exist"):
        export(Model(), x, spec={"p": Tap("part.proj", select=[4])})
    with pytest.raises(SpecTypeError, match="type function"):
        export(lambda x: x, x, spec={"p": Tap("part")})  # type: ignore[arg-type]
    model = Model()
    model.spare = nn.Linear(4, 4)
    with pytest.raises(NeverCalledError, match=r"'spare'.*never called"):
        export(model, x, spec={"p": Tap("spare")})


def test_torch_alone_reads_the_file(tmp_path: Path) -> None:
    program = export(Model(), (torch.ones(3, 4),), spec={"p": Tap("part.proj")})
    program.save(tmp_path / "program.pt2")

    (_, seven), values = torch.export.load(tmp_path / "program.pt2").module()(
        torch.ones(3, 4)
    )

    assert seven == 7
    assert list(values) == ["p_0"]


@pytest.mark.filterwarnings(
    # torch's unflatten copies pytree specs, and its pytree module complains.
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)
def test_unflattened_it_gives_the_same_values() -> None:
    x = torch.randn(3, 4)
    program = export(Model(), (x,), spec={"p": Tap("part.proj")})

    _, values = torch.export.unflatten(program.program)(x)

    torch.testing.assert_close(program.read(values)["p"][0], program(x).records["p"][0])


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


@pytest.mark.parametrize("by_name", [(), ("y",), ("y", "x")], ids=str)
def test_arguments_are_passed_as_the_caller_likes_unless_the_order_is_unknown(
    by_name: tuple[str, ...], tmp_path: Path
) -> None:
    model = Two()
    call = {"x": torch.tensor([5.0]), "y": torch.tensor([3.0])}
    args = tuple(v for n, v in call.items() if n not in by_name)
    program = export(model, args, {n: call[n] for n in by_name}, spec={"o": ""})
    program.save(tmp_path / "p.pt2")

    for one in (program, load(tmp_path / "p.pt2")):
        assert one(**call).output == 2
        assert one(*args, **{n: call[n] for n in by_name}).output == 2
        if by_name:
            with pytest.raises(CaptureError, match=r"pass by name: y=\.\.\."):
                one(*call.values())
        else:
            assert one(call["x"], y=call["y"]).output == 2


def test_the_only_argument_needs_no_name() -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    program = export(model, (), {"input": x}, spec={"p": ""})

    assert torch.equal(program(x).records["p"][0], model(x))
    assert torch.equal(program(input=x).records["p"][0], model(x))
