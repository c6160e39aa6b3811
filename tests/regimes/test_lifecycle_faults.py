"""The faults that hooks have over a model's life, one test each.

Each test says in its docstring what goes wrong with hooks and names the public reports;
what it shows is what is right here.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import fxcapture as fxc
from tests.regimes.blocks import Block, Stack, left_behind

SPEC = {"l": "layers.*"}
BACKEND = "aot_eager"


def counter() -> CompileCounterWithBackend:
    return CompileCounterWithBackend(BACKEND)


def assert_right(model: Stack, records: fxc.Records, x: torch.Tensor) -> None:
    with torch.no_grad():
        states = model.hidden_states(x)
    assert len(records["l"]) == len(states)
    for got, want in zip(records["l"], states, strict=True):
        torch.testing.assert_close(got.detach(), want)


def test_a_capture_made_after_the_first_compiled_call_sees_the_next_call():
    """A hook registered then is ignored (pytorch#117758, sglang#22836)."""
    model, x = Stack(), torch.randn(2, 8)
    torch.compile(model, backend=BACKEND)(x)
    captured = fxc.compile(model, SPEC, backend=BACKEND, fullgraph=True)

    assert_right(model, captured(x).records, x)


def test_a_capture_that_is_gone_records_nothing():
    """A removed hook keeps firing (pytorch#92125, pytorch#98371)."""
    model, x, plain = Stack(), torch.randn(2, 8), counter()
    compiled = torch.compile(model, backend=plain)
    captured = fxc.compile(model, SPEC, backend=BACKEND)
    captured(x)
    del captured
    gc.collect()
    torch.testing.assert_close(compiled(x), model(x))

    assert not any("fxcapture" in str(n.target) for n in plain.graphs[0].graph.nodes)
    assert left_behind(model) == []


def test_one_capture_in_place_of_another():
    """The old hook's store is filled (pytorch#92125, pytorch#172519)."""
    model, x = Stack(), torch.randn(2, 8)
    first = fxc.compile(model, {"a": "layers.0"}, backend=BACKEND)
    assert list(first(x).records) == ["a"]
    second = fxc.compile(model, {"b": "layers.1"}, backend=BACKEND)

    records = second(x).records
    assert list(records) == ["b"]
    torch.testing.assert_close(records["b"][0], model.hidden_states(x)[1])


def test_a_second_target_after_the_first_run():
    """The module hooked later is missed (pytorch#117758, sglang#9076)."""
    model, x = Stack(), torch.randn(2, 8)
    captured = fxc.compile(model, SPEC, backend=BACKEND, fullgraph=True)
    one = captured(x, select={"l": 0}).records["l"]
    both = captured(x, select={"l": [0, 2]}).records["l"]

    assert [v is not None for v in one] == [True, False, False]
    assert [v is not None for v in both] == [True, False, True]


def test_a_list_of_the_users_that_grows_costs_no_graph():
    """Dynamo guards on the list's length (pytorch#170110, pytorch#171598)."""
    model, count, kept = Stack(), counter(), []
    captured = fxc.compile(model, SPEC, backend=count, fullgraph=True)
    for _ in range(12):
        kept.append(captured(torch.randn(2, 8)).records["l"])

    assert count.frame_count == 1
    assert len({id(v) for entry in kept for v in entry}) == 36


def test_values_put_into_a_list_that_exists_come_from_one_graph():
    """``store[i] = out`` in a hook (pytorch#185333)."""
    model, count, store = Stack(), counter(), [None] * 3
    captured = fxc.compile(model, SPEC, backend=count, fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 8)
        store[:] = captured(x).records["l"]
        assert_right(model, fxc.Records({"l": tuple(store)}, {"l": ()}), x)

    assert count.frame_count == 1


def test_twenty_layers_compiled_one_by_one_share_their_code():
    """A closure hook per layer runs into the limit (pytorch#170110, #171598)."""
    model, x, count = Stack(20), torch.randn(2, 8), counter()
    captured = fxc.compile(model, SPEC, backend=count, regions="layers.*")
    assert_right(model, captured(x).records, x)
    plain = counter()
    for layer in model.layers:
        layer.compile(backend=plain)
    model(x)

    # Two: the first layer's input needs no gradient.
    assert count.frame_count == plain.frame_count == 2


def test_a_context_variable_decides_where_values_go():
    """Dynamo cannot trace one in a hook (pytorch#186449, transformers#46370)."""
    wanted: contextvars.ContextVar[int] = contextvars.ContextVar("wanted")
    captured = fxc.compile(Stack(), SPEC, backend=BACKEND, fullgraph=True)
    x = torch.randn(2, 8)

    def run(position):
        wanted.set(position)
        return captured(x, select={"l": wanted.get()}).records["l"]

    for position in (0, 2):
        values = contextvars.copy_context().run(run, position)
        assert [v is not None for v in values] == [i == position for i in range(3)]


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "layers.*"}])
def test_each_thread_has_the_records_of_its_own_calls(settings):
    """One store holds both threads' values (transformers#43765, captum#469, ...)."""
    model = Stack()
    captured = fxc.compile(model, SPEC, backend=BACKEND, **settings)
    captured(torch.randn(2, 8))
    mine = threading.local()
    failures: list[object] = []

    def work():
        try:
            mine.records = []
            inputs = [torch.randn(2, 8) for _ in range(20)]
            for x in inputs:
                mine.records.append(captured(x).records)
            for x, records in zip(inputs, mine.records, strict=True):
                assert_right(model, records, x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_wrappers_count_as_no_module():
    """A global hook also fires for the wrapper (pytorch#149502, pytorch#152740)."""
    model, x = Stack(), torch.randn(2, 8)
    everything = {"all": fxc.Tap("re:.*")}
    plain = fxc.compile(model, everything, backend=BACKEND)(x).records
    wrapped = torch.compile(copy.deepcopy(model), backend=BACKEND)
    records = fxc.compile(wrapped, everything, backend=BACKEND)(x).records

    assert records.paths("all") == plain.paths("all")


@pytest.mark.parametrize("clones", [False, True])
def test_the_next_call_does_not_write_over_a_record(clones):
    """Reused output memory (pytorch#148439, sglang-omni#1380, nnsight#630, ...)."""
    model = Stack().eval()

    def reusing(graph_module, inputs):
        memory: list[torch.Tensor] = []

        def run(*args):
            out = list(graph_module(*args))
            if not memory:
                memory.extend(torch.empty_like(t) for t in out)
            for place, value in zip(memory, out, strict=True):
                place.copy_(value)
            return list(memory)

        return run

    reusing.reuses_outputs = True
    tap = fxc.Tap("layers.*", reduce=torch.clone) if clones else "layers.*"
    captured = fxc.compile(model, {"l": tap}, backend=reusing, fullgraph=True)
    with torch.no_grad():
        first, second = torch.randn(2, 8), torch.randn(2, 8)
        records = captured(first).records
        captured(second)
        assert_right(model, records, first)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_no_fake_tensor_and_the_program_captures(strict):
    """Hooks keep fake tensors, and do nothing afterwards (pytorch#153062, #184647)."""
    model, x = Stack().eval(), torch.randn(2, 8)
    program = fxc.export(model, (x,), spec=SPEC, strict=strict)
    records = program(x).records

    assert all(type(v) is torch.Tensor for v in records["l"])
    assert_right(model, records, x)
    assert left_behind(model) == []


def test_a_symbolic_trace_keeps_inlined_modules_apart():
    """Hooks of modules that are no leaves are gone (vision#5193)."""
    model, x = (
        nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        torch.ones(2, 8),
    )
    traced = torch.fx.symbolic_trace(model)
    captured = fxc.instrument(traced, {"block": "0", "leaf": "0.0"})
    records = captured(x).records

    torch.testing.assert_close(records["block"][0], model[0](x))
    torch.testing.assert_close(records["leaf"][0], model[0][0](x))


def test_gradients_by_a_record_of_the_same_call():
    """ "Not used in the graph" (pytorch#91468, pytorch#146212).

    A compiled graph is one node to autograd, of which records are leaves: what stands
    between compiled regions can be differentiated by.
    """
    model, x = Stack(), torch.randn(2, 8)
    captured = fxc.compile(model, SPEC, backend=BACKEND, regions="layers.*")
    for _ in range(2):
        output, records = captured(x)
        records["l"][0].retain_grad()
        (got,) = torch.autograd.grad(output.sum(), records["l"][1], retain_graph=True)
        output.sum().backward()
        states = model.hidden_states(x)
        loss = model.head(states[2]).sum()
        want, first = torch.autograd.grad(loss, [states[1], states[0]])

        torch.testing.assert_close(got, want)
        torch.testing.assert_close(records["l"][0].grad, first)


def test_what_the_caller_may_write_to_is_recorded_by_value():
    """Where a record could be the module's own tensor, as above."""

    class Passing(nn.Module):
        def forward(self, x):
            return x

    model = nn.Sequential(Passing(), nn.Linear(8, 8), nn.Linear(8, 8))
    captured = fxc.compile(model, {"l": "*"}, backend=BACKEND, regions="*")
    x = torch.randn(2, 8, requires_grad=True) * 1.0
    output, records = captured(x)
    want = [v.clone() for v in records["l"]]
    with torch.no_grad():
        output.zero_()
        x.zero_()

    torch.testing.assert_close(list(records["l"]), want)


def test_a_loss_of_a_record_reaches_earlier_parameters():
    """Distillation (pytorch#173452)."""
    model, x = Stack(), torch.randn(2, 8)
    captured = fxc.compile(model, SPEC, backend=BACKEND, fullgraph=True)
    captured(x).records["l"][0].sum().backward()
    got = model.layers[0].out.weight.grad.clone()
    model.zero_grad()
    model.hidden_states(x)[0].sum().backward()

    torch.testing.assert_close(got, model.layers[0].out.weight.grad)


def test_a_layer_that_writes_over_a_record_changes_neither_value_nor_gradient():
    """Wrong values and version errors (pytorch#61519, captum#165)."""

    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).mul_(2.0).add_(1.0))

    model, x = Overwritten(), torch.randn(2, 8)
    captured = fxc.compile(model, {"f": "first"}, backend=BACKEND, fullgraph=True)
    record = captured(x).records["f"][0]
    torch.testing.assert_close(record, model.first(x))
    record.pow(2).sum().backward()
    got = model.first.weight.grad.clone()
    model.zero_grad()
    model.first(x).pow(2).sum().backward()

    torch.testing.assert_close(got, model.first.weight.grad)


