"""Reductions with an input, in exported programs: masks by name, positions by call."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import fxcapture as fxc
from fxcapture import reductions
from fxcapture.errors import ElementError, SpecError, TargetNotFoundError
from tests.test_reductions import IDS, MASK, POSITIONS, Encoder

MEAN = reductions.mean("attention_mask")
LAST = reductions.last("attention_mask")
GATHER = reductions.gather("positions")
SPEC = fxc.CaptureSpec(
    {
        "mean": fxc.Tap("layers.*", select=[0], reduce=MEAN),
        "last": fxc.Tap("layers.*", select=[1], reduce=LAST),
        "tokens": fxc.Tap("layers.*", initial=True, select=[0, 1], reduce=GATHER),
    }
)


def expected(
    model: Encoder, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> dict[str, list[torch.Tensor]]:
    states = model.states(ids)
    rows = torch.arange(len(ids))
    means = [h[m.bool()].mean(0) for h, m in zip(states[1], mask, strict=True)]
    ends = [int(m.nonzero().max()) for m in mask]
    return {
        "mean": [torch.stack(means)],
        "last": [states[2][rows, ends]],
        "tokens": [states[i][rows[:, None], positions] for i in (0, 1)],
    }


def check(records: fxc.Records, want: dict[str, list[torch.Tensor]]) -> None:
    for name, values in want.items():
        kept = [v for v in records[name] if v is not None]
        assert len(kept) == len(values)
        for value, right in zip(kept, values, strict=True):
            torch.testing.assert_close(value, right)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_inputs_are_those_of_each_call(by, strict, tmp_path) -> None:
    model = Encoder().eval()
    args, kwargs = (IDS, MASK), {}
    if by == "keyword":
        args, kwargs = (IDS,), {"attention_mask": MASK}
    program = fxc.export(
        model,
        args,
        kwargs,
        spec=SPEC,
        capture_inputs={"positions": POSITIONS},
        strict=strict,
    )
    program.save(tmp_path / "model.pt2")

    mask, positions = MASK.flip(0), torch.tensor([[2, 2], [0, -1]])
    passed = (IDS, mask) if by == "position" else (IDS,)
    named = {} if by == "position" else {"attention_mask": mask}
    want = expected(model, IDS, mask, positions)
    for one in (program, fxc.load(tmp_path / "model.pt2")):
        output, records = one(*passed, **named, positions=positions)
        torch.testing.assert_close(output, model(IDS))
        check(records, want)
    assert "forward" not in model.__dict__


def test_only_the_reduced_values_leave_the_program() -> None:
    program = fxc.export(
        Encoder(),
        (IDS, MASK),
        spec=SPEC,
        capture_inputs={"positions": POSITIONS},
        keep_output=False,
    )

    shapes = {o.name: o.shape for o in program.manifest.outputs}
    assert shapes == {
        "mean_0": (2, 8),
        "last_1": (2, 8),
        "tokens_0": (2, 2, 8),
        "tokens_1": (2, 2, 8),
    }
    # The third layer and its weights are gone.
    assert not [n for n in program.program.state_dict if n.startswith("layers.2")]
    values = program(IDS, MASK, positions=POSITIONS).records
    assert values["tokens"][1].shape == (2, 2, 8)


@pytest.mark.parametrize("form", ["by name", "by position"])
def test_shapes_of_the_inputs_may_vary(form) -> None:
    model = Encoder().eval()
    length, count = Dim("length"), Dim("count")
    shapes = {"ids": {1: length}, "attention_mask": {1: length}}
    if form == "by name":
        shapes["positions"] = {1: count}
    program = fxc.export(
        model,
        (IDS, MASK),
        spec=SPEC,
        capture_inputs={"positions": POSITIONS},
        dynamic_shapes=shapes if form == "by name" else tuple(shapes.values()),
    )

    ids = torch.arange(14).reshape(2, 7) % 11
    mask = torch.ones(2, 7, dtype=torch.int64)
    positions = torch.tensor([[6, 1, 0], [5, 4, 3]])[
        :, : 3 if "positions" in shapes else 2
    ]
    records = program(ids, mask, positions=positions).records
    check(records, expected(model, ids, mask, positions))


def test_a_mask_left_out_masks_nothing() -> None:
    spec = {"h": fxc.Tap("layers.0", reduce=reductions.mean("attention_mask"))}
    model = Encoder().eval()
    program = fxc.export(model, (IDS,), spec=spec)

    torch.testing.assert_close(
        program(IDS).records["h"][0], model.states(IDS)[1].mean(1)
    )


def test_the_root_itself_is_reduced_with_an_input() -> None:
    class Root(Encoder):
        def forward(self, ids, attention_mask=None):
            return self.states(ids)[-1]

    spec = {"h": fxc.Tap("", reduce=reductions.gather("positions"))}
    model = Root().eval()
    program = fxc.export(
        model, (IDS,), spec=spec, capture_inputs={"positions": POSITIONS}
    )

    output, records = program(IDS, positions=POSITIONS)
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(records["h"][0], output[rows, POSITIONS])


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_a_package_takes_the_inputs_too(tmp_path) -> None:
    model = Encoder().eval()
    program = fxc.export(
        model, (IDS, MASK), spec=SPEC, capture_inputs={"positions": POSITIONS}
    )
    path = program.package(tmp_path / "model.pt2")

    positions = torch.tensor([[2, 0], [1, -1]])
    with torch.no_grad():
        records = fxc.load_package(path)(IDS, MASK, positions=positions).records
        check(records, expected(model, IDS, MASK, positions))


def test_a_program_made_elsewhere_is_reduced_by_its_own_inputs() -> None:
    model = Encoder().eval()
    program = torch.export.export(
        model, (IDS, MASK), preserve_module_call_signature=("layers.0", "layers.1")
    )
    spec = {
        "mean": fxc.Tap("layers.0", reduce=reductions.mean("attention_mask")),
        "last": fxc.Tap("layers.1", reduce=reductions.last("attention_mask")),
    }
    captured = fxc.instrument(program, spec)

    want = expected(model, IDS, MASK, POSITIONS)
    check(captured(IDS, MASK).records, {name: want[name] for name in spec})

    missing = {"h": fxc.Tap("layers.0", reduce=reductions.gather("positions"))}
    with pytest.raises(ElementError, match="the input 'positions', which the program"):
        fxc.instrument(program, missing)


def test_missing_surplus_and_ambiguous_inputs_are_refused() -> None:
    model = Encoder()
    with pytest.raises(ElementError, match="needs the input 'positions'"):
        fxc.export(model, (IDS, MASK), spec=SPEC)
    inputs = {"positions": POSITIONS, "rows": POSITIONS}
    with pytest.raises(TargetNotFoundError, match="capture_inputs has 'rows'"):
        fxc.export(model, (IDS, MASK), spec=SPEC, capture_inputs=inputs)
    inputs = {"positions": POSITIONS, "attention_mask": MASK}
    with pytest.raises(SpecError, match="'attention_mask', which is an argument"):
        fxc.export(model, (IDS,), spec=SPEC, capture_inputs=inputs)
    assert "forward" not in model.__dict__
