"""Every public case, compiled: as one graph where that is possible, and in pieces.

Each is called twice, since a second call takes another way (no tracing).  After every
call the model has nothing on it that it did not have before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture.errors import TraceError
from tests.acceptance.cases import BY_ID, CASES, SEED, Case, Driver
from tests.reference import assert_records, eager_records, footprint

ONE_GRAPH = [c for c in CASES if not c.no_graph]
NO_GRAPH = [c for c in CASES if c.no_graph]


def by_id(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in cases])


def assert_case_holds(case: Case, model: nn.Module, captured: nn.Module) -> None:
    """Two runs: output, records and footprint are right after each."""
    want = case.expected_records()
    untouched = footprint(model)
    plain_output = case.driven(case.build())[0]
    for _ in range(2):
        output, driver = case.driven(captured)

        assert case.equal(plain_output, output) == ""
        assert case.equal(want, driver.joined(want)) == ""
        assert untouched == footprint(model)


def test_there_are_71_cases_with_distinct_names() -> None:
    assert (len(CASES), len(BY_ID)) == (71, 71)


@by_id(ONE_GRAPH)
def test_records_are_right_as_one_graph(case: Case) -> None:
    model = case.build()
    captured = fxc.compile(model, case.spec, backend="aot_eager", fullgraph=True)

    assert_case_holds(case, model, captured)


@by_id(NO_GRAPH)
def test_plain_compile_refuses_what_the_cases_say_it_refuses(case: Case) -> None:
    plain = torch.compile(case.build(), backend="aot_eager", fullgraph=True)

    with pytest.raises((torch._dynamo.exc.TorchDynamoException, RuntimeError)):
        case.driven(plain)


@by_id(NO_GRAPH)
def test_fullgraph_raises_a_trace_error_where_plain_compile_refuses(case: Case) -> None:
    model = case.build()
    untouched = footprint(model)
    captured = fxc.compile(model, case.spec, backend="aot_eager", fullgraph=True)

    with pytest.raises(TraceError, match="cannot be traced as one graph") as caught:
        case.driven(captured)

    assert "drop fullgraph=True" in str(caught.value)
    assert caught.value.why
    assert untouched == footprint(model)


@by_id(NO_GRAPH)
def test_records_are_right_in_pieces_where_no_one_graph_exists(case: Case) -> None:
    model = case.build()
    captured = fxc.compile(model, case.spec, backend="aot_eager")

    assert_case_holds(case, model, captured)


def test_a_head_that_runs_in_training_only_is_recorded_after_train() -> None:
    case = BY_ID["train_only_head"]
    model = case.build()
    captured = fxc.compile(model, case.spec, backend="aot_eager", fullgraph=True)

    for training in (False, True, False, True):
        captured.train(training)
        twin = case.build().train(training)
        want = eager_records(twin, case.spec, lambda t=twin: case.driven(t))[1]
        driver = case.driven(captured)[1]

        assert training == bool(want["side"])
        assert_records(want, driver.records[0])


def test_checkpointed_values_are_those_of_forward_with_backward_run() -> None:
    case = BY_ID["checkpoint_backward_recompute"]
    plain, model = case.build(), case.build()
    captured = fxc.compile(model, case.spec, backend="aot_eager", fullgraph=True)

    case.driven(plain)
    case.driven(captured)

    for (name, want), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(got.grad, want.grad, msg=name)


def test_a_driver_keeps_the_records_of_every_call() -> None:
    case = BY_ID["many_sequence_lengths"]
    captured = fxc.compile(case.build(), case.spec, backend="eager")
    driver = Driver(captured)
    torch.manual_seed(SEED)

    args, kwargs = case.inputs()
    with torch.no_grad():
        case.run(driver, args, kwargs)

    assert [(1, n, 6) for n in (4, 2, 6, 10, 3, 9, 5, 8, 7)] == [
        tuple(r["states"][0].shape) for r in driver.records
    ]