@pytest.mark.parametrize("depth", [4, 12])
def test_states_that_are_not_selected_are_not_kept(depth):
    """Everything lives until the end (transformers#48081, #44408, #48475)."""
    alive: list[weakref.ref] = []
    peaks = [0]

    class Counting(Block):
        def forward(self, x):
            gc.collect()
            peaks[0] = max(peaks[0], sum(r() is not None for r in alive))
            out = super().forward(x)
            alive.append(weakref.ref(out))
            return out

    model = Stack(depth)
    model.layers = nn.ModuleList(Counting() for _ in range(depth))
    tap = fxc.Tap("layers.*", select=[1])
    eagerly = torch.compiler.disable
    for layer in model.layers:
        layer.forward = eagerly(layer.forward)
    captured = fxc.compile(model, {"l": tap}, backend="eager")
    with torch.no_grad():
        captured(torch.randn(2, 8))
        alive.clear()
        peaks[0] = 0
        captured(torch.randn(2, 8))

    assert peaks[0] == 1  # the input of the layer that runs; the record is a copy


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"regions": "layers.*"}])
def test_nothing_outlives_records_that_are_dropped(settings):
    """The autograd graph, or the artefact, keeps them (opacus#176, zennit#11, ...)."""
    model = Stack()
    captured = fxc.compile(
        model, {"l": fxc.Tap("layers.*", detach=True)}, backend=BACKEND, **settings
    )
    output, records = captured(torch.randn(2, 8))
    assert not any(v.requires_grad for v in records["l"])
    alive = [weakref.ref(v) for v in records["l"]]
    del records
    gc.collect()

    assert [r() for r in alive] == [None] * 3
    output.sum().backward()  # the model's own graph is whole


