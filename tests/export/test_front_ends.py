"""One spec, one model: the same records from every front end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.exporting.export import export
from fxcapture.exporting.package import load_package
from fxcapture.exporting.program import load
from fxcapture.foreign.backend import backend, recording
from fxcapture.foreign.instrument import instrument
from fxcapture.runtime.functional import functional
from tests.reference import assert_records, eager_records

# torch's own run_decompositions copies pytree specs, and its pytree module complains.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.proj = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.proj(self.norm(x)))


class Model(nn.Module):
    """Layers whose outputs are written over by what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
        return {"logits": self.head(x)}


SPEC = fxc.CaptureSpec(
    {
        "hidden": Tap("layers.*", select=[0, -1]),
        "before_act": Tap("layers.*.proj"),
        "last": Tap("layers.2", reduce="last", detach=True, dtype=torch.float64),
    }
)
Runner = Callable[[torch.Tensor], fxc.Captured]


def _dynamic() -> dict[str, Any]:
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    return {"x": dims}


def by_compile(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    return fxc.compile(model, SPEC, backend="aot_eager", fullgraph=True)


def by_export(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    return export(model, (x,), spec=SPEC, dynamic_shapes=_dynamic())


def by_strict_export(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    return export(model, (x,), spec=SPEC, dynamic_shapes=_dynamic(), strict=True)


def by_loading(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    by_export(model, x, path).save(path / "program.pt2")  # type: ignore[attr-defined]
    return load(path / "program.pt2")


def by_decomposition(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    return by_export(model, x, path).run_decompositions()  # type: ignore[attr-defined]


def by_package(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    program = export(model, (x,), spec=SPEC, dynamic_shapes=_dynamic())
    return load_package(program.package(path / "package.pt2"))


def by_fx(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    return instrument(torch.fx.symbolic_trace(model), SPEC)


def by_plain_export(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    program = torch.export.export(model, (x,), dynamic_shapes=_dynamic())
    return instrument(program, SPEC)


def by_signature(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    kept = tuple(name for name, _ in model.named_modules() if name)
    program = torch.export.export(
        model, (x,), dynamic_shapes=_dynamic(), preserve_module_call_signature=kept
    )
    return instrument(program, SPEC)


def by_functional(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    fn, params, buffers = functional(model, SPEC)
    return lambda x: fn(params, buffers, x)


def by_backend(model: nn.Module, x: torch.Tensor, path: Path) -> Runner:
    compiled = torch.compile(
        model, backend=backend(SPEC, inner="aot_eager"), fullgraph=True
    )

    def run(x: torch.Tensor) -> fxc.Captured:
        with recording() as records:
            output = compiled(x)
        return fxc.Captured(output, records.calls[-1])

    return run


EXACT = [
    by_compile,
    by_export,
    by_strict_export,
    by_loading,
    by_decomposition,
    by_fx,
    by_plain_export,
    by_signature,
    by_functional,
    by_backend,
]
# What Inductor computes may differ from eager in the last bits of a float32.
FRONT_ENDS = [pytest.param(f, 0.0, id=f.__name__) for f in EXACT] + [
    pytest.param(by_package, 1e-5, id="by_package", marks=pytest.mark.inductor)
]


@pytest.mark.parametrize(("make", "tolerance"), FRONT_ENDS)
def test_every_front_end_gives_the_eager_records(
    make: Callable[..., Runner], tolerance: float, tmp_path: Path
) -> None:
    model = Model().eval()
    x = torch.randn(3, 5, 8)
    run = make(model, x.clone(), tmp_path)

    for length in (5, 4, 7):
        x = torch.randn(2, length, 8)
        with torch.no_grad():
            output, want = eager_records(model, SPEC, lambda x=x: model(x.clone()))
            captured = run(x.clone())

        assert_records(want, captured.records, tolerance)
        torch.testing.assert_close(captured.output["logits"], output["logits"])
        assert captured.records.paths("hidden") == ("layers.0", "layers.1", "layers.2")
        assert captured.records["last"][0].dtype == torch.float64


@pytest.mark.parametrize("make", EXACT, ids=lambda f: f.__name__)
def test_records_carry_gradients_unless_detached(
    make: Callable[..., Runner], tmp_path: Path
) -> None:
    model = Model()
    x = torch.randn(2, 5, 8)
    want = eager_records(model, SPEC, lambda: model(x.clone()))[1]
    want["hidden"][2].square().sum().backward()
    gradient = model.layers[0].proj.weight.grad.clone()
    model.zero_grad()
    run = make(model, x.clone(), tmp_path)

    records = run(x.clone()).records
    records["hidden"][2].square().sum().backward()

    assert not records["last"][0].requires_grad
    weight = _weight_of(run, model)
    torch.testing.assert_close(weight.grad, gradient)


def _weight_of(run: Any, model: nn.Module) -> torch.Tensor:
    """The parameter that a run used: a program has its own copies once loaded."""
    program = getattr(run, "program", None)
    if program is None:
        return model.layers[0].proj.weight  # type: ignore[union-attr, index, return-value]
    return dict(run._module.named_parameters())["layers.0.proj.weight"]
