"""Nothing is left behind, nothing is shared, and everything else works as before."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import CaptureSpec, Tap
from tests.models import WIDTH, Attention, Encoder, Layer, encoder, ids, mlp, rows
from tests.reference import assert_records, assert_same, eager_records, footprint

# Dynamo looks at .grad of what crosses a graph break, also of plain models.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

HIDDEN = CaptureSpec({"hidden": Tap("layers.*"), "weights": Tap(Attention, output=1)})


def compiled(model: nn.Module, spec: Any, **settings: Any) -> fxc.CapturedModule:
    return fxc.compile(model, spec, **{"backend": "eager"} | settings)


def assert_right(captured: fxc.CapturedModule, plain: nn.Module, *args: Any) -> None:
    """Output and records are what copying hooks see on an equal, plain model."""
    output, want = eager_records(plain, captured.spec, lambda: plain(*args))

    got = captured(*args)

    assert_same(output, got.output)
    assert_records(want, got.records)


# --------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "fullgraph"), [("eager", True), ("eager", False), ("aot_eager", True)]
)
def test_compile_and_calls_leave_nothing_on_the_model(backend, fullgraph) -> None:
    model = encoder(1)
    before = footprint(model)

    captured = compiled(model, HIDDEN, backend=backend, fullgraph=fullgraph)
    assert footprint(model) == before
    for _ in range(3):
        captured(ids())
        assert footprint(model) == before
    captured(ids(), select={"hidden": [0]})
    captured.select(weights=-1)(ids())
    assert footprint(model) == before


class RaisesAfter(Encoder):
    """Raises in the middle, where a token number says so."""

    def forward(self, ids, fail=False):
        h = self.tokens(ids)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if fail and i == 1:
                raise ValueError("in the middle")
        return self.norm(h)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_call_that_raised_leaves_nothing_and_the_next_call_is_right(
    fullgraph,
) -> None:
    model, plain = RaisesAfter().eval(), RaisesAfter().eval()
    plain.load_state_dict(model.state_dict())
    before = footprint(model)
    captured = compiled(model, {"hidden": "layers.*"}, fullgraph=fullgraph)

    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)):
            captured(ids(), fail=True)
        assert footprint(model) == before

        assert_right(captured, plain, ids())
        assert footprint(model) == before


def test_the_models_own_error_comes_through_in_a_broken_run() -> None:
    captured = compiled(RaisesAfter().eval(), {"hidden": "layers.*"})

    with pytest.raises(ValueError, match="in the middle"):
        captured(ids(), fail=True)


def test_an_error_of_the_running_graph_leaves_nothing_and_comes_through() -> None:
    model = encoder()
    before = footprint(model)
    captured = compiled(model, HIDDEN, fullgraph=True)
    captured(ids())

    with pytest.raises(IndexError):
        captured(torch.full((2, 5), 99))

    assert footprint(model) == before
    assert_right(captured, encoder(), ids())


def test_an_instance_forward_of_the_users_is_put_back() -> None:
    model = mlp()
    original = model[0].forward
    model[0].forward = lambda h: original(h) + 1
    kept = model[0].forward
    captured = compiled(model, {"r": "0"}, fullgraph=True)

    got = captured(rows())

    assert model[0].__dict__["forward"] is kept
    assert_same(original(rows()) + 1, got.records["r"][0])


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "save"]
)


@COPIES
def test_a_model_that_was_captured_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model = encoder()
    captured = compiled(model, HIDDEN, fullgraph=True)
    captured(ids())

    twin = copied(model)

    assert_same(model(ids()), twin(ids()))
    assert footprint(twin).keys() == footprint(encoder()).keys()
    assert_right(compiled(twin, HIDDEN), encoder(), ids())


@COPIES
def test_a_captured_model_can_be_copied_and_compiles_anew(copied) -> None:
    captured = compiled(encoder(), HIDDEN, fullgraph=True).select(hidden=[0, -1])
    captured(ids())

    twin = copied(captured)
    with torch.no_grad():
        twin.norm.weight.mul_(2)

    want = encoder()
    with torch.no_grad():
        want.norm.weight.mul_(2)
    assert isinstance(twin, fxc.CapturedModule)
    assert twin.spec == captured.spec
    assert_right(twin, want, ids())
    assert_right(captured, encoder(), ids())


def test_records_can_be_pickled_and_outlive_the_model() -> None:
    captured = compiled(encoder(), HIDDEN)
    with torch.no_grad():
        records = captured(ids()).records
    want = {name: records[name] for name in records}
    paths = records.paths("hidden")
    del captured

    again = _pickled(records)

    assert_same(want, {name: again[name] for name in again})
    assert again.paths("hidden") == paths


def test_the_captured_model_has_the_models_state_without_a_prefix() -> None:
    model = encoder()
    captured = compiled(model, HIDDEN)
    captured(ids())

    assert list(captured.state_dict()) == list(model.state_dict())
    assert [n for n, _ in captured.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]
    assert [n for n, _ in captured.named_modules()][1:] == [
        n for n, _ in model.named_modules()
    ][1:]
    assert captured.layers is model.layers
    doubled = {k: v * 2 for k, v in model.state_dict().items()}
    captured.load_state_dict(doubled)
    assert_same(doubled, dict(model.state_dict()))


def test_attributes_set_and_deleted_reach_the_model() -> None:
    model = encoder()
    captured = compiled(model, HIDDEN)

    captured.note = 3
    assert model.note == 3
    del captured.note
    assert not hasattr(model, "note")
    with pytest.raises(AttributeError, match="note"):
        _ = captured.note


def test_fluent_methods_return_the_captured_model() -> None:
    captured = compiled(encoder(), HIDDEN)

    assert captured.train() is captured
    assert captured.training
    assert captured.eval() is captured
    assert captured.double() is captured
    assert captured.requires_grad_(False) is captured
    assert captured.norm.weight.dtype == torch.float64
    assert not captured.norm.weight.requires_grad
    assert captured(ids()).records["hidden"][0].dtype == torch.float64


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h):
        return self.norm(self.drop(self.mix(h)))


def test_train_and_eval_follow_the_mode_with_two_graphs_for_ten_toggles() -> None:
    torch.manual_seed(1)
    model = Drops()
    twin = copy.deepcopy(model)
    captured = compiled(model, {"drop": "drop", "norm": "norm"}, fullgraph=True)

    for i in range(10):
        captured.train(i % 2 == 0)
        twin.train(i % 2 == 0)
        torch.manual_seed(i)
        output, want = eager_records(twin, captured.spec, lambda: twin(rows()))
        torch.manual_seed(i)
        got = captured(rows())

        assert_same(output, got.output)
        assert_records(want, got.records)
        assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    assert len(captured.graphs) == 2


# --------------------------------------------------------------------------------------
# The model changes after compile
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("called_before", [False, True])
def test_a_swapped_layer_is_seen(called_before: bool) -> None:
    model, plain = encoder(), encoder()
    captured = compiled(model, HIDDEN, fullgraph=True)
    if called_before:
        captured(ids())
    torch.manual_seed(9)
    layer = Layer().eval()
    model.layers[1] = layer
    plain.layers[1] = copy.deepcopy(layer)

    assert_right(captured, plain, ids())
    assert_right(captured, plain, ids())


@pytest.mark.parametrize("called_before", [False, True])
def test_an_appended_layer_is_seen(called_before: bool) -> None:
    model, plain = encoder(), encoder()
    captured = compiled(model, HIDDEN, fullgraph=True)
    if called_before:
        captured(ids())
    torch.manual_seed(9)
    layer = Layer().eval()
    model.layers.append(layer)
    plain.layers.append(copy.deepcopy(layer))

    assert_right(captured, plain, ids())
    assert len(captured(ids()).records["hidden"]) == 5


def test_a_layer_taken_away_is_no_longer_recorded() -> None:
    model, plain = encoder(), encoder()
    captured = compiled(model, HIDDEN, fullgraph=True)
    captured(ids())
    del model.layers[2], plain.layers[2]

    assert_right(captured, plain, ids())


def test_new_weights_are_used_without_a_second_trace() -> None:
    model, plain = encoder(), encoder()
    captured = compiled(model, HIDDEN, fullgraph=True)
    captured(ids())
    with torch.no_grad():
        for m in (model, plain):
            m.norm.bias.add_(1)
            m.layers[0].mlp.weight.mul_(-1)

    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_right(captured, plain, ids())


# --------------------------------------------------------------------------------------
# Side by side
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
def test_models_of_one_class_with_other_specs_and_none_interleaved(fullgraph) -> None:
    torch.manual_seed(1)
    first, second, third = (Encoder(3).eval() for _ in range(3))
    twins = [copy.deepcopy(m) for m in (first, second, third)]
    hidden = compiled(first, {"hidden": "layers.*"}, fullgraph=fullgraph)
    weights = compiled(
        second, {"w": Tap(Attention, output=1, select=-1)}, fullgraph=fullgraph
    )
    plain = torch.compile(third, backend="eager", fullgraph=fullgraph)

    for _ in range(3):
        assert_right(hidden, twins[0], ids())
        assert_right(weights, twins[1], ids())
        assert_same(twins[2](ids()), plain(ids()))
        assert not isinstance(plain(ids()), fxc.Captured)


def test_two_specs_on_one_model_do_not_see_each_other() -> None:
    model = encoder()
    one = compiled(model, {"a": "layers.0"}, fullgraph=True)
    other = compiled(model, {"b": Tap("layers.*", select=-1)}, fullgraph=True)
    plain = torch.compile(model, backend="eager", fullgraph=True)
    before = footprint(model)  # torch.compile marks the model itself

    for _ in range(2):
        assert_right(one, encoder(), ids())
        assert_right(other, encoder(), ids())
        assert_same(encoder()(ids()), plain(ids()))
    assert footprint(model) == before


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run ``work(0)`` ... at the same time; raise what any of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("broken", [False, True])
def test_threads_with_inputs_and_selections_of_their_own(broken: bool) -> None:
    class Breaks(Encoder):
        def forward(self, ids):
            torch._dynamo.graph_break()
            return super().forward(ids)

    torch.manual_seed(1)
    model = (Breaks if broken else Encoder)().eval()
    captured = compiled(model, {"hidden": "layers.*"}, fullgraph=not broken)
    captured(ids())
    before = footprint(model)
    inputs = [(ids() + i) % 16 for i in range(4)]
    selections = [[0], [1, -1], slice(None), [2]]
    wanted = []
    for i, x in enumerate(inputs):
        twin = copy.deepcopy(model)
        wanted.append(
            eager_records(
                twin,
                captured.spec,
                lambda t=twin, x=x: t(x),
                select={"hidden": selections[i]},
            )
        )

    def work(i: int) -> None:
        for _ in range(8):
            got = captured(inputs[i], select={"hidden": selections[i]})
            assert_same(wanted[i][0], got.output)
            assert_records(wanted[i][1], got.records)

    in_threads(work)

    assert footprint(model) == before


def test_threads_that_compile_at_the_same_time() -> None:
    captured = compiled(encoder(), HIDDEN, fullgraph=True)
    plain = encoder()
    output, want = eager_records(plain, HIDDEN, lambda: plain(ids()))

    def work(i: int) -> None:
        got = captured(ids())
        assert_same(output, got.output)
        assert_records(want, got.records)

    in_threads(work)


class UsesAnother(nn.Module):
    """Calls a captured model and uses what it recorded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        output, records = self.inner(x)
        return self.head(output + records["hidden"][0])