def test_ten_toggles_of_the_mode_are_two_graphs():
    """Stale graphs, or endless ones (pytorch#132986, pytorch#110803, #105653)."""
    model, count = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), counter()
    captured = fxc.compile(model, {"d": "1"}, backend=count, fullgraph=True)
    x = torch.ones(64, 8)
    for i in range(10):
        captured.train(i % 2 == 0)
        dropped = bool((captured(x).records["d"][0] == 0).any())
        assert dropped == (i % 2 == 0)

    assert count.frame_count == 2


@pytest.mark.parametrize("settings", [{}, {"regions": "layers.*"}])
def test_a_call_that_raised_leaves_nothing_for_the_next(settings):
    """Half a store is mixed with the next call's (braindecode#1138, #43765)."""

    class Raising(Stack):
        fails = True

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 1 and self.fails:
                    raise RuntimeError("the model's own")
            return self.head(x)

    model, x = Raising(), torch.randn(2, 8)
    captured = fxc.compile(model, SPEC, backend=BACKEND, **settings)
    with pytest.raises(RuntimeError, match="the model's own"):
        captured(x)
    assert left_behind(model) == []
    model.fails = False

    assert_right(model, captured(x).records, x)


def test_a_copy_has_records_of_its_own():
    """The copy's hook writes into the original's store (vision#8634)."""
    captured = fxc.compile(Stack(), SPEC, backend=BACKEND)
    x = torch.randn(2, 8)
    kept = captured(x).records
    before = [v.clone() for v in kept["l"]]
    twin = copy.deepcopy(captured)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    other = twin(x).records["l"]

    torch.testing.assert_close(list(kept["l"]), before)
    assert not torch.allclose(other[0], before[0])


