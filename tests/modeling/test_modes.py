"""One declaration, every way of running a model, from the very first call."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounter

from fxcapture.modeling.decorators import capture_outputs
from tests.modeling.toys import (
    DIM,
    LAYERS,
    LENGTH,
    Attention,
    Base,
    Block,
    DictModel,
    InPlaceBlock,
    Model,
    Output,
    Untied,
    assert_same,
    config,
    expected,
    leftovers,
    overrides,
    picked,
)

# torch's own: Dynamo looks at the .grad of every input, and strict export reports the
# instance dictionaries that a call wrote to, although they are as before at its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side"),
]

X = torch.randn(2, 3, DIM)
BOTH = {"output_hidden_states": True, "output_attentions": True}


def assert_equal_outputs(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    assert_same(got.hidden_states, want.hidden_states)
    assert_same(got.attentions, want.attentions)


def run_eager(model: nn.Module) -> Callable[..., Any]:
    return model


def run_compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


MODES = pytest.mark.parametrize("mode", [run_eager, run_compiled])


@MODES
def test_nothing_is_left_on_the_model_and_its_answer_does_not_change(mode: Any) -> None:
    model = Model()
    call = mode(model)
    plain = call(X).last_hidden_state
    keys = {name: set(m.__dict__) for name, m in model.named_modules()}
    full = call(X, **BOTH)
    assert torch.equal(full.last_hidden_state, plain)
    assert torch.equal(full.hidden_states[-1], plain)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == keys
    assert overrides(model) == []
    assert leftovers(model) == []


@MODES
def test_a_forward_that_raises_leaves_nothing_behind(mode: Any) -> None:
    class Failing(Model):
        fail = False

        @capture_outputs
        def forward(self, x: Any, **kwargs: Any) -> Any:
            h = self.run(x)
            if self.fail:
                raise KeyError("on purpose")
            return Output(h)

    model = Failing()
    call = mode(model)
    model.fail = True
    with pytest.raises(Exception, match=r"on purpose|Observed exception"):
        call(X, **BOTH)
    assert overrides(model) == []
    assert leftovers(model) == []
    model.fail = False
    assert picked(model(X, output_hidden_states=[1]).hidden_states) == [1]


@pytest.mark.parametrize("wrap", ["layer.compile()", "torch.compile(layer)"])
def test_blocks_compiled_by_themselves_are_read_outside_of_them(wrap: str) -> None:
    model = Model()
    want = model(X, **BOTH)
    counter = CompileCounter()
    for i, layer in enumerate(model.layers):
        if wrap == "layer.compile()":
            layer.compile(backend=counter, fullgraph=True)
        else:
            model.layers[i] = torch.compile(layer, backend=counter, fullgraph=True)
    assert_same(model(X, output_hidden_states=True).hidden_states, want.hidden_states)
    model(X)
    graphs = counter.frame_count
    for select in ([0, -2], [1], 3, True, False):
        record = model(X, output_hidden_states=select).hidden_states
        if select:
            kept = picked(record)
            assert all(torch.equal(record[i], want.hidden_states[i]) for i in kept[:-1])
    assert counter.frame_count == graphs, "a selection recompiled a block"
    # A value inside of a compiled block: the block runs uncompiled for that call.
    assert_same(model(X, output_attentions=True).attentions, want.attentions)
    assert counter.frame_count == graphs
    # The whole of it compiled once more.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal_outputs(compiled(X, **BOTH), want)


class Outer(Base):
    """Its own blocks around a model that captures for itself."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.inner = Model(config(num_hidden_layers=3), layers=3)
        self.config.num_hidden_layers = 2

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        h = self.layers[0](x)
        seen = self.inner(h, output_hidden_states=[-2])
        h = seen.last_hidden_state + seen.hidden_states[-2]
        return Output(self.layers[1](h))


@MODES
def test_a_sub_model_captures_for_itself(mode: Any) -> None:
    model = Outer()
    first = model.layers[0](X)
    inner = expected(model.inner, first)
    middle = inner[-1] + inner[-2]
    call = mode(model)
    record = call(X, output_hidden_states=True).hidden_states
    assert_same(record, [X, first, model.layers[1](middle)])
    assert picked(call(X, output_hidden_states=[1]).hidden_states) == [1]
    assert call(X).hidden_states is None


def test_a_sub_model_compiled_by_itself_inside_an_eager_one() -> None:
    model = Outer()
    want = model(X, output_hidden_states=True).hidden_states
    counter = CompileCounter()
    model.inner.compile(backend=counter, fullgraph=True)
    assert_same(model(X, output_hidden_states=True).hidden_states, want)
    assert_same(model(X, output_hidden_states=True).hidden_states, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("select", [True, [0, -2], 1])
def test_export(strict: bool, select: Any) -> None:
    model = DictModel()
    kwargs = {"output_hidden_states": select}
    program = torch.export.export(model, (X,), kwargs, strict=strict)
    want = model(X, **kwargs)
    got = program.module()(X, **kwargs)
    assert_same(tuple(got["hidden_states"]), want["hidden_states"])
    assert overrides(model) == []


class Checkpointed(Base):
    """Each block inside activation checkpointing, called by the model."""

    reentrant = False

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        h = x * 1.0
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(
                layer, h, use_reentrant=self.reentrant
            )
        return Output(self.norm(h))


class SelfCheckpointingBlock(Block):
    """As transformers does it: the block's forward checkpoints what it wraps."""

    reentrant = False

    def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            super().forward, h, use_reentrant=self.reentrant
        )