def test_a_captured_model_inside_a_plainly_compiled_function() -> None:
    captured = compiled(encoder(), {"hidden": "layers.*"})
    outer = torch.compile(
        lambda x: (captured(x).output + 1, captured(x).records["hidden"][0]),
        backend="eager",
    )
    plain = encoder()
    output, want = eager_records(plain, captured.spec, lambda: plain(ids()))

    for _ in range(2):
        assert_same((output + 1, want["hidden"][0]), outer(ids()))


def test_a_captured_model_inside_a_captured_model() -> None:
    inner = compiled(encoder(), {"hidden": "layers.*"})
    torch.manual_seed(3)
    outer = UsesAnother(inner).eval()
    captured = compiled(outer, {"head": "head"})
    plain = encoder()
    output, want = eager_records(plain, inner.spec, lambda: plain(ids()))

    for _ in range(2):
        got = captured(ids())

        expected = outer.head(output + want["hidden"][0])
        assert_same(expected, got.output)
        assert_same([expected], list(got.records["head"]))
        assert_records(want, inner(ids()).records)


class Calls(nn.Module):
    """Calls something outside of every graph, then goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: list[Callable[[Any], Any]] = []

    @torch._dynamo.disable
    def outside(self, h, depth):
        return self.between[0](h, depth - 1)

    def forward(self, h, depth=0):
        h = self.first(h)
        if depth:
            h = self.outside(h, depth)
        return self.second(h)


def test_a_captured_model_that_calls_itself_keeps_the_calls_apart() -> None:
    torch.manual_seed(2)
    model = Calls().eval()
    captured = compiled(model, {"first": "first", "second": "second"})
    inside: list[fxc.Records] = []

    def again(h, depth):
        got = captured(h, depth)
        inside.append(got.records)
        return got.output

    model.between.append(again)
    before = footprint(model)

    got = captured(rows(), 2)

    levels = [got.records, inside[1], inside[0]]
    h = rows()
    for records in levels:
        assert [len(records[n]) for n in ("first", "second")] == [1, 1]
        h = model.first(h)
        assert_same(h, records["first"][0])
    for records in reversed(levels):
        h = model.second(h)
        assert_same(h, records["second"][0])
    assert_same(h, got.output)
    assert footprint(model) == before


def test_a_captured_model_called_from_another_ones_forward_outside_a_graph() -> None:
    torch.manual_seed(2)
    model = Calls().eval()
    inner = compiled(mlp(), {"mid": "2"})
    inside: list[fxc.Records] = []

    def other(h, depth):
        got = inner(h)
        inside.append(got.records)
        return got.output

    model.between.append(other)
    captured = compiled(model, {"first": "first"})

    got = captured(rows(), 1)

    first = model.first(rows())
    assert_same([first], list(got.records["first"]))
    assert_right(inner, mlp(), first.detach())
    assert_same(list(inner(first).records["mid"]), list(inside[0]["mid"]))
