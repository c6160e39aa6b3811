"""Many classes, many instances, many selections: as many graphs as undecorated."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fxcapture as fxc
from fxcapture.modeling.decorators import (
    capture_outputs,
    convert_outputs,
    merge_with_config_defaults,
    select_hidden_states,
)
from tests.modeling.toys import (
    DIM,
    LENGTH,
    Base,
    DictModel,
    Model,
    Output,
    PlainModel,
    assert_same,
    config,
    expected,
    picked,
)

X = torch.randn(2, 3, DIM)
ASKED = pytest.mark.parametrize("asked", [{}, {"output_hidden_states": [0, 2]}])


def graphs_of(models: list[nn.Module], **kwargs: Any) -> int:
    """How many graphs they are, each under a torch.compile of its own."""
    counter = CompileCounter()
    for model in models:
        call = torch.compile(model, backend=counter, fullgraph=True)
        output = call(X, **kwargs)
        states = expected(model, X)
        assert_same(
            output.hidden_states,
            [h if i in (0, 2) else None for i, h in enumerate(states)]
            if kwargs
            else None,
        )
        torch.testing.assert_close(output.last_hidden_state, states[-1])
    return counter.frame_count


@ASKED
def test_instances_of_a_class_share_one_graph(asked: Any) -> None:
    assert graphs_of([PlainModel() for _ in range(20)]) == 1
    torch._dynamo.reset()

    assert graphs_of([Model() for _ in range(20)], **asked) == 1


def a_class(number: int, *decorators: Callable[..., Any]) -> type[Base]:
    def forward(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return Output(self.run(x))

    # A code object of its own, as in a source file of its own.
    made: Any = types.FunctionType(
        forward.__code__.replace(co_name=f"forward{number}"),
        forward.__globals__,
        "forward",
        None,
        forward.__closure__,
    )
    made.__qualname__ = f"Model{number}.forward"
    for decorate in decorators:
        made = decorate(made)
    return type(f"Model{number}", (Base,), {"forward": made})


@ASKED
@pytest.mark.parametrize(
    "decorators",
    [
        (capture_outputs,),
        (capture_outputs, merge_with_config_defaults),
        (capture_outputs, select_hidden_states(lambda self: False)),
        (capture_outputs, convert_outputs),
    ],
    ids=["capture", "merge", "select", "convert"],
)
def test_twenty_classes_are_twenty_graphs(decorators: Any, asked: Any) -> None:
    models = [a_class(i, *decorators)() for i in range(20)]

    assert graphs_of(models, **asked) == 20


def test_a_decorated_function_says_what_it_is_called() -> None:
    names = {a_class(i, capture_outputs).forward.__code__.co_name for i in (1, 1, 2)}

    assert names == {f"{__name__}.Model1.forward", f"{__name__}.Model2.forward"}


def test_instances_that_declare_differently_do_not_share_a_graph() -> None:
    first, second = Model(), Model()
    second._can_record_outputs = {"hidden_states": "layers.1", "attentions": nn.Linear}
    counter = CompileCounter()
    for model in (first, second, first, second):
        call = torch.compile(model, backend=counter, fullgraph=True)
        want = model(X, output_hidden_states=True).hidden_states
        assert_same(call(X, output_hidden_states=True).hidden_states, want)
    assert counter.frame_count == 2


def test_instances_whose_sub_models_declare_differently_do_not_either() -> None:
    class Outer(Base):
        def __init__(self) -> None:
            super().__init__(layers=0)
            self.inner = PlainModel()

        @capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            return Output(self.inner(x).last_hidden_state)

    first, second = Outer(), Outer()
    second.inner._can_record_outputs = {"hidden_states": "layers.1"}
    for model, count in ((first, 5), (second, 2), (first, 5), (second, 2)):
        call = torch.compile(model, backend="eager", fullgraph=True)
        assert len(model(X, output_hidden_states=True).hidden_states) == count
        assert len(call(X, output_hidden_states=True).hidden_states) == count


# ------------------------------------------------------ flags through fxcapture.compile


def one_trace() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_hundred_flags_through_compile_are_one_graph() -> None:
    torch._dynamo.utils.counters.clear()
    model = Model()
    full = model(X, output_hidden_states=True, output_attentions=True)
    captured = fxc.compile(model, backend="eager", fullgraph=True)
    for k in range(100):
        position = k % LENGTH - (k % 2) * LENGTH
        output, records = captured(X, output_hidden_states=[position, 99 + k])
        kept = position % LENGTH
        assert picked(records["hidden_states"]) == [kept]
        assert output.hidden_states is records["hidden_states"]
        if kept < LENGTH - 1:  # the decorator ties the last one
            torch.testing.assert_close(
                output.hidden_states[kept], full.hidden_states[kept]
            )
        assert_same(output.attentions, full.attentions)
    assert one_trace() == 1


@pytest.mark.parametrize(
    ("asked", "hidden", "attentions"),
    [
        ({}, [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        ({"output_hidden_states": True}, [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        ({"output_hidden_states": None}, [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        ({"output_hidden_states": False}, None, [0, 1, 2, 3]),
        ({"output_hidden_states": 2, "output_attentions": False}, [2], None),
        ({"output_attentions": [-1, 99]}, [0, 1, 2, 3, 4], [3]),
    ],
    ids=str,
)
def test_what_a_flag_means_to_a_compiled_declared_model(
    asked: Any, hidden: Any, attentions: Any
) -> None:
    for model in (Model(), PlainModel()):
        output, records = fxc.compile(model, backend="eager")(X, **asked)

        assert picked(output.hidden_states) == hidden
        assert picked(output.attentions) == attentions
        assert picked(records["hidden_states"]) == (hidden or [])


def test_a_flag_and_a_selection_for_one_call_are_told_apart() -> None:
    captured = fxc.compile(Model(), backend="eager")

    _, records = captured(X, output_hidden_states=[1], select={"attentions": 0})

    assert picked(records["hidden_states"]) == [1]
    assert picked(records["attentions"]) == [0]
    with pytest.raises(TypeError, match="output_hidden_states='1' is not a selection"):
        captured(X, output_hidden_states="1")


def test_a_flag_reaches_the_records_of_every_sub_model() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = DictModel(), DictModel(config())

        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            h = self.encoder(x, **kwargs)["last_hidden_state"]
            return self.decoder(h, **kwargs)["last_hidden_state"]

    records = fxc.compile(Pair(), backend="eager")(X, output_hidden_states=[1]).records

    assert picked(records["encoder_hidden_states"]) == [1]
    assert picked(records["decoder_hidden_states"]) == [1]
    assert picked(records["decoder_attentions"]) == [0, 1, 2, 3]


def test_a_model_that_takes_a_flag_of_its_own_gets_it() -> None:
    class Own(PlainModel):
        def forward(self, x: torch.Tensor, output_past: Any = None) -> Any:
            return Output(self.run(x), past=output_past)

    output, _ = fxc.compile(Own(), backend="eager")(X, output_past=3)

    assert output.past == 3


# ------------------------------------------------------------------ in a larger trace


def test_records_stand_in_the_output_inside_a_larger_trace_too() -> None:
    captured = fxc.compile(PlainModel(), backend="eager")
    want = captured(X).output
    for call in (
        lambda x: captured(x),
        lambda x: captured(x, output_hidden_states=[1]),
    ):
        outer = torch.compile(call, backend="eager", fullgraph=True)
        output = outer(X).output
        assert picked(output.hidden_states) == picked(call(X).output.hidden_states)
        assert_same(output.hidden_states[1:2], want.hidden_states[1:2])
        assert_same(output.attentions, want.attentions)


def test_inputs_of_reductions_reach_a_capture_inside_a_larger_trace() -> None:
    spec = {"h": fxc.Tap("layers.*", reduce=fxc.reductions.gather("at"))}
    captured = fxc.compile(PlainModel(), spec, backend="eager")
    at = torch.tensor([0, 2])
    want = captured(X, capture_inputs={"at": at}).records

    def call(x: torch.Tensor, at: torch.Tensor) -> Any:
        return captured(x, capture_inputs={"at": at}).records

    got = torch.compile(call, backend="eager", fullgraph=True)(X, at)
    assert_same(got["h"], want["h"])
