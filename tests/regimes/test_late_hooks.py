"""Hooks that come or go after a captured model was compiled are noticed.

torch compiles them in and does not look again, unless
``torch._dynamo.config.skip_nnmodule_hook_guards`` is false.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.runtime import hook_state
from fxcapture.testing import eager_reference


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


class BrokenOften(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


SPEC = {"b": Tap("blocks.*"), "linear": Tap("blocks.*.linear")}
Way = tuple[type[Net], dict[str, Any]]
WAYS: dict[str, Way] = {
    "whole": (Net, {}),
    "pieces": (Broken, {}),
    "pieces of a kind": (BrokenOften, {}),
    "regions": (Net, {"regions": "blocks.*"}),
}
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda m, a, o: o + 1),
    "before": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
    "backward": lambda m: m.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "for all modules": lambda m: register_module_forward_pre_hook(
        lambda m, a: (a[0] + 1,) if isinstance(m, nn.Linear) else None
    ),
}


def made(way: str) -> tuple[Net, fxc.CapturedModule]:
    kind, settings = WAYS[way]
    torch.manual_seed(0)
    model = kind().eval()
    return model, fxc.compile(model, SPEC, backend="eager", **settings)


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()


def assert_right(model: Net, captured: fxc.CapturedModule) -> None:
    x, plain = leaf(), leaf()
    output, records = captured(x)
    expected = model(plain)
    output.sum().backward()
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
    wanted = eager_reference(model, captured.spec, (leaf(),))
    for name in SPEC:
        for got, value in zip(records[name], wanted[1][name], strict=True):
            assert torch.equal(got, value)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_come_later_run_and_those_that_go_do_not(
    way: str, hook: str
) -> None:
    model, captured = made(way)
    assert_right(model, captured)
    with contextlib.ExitStack() as hooks:
        with HOOKS[hook](model.blocks[1].act):
            for where in ("blocks.2.linear", "blocks.1", ""):
                hooks.enter_context(HOOKS[hook](model.get_submodule(where)))
            assert_right(model, captured)
        assert_right(model, captured)
    assert_right(model, captured)


@pytest.mark.parametrize("where", ["blocks.1.linear", "blocks.0.act"])
@pytest.mark.parametrize("way", ["pieces of a kind", "regions"])
def test_a_hook_of_one_block_is_not_that_of_another(way: str, where: str) -> None:
    model, captured = made(way)
    HOOKS["before"](model.get_submodule(where))
    assert_right(model, captured)
    assert_right(model, captured)


@pytest.mark.parametrize("way", WAYS)
def test_one_hook_in_place_of_another_is_noticed(way: str) -> None:
    model, captured = made(way)
    act = model.blocks[1].act
    first = HOOKS["forward"](act)
    assert_right(model, captured)
    first.remove()
    act.register_forward_hook(lambda m, a, o: o * 3)
    assert_right(model, captured)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_what_is_hooked_elsewhere_compiles_nothing_anew(way: str) -> None:
    model, captured = made(way)
    captured(leaf())
    graphs = captured.graphs
    HOOKS["forward"](nn.Linear(1, 1))
    leaf().register_hook(lambda grad: grad)
    captured(leaf())

    assert captured.graphs == graphs
    assert torch.equal(captured(leaf()).output, model(leaf()))


def test_modules_are_walked_only_after_a_hook_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, captured = made("whole")
    HOOKS["forward"](model.blocks[0])
    for _ in range(2):
        captured(leaf())

    def walked(model: nn.Module) -> Any:
        raise AssertionError("walked")

    monkeypatch.setattr(hook_state._torch, "hook_tables", walked)
    captured(leaf())
    HOOKS["forward"](nn.Linear(1, 1))
    with pytest.raises(AssertionError, match="walked"):
        captured(leaf())


@torch.no_grad()
def test_what_was_compiled_goes_with_the_hooks_and_with_the_captured_model() -> None:
    model, captured = made("whole")
    captured(leaf())
    before = weakref.ref(captured.graphs[0])
    HOOKS["forward"](model.blocks[0].act)
    captured(leaf())
    gc.collect()
    assert before() is None
    assert len(captured.graphs) == 1

    after = weakref.ref(captured.graphs[0])
    del captured
    for _ in range(2):  # first the function, then what Dynamo compiled of it
        gc.collect()
    assert after() is None


@torch.no_grad()
def test_a_hook_on_the_wrapper_is_the_models() -> None:
    model, captured = made("whole")
    captured(leaf())
    captured.register_forward_hook(lambda m, a, o: o + 1)

    assert torch.equal(captured(leaf()).output, model(leaf()))


@torch.no_grad()
def test_a_hook_that_breaks_the_graph_and_goes() -> None:
    model, captured = made("pieces")
    captured = fxc.compile(model.blocks[0], {"l": "linear"}, backend="eager")
    captured(leaf())
    seen: list[int] = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        seen.append(1)

    handle = model.blocks[0].act.register_forward_hook(hook)
    captured(leaf())
    assert len(seen) == 1
    assert captured._fxc_program.break_reason is not None
    handle.remove()
    captured(leaf())

    assert len(seen) == 1
    assert captured._fxc_program.break_reason is None
