"""Gradients through records: as in eager mode, cut where asked, safe from writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from fxcapture import CaptureSpec, Tap
from tests.models import WIDTH, encoder, ids, mlp, rows
from tests.reference import assert_same, eager_records

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

Loss = Callable[[Any, Any], torch.Tensor]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    # AOTAutograd gives zeros where eager gives none.
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def assert_gradients_agree(
    model: nn.Module, spec: Any, loss: Loss, *args: Any, **settings: Any
) -> None:
    plain = copy.deepcopy(model)
    spec = CaptureSpec(spec)
    output, want = eager_records(plain, spec, lambda: plain(*args))
    expected = gradients(plain, loss(output, want))
    captured = fxc.compile(model, spec, **{"backend": "aot_eager"} | settings)

    for _ in range(2):
        got = captured(*args)
        assert_same(expected, gradients(model, loss(got.output, got.records)), 1e-6)


def of_records(output: Any, records: Any) -> torch.Tensor:
    return sum(v.square().mean() for v in records["h"] if v is not None)


def of_both(output: Any, records: Any) -> torch.Tensor:
    return output.square().mean() + of_records(output, records)


@pytest.mark.parametrize(
    ("loss", "backend"),
    [(of_records, "aot_eager"), (of_both, "aot_eager"), (of_both, "eager")],
)
@pytest.mark.parametrize(
    "tap",
    [
        Tap("layers.*", select=[0, -1]),
        Tap("layers.*.attn", output=1),
        Tap("layers.1", point="input"),
        Tap("layers.*", initial=True, reduce="mean"),
        Tap("layers.1", dtype=torch.float64),
    ],
    ids=["outputs", "weights", "input", "reduced", "cast"],
)
def test_gradients_through_records_are_those_of_eager(tap, loss, backend) -> None:
    assert_gradients_agree(encoder(2), {"h": tap}, loss, ids(), backend=backend)


class WritesAfter(nn.Module):
    """Writes over what its layers returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h = self.a(h)
        h.mul_(3)
        h = self.b(h)
        h += 1
        return h


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_write_after_the_capture_shows_in_no_gradient(backend: str) -> None:
    torch.manual_seed(0)

    assert_gradients_agree(
        WritesAfter(), {"h": Tap(["a", "b"])}, of_both, rows(), backend=backend
    )


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([mlp(2) for _ in range(2)])

    def forward(self, h):
        for part in self.parts:
            h = checkpoint(part, h, use_reentrant=False)
        return h


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_through_a_record_inside_a_checkpoint(backend: str) -> None:
    torch.manual_seed(0)

    assert_gradients_agree(
        Checkpointed(), {"h": Tap("parts.*.0")}, of_both, rows(), backend=backend
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_detach_cuts_the_record_and_not_the_model(
    backend: str, fullgraph: bool
) -> None:
    model, plain = mlp(), mlp()
    captured = fxc.compile(
        model,
        {"cut": Tap(nn.Linear, detach=True), "kept": Tap("2")},
        backend=backend,
        fullgraph=fullgraph,
    )

    output, records = captured(rows())

    assert [v.requires_grad for v in records["cut"]] == [False] * 3
    assert records["kept"][0].requires_grad
    got = gradients(model, output.sum())
    assert_same(gradients(plain, plain(rows()).sum()), got, 1e-6)


def test_no_record_has_a_gradient_under_no_grad() -> None:
    captured = fxc.compile(encoder(2), {"h": "layers.*"}, backend="aot_eager")

    with torch.no_grad():
        records = captured(ids()).records
    assert not any(v.requires_grad for v in records["h"])
    assert all(v.requires_grad for v in captured(ids()).records["h"])


def test_an_integer_record_is_pushed_through_no_autograd() -> None:
    captured = fxc.compile(
        encoder(2), {"i": Tap("", point="input")}, backend="aot_eager"
    )

    output, records = captured(ids())
    output.sum().backward()

    assert_same([ids()], list(records["i"]))


def test_writing_to_a_record_changes_neither_model_nor_input_nor_output() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(WIDTH))

        def forward(self):
            return self.value

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.same = Gives(), nn.Identity()

        def forward(self, h):
            return self.same(h + self.table())

    model = Uses()
    captured = fxc.compile(
        model,
        {"t": "table", "s": "same", "x": Tap("", point="input")},
        backend="aot_eager",
    )
    x = rows()

    with torch.no_grad():
        output, records = captured(x)
        kept = output.clone()
        for name in ("t", "s", "x"):
            records[name][0].zero_()

    assert_same(torch.ones(WIDTH), model.table.value.detach())
    assert_same(rows(), x)
    assert_same(kept, output)


def test_functional_call_gives_gradients_of_the_parameters_it_was_given() -> None:
    captured = fxc.compile(mlp(), {"h": "2"}, backend="aot_eager")
    plain = mlp()
    other = {
        k: (p * 0.5).detach().requires_grad_() for k, p in plain.named_parameters()
    }

    output, records = torch.func.functional_call(captured, other, (rows(),))
    got = torch.autograd.grad(records["h"][0].sum(), other["0.weight"])

    seen: dict[str, torch.Tensor] = {}
    plain[2].register_forward_hook(lambda m, a, out: seen.update(h=out.clone()))
    want_output = torch.func.functional_call(plain, other, (rows(),))
    assert_same(want_output, output, 1e-6)
    assert_same(torch.autograd.grad(seen["h"].sum(), other["0.weight"]), got, 1e-6)
    assert_same(mlp()(rows()), captured(rows()).output)


def test_dropping_the_records_frees_what_they_held() -> None:
    import gc
    import weakref

    captured = fxc.compile(encoder(2), {"h": "layers.*"}, backend="aot_eager")
    with torch.no_grad():
        captured(ids())
        output, records = captured(ids())
    held = [weakref.ref(v) for v in records["h"]]

    del output, records
    gc.collect()

    assert [r() for r in held] == [None, None]
