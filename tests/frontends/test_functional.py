"""The pure function, under every transform and inside other traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.errors import NeverCalledError, TargetNotFoundError
from fxcapture.runtime.functional import functional
from tests.reference import assert_records, assert_same, eager_records, footprint


@dataclasses.dataclass
class Parts:
    mixed: torch.Tensor
    mean: torch.Tensor
    width: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Parts:
        mixed = x + self.proj(x).tanh()
        return Parts(mixed, mixed.mean(-1), x.shape[-1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).mixed
        return x.mul_(2.0)


SPEC = fxc.CaptureSpec(
    {
        "mixed": Tap("blocks.*", output="mixed", select=[0, -1], initial=True),
        "whole": Tap("blocks.1"),
        "small": Tap("blocks.*.proj", reduce=torch.sin, detach=True),
    }
)


@pytest.fixture
def model() -> nn.Module:
    return Model().eval()


def test_records_are_those_of_eager_hooks_and_the_model_is_untouched(
    model: nn.Module,
) -> None:
    x = torch.randn(4, 6)
    untouched = footprint(model)
    fn, params, buffers = functional(model, SPEC)

    output, records = fn(params, buffers, x.clone())

    expected, want = eager_records(model, SPEC, lambda: model(x.clone()))
    assert_same(expected, output)
    assert_records(want, records)
    assert untouched == footprint(model)
    assert type(records["whole"][0]) is Parts
    assert records["whole"][0].width == 6


def test_other_parameters_give_their_own_records(model: nn.Module) -> None:
    x = torch.randn(4, 6)
    fn, params, buffers = functional(model, SPEC)
    doubled = {name: p * 2 for name, p in params.items()}

    records = fn(doubled, buffers, x).records

    twin = Model().eval()
    twin.load_state_dict(doubled)
    assert_records(eager_records(twin, SPEC, lambda: twin(x))[1], records)


def plain(fn: Any, params: Any, x: torch.Tensor) -> Any:
    return fn(params, {}, x).records


def under_grad(fn: Any, params: Any, x: torch.Tensor) -> Any:
    def loss(params: Any) -> tuple[torch.Tensor, Any]:
        output, records = fn(params, {}, x)
        return output.sum(), records

    return torch.func.grad(loss, has_aux=True)(params)[1]


def under_vmap(fn: Any, params: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(lambda row: fn(params, {}, row).records)(x)


def under_aot(fn: Any, params: Any, x: torch.Tensor) -> Any:
    return aot_function(lambda p, x: fn(p, {}, x), nop)(params, x).records


def under_make_fx(fn: Any, params: Any, x: torch.Tensor) -> Any:
    return make_fx(lambda p, x: fn(p, {}, x).records)(params, x)(params, x)


TRANSFORMS = [plain, under_grad, under_vmap, under_aot, under_make_fx]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_a_transform_returns_the_same_records(
    transform: Callable[..., Any], model: nn.Module
) -> None:
    x = torch.randn(4, 6)
    fn, params, _ = functional(model, SPEC)

    records = transform(fn, params, x.clone())

    assert isinstance(records, fxc.Records)
    want = eager_records(model, SPEC, lambda: model(x.clone()))[1]
    assert_records(want, records, 1e-6)


@pytest.mark.parametrize(
    "transform", [plain, under_grad, under_vmap], ids=lambda f: f.__name__
)
def test_compiled_around_a_transform_it_returns_the_same_records(
    transform: Callable[..., Any], model: nn.Module
) -> None:
    fn, params, _ = functional(model, SPEC)
    compiled = torch.compile(
        lambda params, x: transform(fn, params, x), backend="aot_eager", fullgraph=True
    )

    for _ in range(2):
        x = torch.randn(4, 6)
        records = compiled(params, x.clone())
        want = eager_records(model, SPEC, lambda x=x: model(x.clone()))[1]
        assert_records(want, records, 1e-6)


def test_a_jacobian_of_a_record_is_the_models(model: nn.Module) -> None:
    x = torch.randn(6)
    fn, params, buffers = functional(model, SPEC)

    got = torch.func.jacrev(lambda x: fn(params, buffers, x).records["mixed"][3])(x)

    def last(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x).mixed
        return x

    want = torch.autograd.functional.jacobian(last, x)
    torch.testing.assert_close(got, want)


def test_gradients_flow_through_records(model: nn.Module) -> None:
    x = torch.randn(4, 6)
    fn, params, buffers = functional(model, SPEC)

    grads = torch.func.grad(
        lambda p: fn(p, buffers, x).records["mixed"][3].square().sum()
    )(params)

    expected = eager_records(model, SPEC, lambda: model(x))[1]["mixed"][3]
    expected.square().sum().backward()
    torch.testing.assert_close(
        grads["blocks.0.proj.weight"], model.blocks[0].proj.weight.grad
    )


def test_a_module_that_no_call_reaches_is_an_error(model: nn.Module) -> None:
    fn, params, buffers = functional(model, {"unused": Tap("unused")})

    with pytest.raises(NeverCalledError, match=r"'unused'.*never called"):
        fn(params, buffers, torch.randn(2, 6))
    with pytest.raises(TargetNotFoundError, match="'blokcs'"):
        functional(model, {"x": Tap("blokcs")})
    assert all("forward" not in m.__dict__ for m in model.modules())
