"""Under Inductor: close to eager, within a tolerance for each dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fxcapture as fxc
from fxcapture import Tap
from tests.models import bert, ids, llama, mlp, rows
from tests.reference import assert_records, assert_same, eager_records

pytestmark = pytest.mark.inductor

#: Largest difference, absolute and relative: an extra output may change fusion.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def first_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def assert_close_to_eager(
    captured: fxc.CapturedModule, plain: nn.Module, x: torch.Tensor, **select: Any
) -> None:
    tolerance = TOLERANCE[next(plain.parameters()).dtype]
    with torch.no_grad():
        output, want = eager_records(
            plain, captured.spec, lambda: plain(x), select=select
        )
        got = captured(x, select=select or None)
    assert_same(first_of(output), first_of(got.output), tolerance)
    assert_records(want, got.records, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("build", "inputs", "tap"),
    [
        pytest.param(llama, ids, Tap("model.layers.*", initial=True), id="llama"),
        pytest.param(bert, ids, Tap("encoder.layer.*", output=0), id="bert"),
        pytest.param(mlp, rows, Tap(nn.Linear), id="mlp"),
    ],
)
def test_records_and_output_are_close_to_eager(
    build: Callable[[], nn.Module], inputs: Any, tap: Tap, dtype: torch.dtype
) -> None:
    model, plain = build().to(dtype), build().to(dtype)
    x = inputs() if inputs is ids else inputs().to(dtype)
    captured = fxc.compile(model, {"h": tap}, fullgraph=True)

    assert_close_to_eager(captured, plain, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close_to_eager(captured, plain, x)


def test_a_sibling_is_compiled_late_from_the_same_trace() -> None:
    captured = fxc.compile(llama(), {"h": Tap("model.layers.*")}, fullgraph=True)

    assert_close_to_eager(captured, llama(), ids())
    assert_close_to_eager(captured, llama(), ids(), h=[0])
    assert_close_to_eager(captured, llama(), ids(), h=[-1])

    assert counters["stats"]["unique_graphs"] == 1


def test_the_batch_may_change_with_dynamic_shapes() -> None:
    captured = fxc.compile(mlp(), {"h": Tap("2")}, fullgraph=True, dynamic=True)

    for n in (3, 5, 4):
        assert_close_to_eager(captured, mlp(), rows(n, 8))

    assert counters["stats"]["unique_graphs"] == 1


def test_the_mode_and_options_of_torch_compile_are_taken() -> None:
    captured = fxc.compile(
        mlp(), {"h": Tap("2")}, options={"max_fusion_size": 8}, fullgraph=True
    )

    assert_close_to_eager(captured, mlp(), rows())


def test_gradients_of_records_are_close_to_eager() -> None:
    model, plain = mlp(), mlp()
    captured = fxc.compile(model, {"h": Tap("2")}, fullgraph=True)
    output, records = captured(rows())
    (output.sum() + records["h"][0].square().sum()).backward()

    output, want = eager_records(plain, captured.spec, lambda: plain(rows()))
    (output.sum() + want["h"][0].square().sum()).backward()

    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)


def test_a_write_after_the_capture_does_not_show() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
    ).eval()
    captured = fxc.compile(model, {"h": Tap("0")}, fullgraph=True)

    assert_close_to_eager(captured, model, rows())
