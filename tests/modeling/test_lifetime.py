"""What lives on after a decorated call, what threads wait for, what traces keep."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxcapture.modeling.decorators import capture_outputs
from tests.modeling.toys import (
    DIM,
    LENGTH,
    Base,
    Block,
    Model,
    Output,
    Untied,
    assert_same,
    expected,
    overrides,
    picked,
)

X = torch.randn(2, 3, DIM)
#: Long enough for a compilation on a busy machine.
PATIENCE_S = 60.0


class Broken(Untied):
    """Its graph breaks behind the first layer."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = x
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 0:
                torch._dynamo.graph_break()
        return self.norm(h)


# ------------------------------------------------------------------- what lives on


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_call_captured_is_freed_with_its_output(in_place: bool) -> None:
    model = Broken()
    if in_place:
        for layer in model.layers:
            layer.compile(backend="eager")
    call = torch.compile(model, backend="eager")
    seen: list[Any] = []
    for _ in range(5):
        with torch.no_grad():
            record = call(X, output_hidden_states=True).hidden_states
        assert len(record) == LENGTH
        seen += [weakref.ref(h) for h in record]
        del record
        gc.collect()
        assert [ref for ref in seen if ref() is not None] == []


@pytest.mark.parametrize("asked", [False, True, [1]])
@pytest.mark.parametrize("how", ["eager", "compiled", "broken", "in place"])
def test_models_are_freed_with_their_last_reference(how: str, asked: Any) -> None:
    refs = []
    for _ in range(6):
        model = Broken() if how == "broken" else Model()
        call: Any = model
        if how == "in place":
            for layer in model.layers:
                layer.compile(backend="eager")
        elif how != "eager":
            call = torch.compile(model, backend="eager", fullgraph=how == "compiled")
        for _ in range(2):
            call(X, output_hidden_states=asked)
        refs.append(weakref.ref(model))
        refs.append(weakref.ref(model.layers[0]))
        del model, call
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 0


# --------------------------------------------------------------- the tensor itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("record", ["hidden_states", "attentions"])
def test_gradients_of_every_record_can_be_retained(
    record: str, hooked: bool, dtype: torch.dtype
) -> None:
    """Whether or not autograd happens to keep the tensor alive."""
    model = Untied().to(dtype)
    if hooked:
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: None)
    x = X.to(dtype).requires_grad_()
    values = getattr(model(x, **{f"output_{record}": True}), record)
    for _ in range(2):  # also when the model was used before
        output = model(x, **{f"output_{record}": True})
        values = getattr(output, record)
        for value in values:
            value.retain_grad()
        output.last_hidden_state.float().square().mean().backward()
        assert [value.grad is None for value in values] == [False] * len(values)


def test_what_was_written_to_is_a_copy() -> None:
    class Writes(Untied):
        def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = x * 1.0
            for layer in self.layers:
                h = layer(h)
                h.add_(1.0)
            return self.norm(h)

    model = Writes()
    record = model(X, output_hidden_states=True).hidden_states
    h = X * 1.0
    for i, layer in enumerate(model.layers):
        h = layer(h)
        assert torch.equal(record[i + 1], h)
        h = h + 1.0


# ------------------------------------------------------------------------- threads


class Waiting(Block):
    """Stops where a test wants it to, outside of graphs."""

    wait: Any = None

    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.wait is not None:
            self.wait()
        return super().forward(h)


def compile_something() -> None:
    torch.compile(lambda t: t.sin() + 1, backend="eager", fullgraph=True)(torch.ones(3))


def test_another_thread_can_compile_while_a_traced_model_is_captured_eagerly() -> None:
    model = Model(block=Waiting)
    torch.compile(model, backend="eager")(X, output_hidden_states=True)
    begin, done = threading.Event(), threading.Event()

    def other() -> None:
        begin.wait(PATIENCE_S)
        compile_something()
        done.set()

    def wait() -> None:
        begin.set()
        compiled.append(done.wait(PATIENCE_S / 4))

    compiled: list[bool] = []
    thread = threading.Thread(target=other)
    thread.start()
    Waiting.wait = staticmethod(wait)
    try:
        with torch.no_grad():
            record = model(X, output_hidden_states=True).hidden_states
    finally:
        Waiting.wait = None
    thread.join()
    assert compiled[0]
    assert_same(record, expected(model, X))


@pytest.mark.parametrize("first", ["asks for nothing", "asks for all"])
def test_a_trace_bakes_in_nothing_of_what_another_thread_does(first: str) -> None:
    gate, inside = threading.Event(), threading.Event()
    local = threading.local()

    @torch.compiler.disable
    def stop_here() -> None:
        if getattr(local, "eager", False):
            inside.set()
            gate.wait(PATIENCE_S)

    class Stopping(Untied):
        def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.layers[0](x)
            stop_here()
            for layer in self.layers[1:]:
                h = layer(h)
            return self.norm(h)

    model = Stopping()
    states = expected(model, X, tie=False)
    states[0] = X
    call = torch.compile(model, backend="eager")
    got: list[Any] = []

    def eagerly() -> None:
        local.eager = True
        with torch.no_grad():
            got.append(model(X, output_hidden_states=True).hidden_states)

    thread = threading.Thread(target=eagerly)
    thread.start()
    inside.wait(PATIENCE_S)
    with torch.no_grad():
        if first == "asks for nothing":
            assert call(X).hidden_states is None
        during = call(X, output_hidden_states=True).hidden_states
        gate.set()
        thread.join()
        after = call(X, output_hidden_states=True).hidden_states
        some = call(X, output_hidden_states=[0, 2]).hidden_states
        eager = model(X, output_hidden_states=True).hidden_states
    for record in (*got, during, after, eager):
        assert_same(record, states)
    assert picked(some) == [0, 2]
    assert overrides(model) == []


# ---------------------------------------------------------------------- exceptions


class Raising(Block):
    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise KeyError("on purpose")


class Wrapping(nn.Module):
    """A block whose own block raises, which it catches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Raising()
        self.mlp = nn.Linear(DIM, DIM)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(h * 3)
        except KeyError:
            return torch.tanh(self.mlp(h))


@pytest.mark.parametrize("traced_before", [False, True])
def test_a_call_that_raised_inside_another_one_counts_for_nothing(
    traced_before: bool,
) -> None:
    class Model(Base):
        _can_record_outputs = {"hidden_states": [Wrapping, Raising]}  # noqa: RUF012

        @capture_outputs(tie_last_hidden_states=False)
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            h = x * 1.0
            for layer in self.layers:
                h = layer(h)
            return Output(h)

    model = Model(block=Wrapping)
    model.layers[1].register_forward_hook(lambda module, args, output: None)
    if traced_before:
        torch.compile(model, backend="eager")(X)
    record = model(X, output_hidden_states=True).hidden_states
    h = X * 1.0
    want = [h]
    for layer in model.layers:
        h = torch.tanh(layer.mlp(h))
        want.append(h)
    assert_same(record, want)