def gradients(model: nn.Module, output: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = output.last_hidden_state.pow(2).sum()
    loss = loss + output.hidden_states[2].pow(3).sum()
    if output.attentions is not None:
        loss = loss + output.attentions[1].pow(2).sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", [run_eager, run_compiled])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["caller", "block"])
def test_training_with_activation_checkpointing(
    mode: Any, reentrant: bool, where: str
) -> None:
    if where == "caller":
        model: Any = Checkpointed()
        model.reentrant = reentrant
    else:
        model = Model(block=SelfCheckpointingBlock)
        for layer in model.layers:
            layer.reentrant = reentrant
    plain = Model()
    plain.load_state_dict(model.state_dict())
    x = X.clone().requires_grad_()
    # What runs inside the reentrant variant runs without autograd in eager mode: the
    # record has the value, and no gradient (docs/model-authors.md).
    inside = mode is run_eager and reentrant
    kwargs: dict[str, Any] = {"output_hidden_states": [2]}
    if not inside:
        kwargs["output_attentions"] = True
    got, want = mode(model)(x, **kwargs), plain(x, **kwargs)
    assert_equal_outputs(got, want)
    assert len(got.hidden_states) == LENGTH
    if inside and where == "caller":
        assert not got.hidden_states[2].requires_grad
        return
    for a, b in zip(gradients(model, got), gradients(plain, want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(got.hidden_states) == LENGTH, "the recomputation added entries"


def test_collecting_in_a_checkpoint_does_not_change_dynamos_setting() -> None:
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    run_compiled(Checkpointed())(X, output_hidden_states=[1])
    assert getattr(torch._dynamo.config, name) is False


@MODES
def test_training_through_records(mode: Any) -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    kwargs = {"output_hidden_states": [2], "output_attentions": True}
    got = gradients(model, mode(model)(X, **kwargs))
    want = gradients(plain, plain(X, **kwargs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_of_records_can_be_retained_in_eager_mode() -> None:
    output = Model()(X.clone().requires_grad_(), **BOTH)
    kept = [*output.hidden_states[:-1], *output.attentions]
    for value in kept:
        value.retain_grad()
    output.last_hidden_state.sum().backward()
    assert all(value.grad is not None for value in kept)


@MODES
def test_a_cache_in_a_loop_of_growing_inputs(mode: Any) -> None:
    class Cached(Base):
        @capture_outputs
        def forward(self, x: torch.Tensor, past: Any = None, **kwargs: Any) -> Any:
            past = [] if past is None else past
            h = x
            kept = []
            for i, layer in enumerate(self.layers):
                seen = torch.cat([past[i], h], 1) if past else h
                kept.append(seen)
                h = layer(h) + seen.mean(1, keepdim=True)
            return Output(h, past=tuple(kept))

    model = Cached()
    call = mode(model)
    past = past_want = None
    for step in range(4):
        x = torch.randn(2, 3 if step == 0 else 1, DIM)
        got = call(x, past=past, output_hidden_states=[0, -2])
        want = model(x, past=past_want, output_hidden_states=True)
        assert picked(got.hidden_states) == [0, LAYERS - 1]
        for i in (0, LAYERS - 1):
            torch.testing.assert_close(got.hidden_states[i], want.hidden_states[i])
        past, past_want = got.past, want.past


@MODES
def test_later_in_place_writes_do_not_show(mode: Any) -> None:
    model = Untied(block=InPlaceBlock)
    want = expected(model, X, tie=False)
    with torch.no_grad():
        assert_same(mode(model)(X, **BOTH).hidden_states, want)


def test_an_input_that_is_recorded_is_not_the_callers_tensor() -> None:
    model = Outer()
    x = X.clone()
    record = model(x, output_hidden_states=[0]).hidden_states
    x.zero_()
    assert torch.equal(record[0], X)


@MODES
def test_what_the_caller_got_is_recorded_after_forward_hooks(mode: Any) -> None:
    model = Untied()
    model.layers[1].register_forward_hook(lambda module, args, out: out + 1)
    model.layers[0].attention.register_forward_hook(
        lambda module, args, out: (out[0], out[1] * 2)
    )
    states = [X * 1.0]
    for layer in model.layers:
        states.append(layer(states[-1]))
    call = mode(model)
    full = call(X, **BOTH)
    assert_same(full.hidden_states, states)
    assert_same(call(X, output_hidden_states=[2]).hidden_states[2:3], [states[2]])
    torch.testing.assert_close(full.attentions[0].sum(-1), torch.full((2, 3), 2.0))
    assert len(full.attentions) == LAYERS
    assert len(model.layers[1]._forward_hooks) == 1


@MODES
def test_an_instance_with_a_forward_of_its_own_keeps_it(mode: Any) -> None:
    model = Untied()
    layer = model.layers[0]
    original = layer.forward
    layer.forward = lambda h, **kwargs: original(h, **kwargs) * 2
    mine = layer.__dict__["forward"]
    assert_same(
        mode(model)(X, output_hidden_states=True).hidden_states,
        expected(model, X, tie=False),
    )
    assert layer.__dict__["forward"] is mine


@MODES
def test_calling_a_childs_forward_directly_counts(mode: Any) -> None:
    class Direct(Untied):
        def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = x
            for layer in self.layers:
                h = layer.forward(h)
            return h

    model = Direct()
    record = mode(model)(X, output_hidden_states=True).hidden_states
    assert_same(record, expected(model, X, tie=False))


def test_graph_breaks_in_the_model() -> None:
    class Breaking(Block):
        def forward(self, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(h)

    model = Model(block=Breaking)
    want = model(X, **BOTH)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert_equal_outputs(compiled(X, **BOTH), want)
            assert picked(compiled(X, output_hidden_states=[1]).hidden_states) == [1]
            assert compiled(X).hidden_states is None
    assert overrides(model) == []


@pytest.mark.parametrize("compiled_too", [False, True])
def test_threads_do_not_see_each_other(compiled_too: bool) -> None:
    model = Model()
    states = expected(model, X)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    selections: list[Any] = [True, [0], [1], [2, 3], -1, None]
    wrong: list[Any] = []

    def work(shift: int, call: Any, rounds: int) -> None:
        try:
            for i in range(rounds):
                select = selections[(i + shift) % len(selections)]
                if call is compiled:
                    select = [1]
                record = call(X, output_hidden_states=select).hidden_states
                if select is None:
                    assert record is None
                    continue
                want = range(LENGTH) if select is True else select
                want = [want % LENGTH] if isinstance(want, int) else list(want)
                assert_same(
                    record, [h if j in want else None for j, h in enumerate(states)]
                )
        except Exception as error:
            wrong.append(error)

    calls = [(k, model, 60) for k in range(4)]
    if compiled_too:  # cold: it is traced while the others capture
        calls += [(0, compiled, 60)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=args) for args in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert overrides(model) == []
    assert leftovers(model) == []
    assert counter.frame_count == compiled_too, "eager captures recompiled the other"


def test_models_pickle_copy_and_save_after_any_number_of_calls() -> None:
    model = Model()
    for _ in range(3):
        want = model(X, **BOTH)
    torch.compile(model, backend="eager", fullgraph=True)(X, **BOTH)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert_equal_outputs(other(X, **BOTH), want)


def test_a_re_classed_module_and_its_model_still_record() -> None:
    model = Model()
    want = model(X, **BOTH)
    model.layers[0].__class__ = type("ReBlock", (Block,), {})
    model.__class__ = type("ReModel", (Model,), {})
    assert_equal_outputs(model(X, **BOTH), want)


@pytest.fixture
def one_process_group(tmp_path: Any) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_fully_sharded_models_record(one_process_group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    want = model(X, **BOTH)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model).__name__ == "FSDPModel"
    assert_equal_outputs(model(X, **BOTH), want)
    assert picked(model(X, output_hidden_states=[1, -1]).hidden_states) == [1, 4]


@pytest.mark.filterwarnings("ignore")
def test_wrappers_are_looked_through() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    model = Model()
    x = X.clone().requires_grad_()
    want = model(x, **BOTH)
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    assert_equal_outputs(model(x, **BOTH), want)


def test_vmap_and_grad() -> None:
    model = Model()
    xs = torch.randn(5, 2, 3, DIM)

    def second(x: torch.Tensor) -> torch.Tensor:
        return model(x, output_hidden_states=[2]).hidden_states[2]

    torch.testing.assert_close(
        torch.func.vmap(second)(xs), torch.stack([second(x) for x in xs])
    )
    got = torch.func.grad(lambda x: second(x).sum())(X)
    x = X.clone().requires_grad_()
    second(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_make_fx_takes_the_records_into_its_graph() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = Model()
    graph = make_fx(lambda x: model(x, output_hidden_states=[1]).hidden_states[1])(X)
    assert torch.equal(graph(X), expected(model, X)[1])


def test_inference_mode_and_autocast() -> None:
    model = Model()
    with torch.inference_mode():
        assert_same(
            model(X, output_hidden_states=True).hidden_states, expected(model, X)
        )
    with torch.autocast("cpu", torch.bfloat16):
        states = model(X, output_hidden_states=True).hidden_states
    assert len(states) == LENGTH


class AttentionOnly(nn.Module):
    """Calls one attention module several times."""

    _can_record_outputs = {"attentions": Attention}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.alias = Attention()

    @capture_outputs
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        h, _ = self.attention(x)
        h, _ = self.alias(h)
        return Output(self.attention(h)[0])


@MODES
def test_one_entry_per_call_in_call_order(mode: Any) -> None:
    model = AttentionOnly()
    record = mode(model)(X, output_attentions=True).attentions
    h, first = model.attention(X)
    h, second = model.attention(h)
    assert_same(record, [first, second, model.attention(h)[1]])