def test_a_capture_around_every_call_costs_no_graph_of_its_own():
    """Hooks in a with-block (transformers#43765, pytorch#185768)."""
    model, count = Stack(), counter()
    captured = fxc.compile(model, SPEC, backend=count, fullgraph=True)
    for _ in range(12):
        x = torch.randn(2, 8)
        with torch.no_grad():
            assert_right(model, captured(x).records, x)
        assert left_behind(model) == []

    assert count.frame_count == 1


@pytest.mark.parametrize("wrap", ["compile", "wrapper"])
def test_a_compiled_child_of_a_compiled_parent_is_seen_once(wrap):
    """Seen in eager, missed when compiled (pytorch#117584, pytorch#149502)."""
    model, x = Stack(), torch.randn(2, 8)
    if wrap == "compile":
        model.layers[1].compile(backend=BACKEND)
    else:
        model.layers[1] = torch.compile(model.layers[1], backend=BACKEND)
    captured = fxc.compile(model, SPEC, backend=BACKEND)
    for _ in range(2):
        assert_right(model, captured(x).records, x)


def test_a_hook_of_the_users_that_breaks_the_graph_leaves_the_rest_compiled():
    """The model is not compiled at all (pytorch#135410, transformers#44638)."""
    model, x, count = Stack(), torch.randn(2, 8), counter()
    seen: list[int] = []
    model.layers[1].register_forward_hook(
        torch.compiler.disable(lambda *_: seen.append(1))
    )
    captured = fxc.compile(model, SPEC, backend=count)
    assert_right(model, captured(x).records, x)

    assert count.frame_count >= 1
    assert seen


def test_a_fused_layer_gives_what_it_gives_without_capture():
    """Hooks change the kernel (pytorch#128413, pytorch#132700): rounding only."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    spec = {"inside": "layers.*.self_attn", "layer": "layers.*"}
    captured = fxc.compile(model, spec, backend=BACKEND)
    with torch.no_grad():
        output, records = captured(x)
        want = model(x)

    assert [len(records[n]) for n in spec] == [2, 2]
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(records["layer"][0], model.layers[0](x), rtol=1e-5,
                               atol=1e-5)  # fmt: skip


def test_a_captured_model_can_be_saved_after_calls():
    """What hooks close over cannot be pickled."""
    model, x = Stack(), torch.randn(2, 8)
    captured = fxc.compile(model, SPEC, backend=BACKEND)
    captured(x)
    torch.save(model.state_dict(), io.BytesIO())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    torch.testing.assert_close(loaded(x), model(x))


class Counting(torch.nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "nothing_compiled",
    [
        lambda: FlopCounterMode(display=False),
        lambda: torch._dynamo.config.patch(disable=True),
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch.compiler.set_stance("eager_on_recompile"),
    ],
)
def test_a_model_runs_once_where_dynamo_compiles_nothing(nothing_compiled: Any) -> None:
    """It ran twice, or nothing of it was said to be called."""
    model, x = Counting(), torch.ones(2, 4)
    captured = fxc.compile(model, {"l": "linear"}, backend="eager")
    with nothing_compiled():
        output, records = captured(x)

    assert model.calls == 1
    assert torch.equal(records["l"][0], output)
    captured(x)  # compiles, where torch has not noted the function as one to skip
    with nothing_compiled():
        output, records = captured(x)
    assert model.calls == 3
    assert torch.equal(records["l"][0], output)
