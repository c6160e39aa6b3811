"""Reductions run inside the graph and keep nothing but their result alive."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import reductions
from fxcapture.errors import (
    ElementError,
    SpecError,
    SpecTypeError,
    TargetNotFoundError,
)
from tests.modes import MODES, compile_in


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.linear(h).tanh()


class Encoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def states(self, ids: torch.Tensor) -> list[torch.Tensor]:
        h = self.embed(ids)
        found = [h]
        for layer in self.layers:
            h = layer(h)
            found.append(h)
        return found

    def forward(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.states(ids)[-1].sum(-1)


# Dynamo looks at .grad of a region's inputs, which are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

IDS = torch.arange(10).reshape(2, 5)
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
POSITIONS = torch.tensor([[0, -1], [3, 1]])


def _masked_mean(h: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[m.bool()].mean(0) for row, m in zip(h, MASK, strict=True)])


CASES: dict[str, tuple[Any, Any]] = {
    "last": ("last", lambda h: h[:, -1]),
    "mean": ("mean", lambda h: h.mean(1)),
    "last()": (reductions.last(), lambda h: h[:, -1]),
    "mean()": (reductions.mean(), lambda h: h.mean(1)),
    "last masked": (
        reductions.last("attention_mask"),
        lambda h: torch.stack([h[0, 2], h[1, 4]]),
    ),
    "mean masked": (reductions.mean(mask="attention_mask"), _masked_mean),
    "topk": (reductions.topk(3), lambda h: h.topk(3).values),
    "topk indices": (
        reductions.topk(2, dim=1, part="indices"),
        lambda h: h.topk(2, dim=1).indices,
    ),
    "gather": (
        reductions.gather("positions"),
        lambda h: torch.stack([h[0, [0, 4]], h[1, [3, 1]]]),
    ),
    "callable": (lambda h: h[:, ::2].relu(), lambda h: h[:, ::2].relu()),
}


def _run(captured: fxc.CapturedModule, case: str) -> fxc.Captured:
    extra = {"capture_inputs": {"positions": POSITIONS}} if case == "gather" else {}
    return captured(IDS, attention_mask=MASK, **extra)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_reduction_is_what_it_is_eagerly_and_holds_its_own_bytes_only(
    case: str, mode: str
) -> None:
    reduce, expected = CASES[case]
    model = Encoder()
    spec = {"h": fxc.Tap("layers.*", initial=True, select=[0, 1, -1], reduce=reduce)}
    captured = compile_in(mode, model, spec, regions="layers.*")
    for _ in range(2):
        output, records = _run(captured, case)

    states = model.states(IDS)
    torch.testing.assert_close(output, model(IDS))
    assert records["h"][2] is None
    for i in (0, 1, 3):
        value = records["h"][i]
        torch.testing.assert_close(value, expected(states[i]))
        own = value.numel() * value.element_size()
        assert value.untyped_storage().nbytes() == own


def test_runtime_inputs_change_without_a_recompilation() -> None:
    model = Encoder()
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.gather("positions"))}
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    for positions in (POSITIONS, POSITIONS.flip(0), POSITIONS - 1):
        _, records = captured(IDS, capture_inputs={"positions": positions})
        rows = torch.arange(2).unsqueeze(1)

        assert torch.equal(records["h"][0], model.states(IDS)[1][rows, positions])
    assert len(captured.graphs) == 1


def test_a_mask_left_at_its_default_masks_nothing() -> None:
    model = Encoder()
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.mean("attention_mask"))}
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    _, records = captured(IDS)

    torch.testing.assert_close(records["h"][0], model.states(IDS)[1].mean(1))


def test_positional_arguments_are_found_by_name() -> None:
    model = Encoder()
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.mean("attention_mask"))}
    captured = fxc.compile(model, spec, backend="aot_eager", fullgraph=True)
    _, records = captured(IDS, MASK)

    torch.testing.assert_close(records["h"][0], _masked_mean(model.states(IDS)[1]))


def test_treatments_come_after_the_reduction_in_every_mode() -> None:
    model = Encoder()
    reduce = reductions.mean("attention_mask")
    spec = {"h": fxc.Tap("layers.*", reduce=reduce, dtype=torch.float64, detach=True)}
    for mode in MODES:
        captured = compile_in(mode, model, spec, regions="layers.*")
        (value, *_) = captured(IDS, MASK).records["h"]

        assert value.dtype == torch.float64
        assert not value.requires_grad


# -- what stays alive ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_unreduced_tensor_is_no_output_and_dies_at_its_last_use(case: str) -> None:
    spec = {"h": fxc.Tap("layers.0", reduce=CASES[case][0])}
    captured = fxc.compile(Encoder(), spec, backend="eager", fullgraph=True)
    _run(captured, case)
    graph = captured.graphs[0].graph
    outputs = set(graph.output_node().all_input_nodes)
    states = [
        n
        for n in graph.nodes
        if getattr(n.meta.get("example_value"), "shape", None) == (2, 5, 8)
    ]

    assert states
    assert not outputs & set(states)


def test_live_bytes_show_that_the_unreduced_tensor_is_gone() -> None:
    freed: list[bool] = []
    alive: list[weakref.ref[Any]] = []

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(1, 1, 1000)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(x).sum(-1).sin()

    def interpreted(gm: torch.fx.GraphModule, example: Any) -> Any:
        """Runs node by node and looks, behind the last use, whether it is freed."""

        class Watch(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                gc.collect()
                if n.target == "sin":
                    freed.extend(ref() is None for ref in alive)
                result = super().run_node(n)
                if isinstance(result, torch.Tensor) and result.numel() == 80_000:
                    alive.append(weakref.ref(result))
                return result

        return Watch(gm).run

    spec = {"h": fxc.Tap("wide", reduce=reductions.last())}
    captured = fxc.compile(Narrow(), spec, backend=interpreted, fullgraph=True)
    with torch.no_grad():
        captured(torch.randn(2, 5, 8))

    assert freed == [True]


# -- the spec --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reduce",
    [
        reductions.last(),
        reductions.last("m"),
        reductions.mean(mask="m"),
        reductions.topk(3, dim=1, part="indices"),
        reductions.gather("p"),
    ],
)
def test_reductions_are_frozen_values_that_travel_as_json(reduce: Any) -> None:
    spec = fxc.CaptureSpec({"h": fxc.Tap("layers.*", reduce=reduce)})
    again = fxc.CaptureSpec.from_json(spec.to_json())

    assert json.loads(spec.to_json())["taps"]["h"]["reduce"]["kind"] == reduce.kind
    assert again == spec
    assert hash(again) == hash(spec)


def test_repr_is_how_it_was_written() -> None:
    assert repr(reductions.mean(mask="m")) == "mean(mask='m')"
    assert repr(reductions.gather("p")) == "gather(positions='p')"
    assert repr(reductions.topk(3)) == "topk(k=3)"


def test_a_missing_input_says_which_and_how_to_pass_it() -> None:
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.gather("attention_masc"))}
    captured = fxc.compile(Encoder(), spec, backend="eager")

    with pytest.raises(
        ElementError, match="needs the input 'attention_masc'"
    ) as caught:
        captured(IDS)
    assert "capture_inputs={'attention_masc': tensor}" in str(caught.value)
    assert "attention_mask" in str(caught.value)


def test_an_input_of_the_wrong_kind_is_refused() -> None:
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.mean("attention_mask"))}
    captured = fxc.compile(Encoder(), spec, backend="eager")

    with pytest.raises(SpecTypeError, match=r"takes a mask of shape \(batch, length\)"):
        captured(IDS, attention_mask=MASK[:, None, None])
    gathers = {"h": fxc.Tap("layers.*", reduce=reductions.gather("p"))}
    with pytest.raises(SpecTypeError, match="takes integers of shape"):
        fxc.compile(Encoder(), gathers, backend="eager")(
            IDS, capture_inputs={"p": torch.ones(2)}
        )


def test_a_capture_input_that_no_reduction_names_is_refused() -> None:
    captured = fxc.compile(Encoder(), {"h": "layers.*"}, backend="eager")

    with pytest.raises(TargetNotFoundError, match="capture_inputs has 'positions'"):
        captured(IDS, capture_inputs={"positions": POSITIONS})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reductions.topk(0), "is not a count"),
        (lambda: reductions.topk(1, part="keys"), "is not a part"),
        (lambda: reductions.mean(mask=MASK), "a spec holds no tensors"),
        (lambda: reductions.gather(None), "names no input"),
        (lambda: fxc.Tap("x", reduce="median"), "one of fxcapture.reductions"),
    ],
)
def test_malformed_reductions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_verify_gives_a_reduction_of_one_s_own_the_value_whole() -> None:
    class Pair(nn.Module):
        def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return h + 1, h * 2

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            first, second = self.pair(h)
            return first * second

    spec = {"sum": fxc.Tap("pair", reduce=lambda pair: pair[0] + pair[1])}
    captured = fxc.compile(Pairs(), spec, backend="eager")
    h = torch.randn(3)
    assert torch.equal(captured(h).records["sum"][0], (h + 1) + h * 2)
    assert fxc.verify(captured, h).differences == {"sum": 0.0}


def test_verify_knows_the_inputs_of_reductions() -> None:
    spec = {
        "m": fxc.Tap("layers.*", reduce=reductions.mean("attention_mask")),
        "g": fxc.Tap("layers.*", reduce=reductions.gather("positions")),
    }
    captured = fxc.compile(Encoder(), spec, backend="aot_eager", fullgraph=True)
    found = fxc.verify(captured, IDS, MASK, capture_inputs={"positions": POSITIONS})

    assert max(found.differences.values()) < 1e-6


class TakesMore(Encoder):
    def forward(self, ids, *more, attention_mask=None):
        return super().forward(ids)


@pytest.mark.parametrize("exported", [False, True])
def test_a_position_behind_the_named_ones_is_no_mask(exported: bool) -> None:
    model = TakesMore()
    spec = {"h": fxc.Tap("layers.*", reduce=reductions.mean("attention_mask"))}
    run = (
        fxc.export(model, (IDS, MASK), spec=spec)
        if exported
        else fxc.compile(model, spec, backend="eager")
    )

    (*_, last) = run(IDS, MASK).records["h"]

    torch.testing.assert_close(last, model.states(IDS)[-1].mean(1))
