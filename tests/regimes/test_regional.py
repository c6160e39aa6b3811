"""Broken runs and regional compilation: right module, few graphs, nothing left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fxcapture as fxc
from fxcapture.errors import EagerSiteError, TargetNotFoundError, TraceError
from fxcapture.plan import plan
from tests.regimes.blocks import Block, Stack, left_behind

SPEC = {
    "layers": fxc.Tap("layers.*", select=[0, -2]),
    "weights": fxc.Tap("layers.*.attention", output=1, select=[-1]),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


def check(captured, *args):
    with torch.no_grad():
        first = fxc.verify(captured, *args)
        graphs = len(captured.graphs)
        second = fxc.verify(captured, *args)
    for checked in (first, second):
        assert set(checked.differences.values()) == {0.0}
        assert checked.output_difference == 0.0
    assert len(captured.graphs) == graphs, "the second call compiled something"


@pytest.mark.parametrize("regions", ["layers.*", Block, "Block"])
def test_sixty_blocks_share_one_compilation_and_keep_their_names(regions):
    model = Stack(depth=60).eval()
    captured = fxc.compile(
        model, SPEC, backend="aot_eager", regions=regions, fullgraph=True
    )
    x = torch.randn(2, 8)
    check(captured, x)

    assert counters["stats"]["unique_graphs"] == 1
    assert len(captured.graphs) == 1
    records = captured(x).records
    with torch.no_grad():
        states = model.hidden_states(x)
    torch.testing.assert_close(records["layers"][58], states[58], rtol=0, atol=0)
    assert records.paths("layers")[58] == "layers.58"
    assert left_behind(model) == []


def test_each_kind_of_block_compiles_once():
    class Wide(Block):
        pass

    model = Stack(depth=6)
    model.layers[1], model.layers[4] = Wide(), Wide()
    captured = fxc.compile(model.eval(), SPEC, backend="eager", regions="layers.*")
    check(captured, torch.randn(2, 8))

    assert len(captured.graphs) == 2


def test_regions_that_match_nothing_are_an_error():
    with pytest.raises(TargetNotFoundError, match=r"'blocks\.\*' matches no module"):
        fxc.compile(Stack(), SPEC, backend="eager", regions="blocks.*")


def test_a_break_inside_a_region_under_fullgraph_is_torch_s_own_error():
    class Broken(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Stack()
    model.layers[1] = Broken()
    captured = fxc.compile(
        model, SPEC, backend="eager", regions="layers.*", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        captured(torch.randn(2, 8))
    assert left_behind(model) == []


@pytest.mark.parametrize("where", ["inside", "between", "before"])
def test_one_graph_serves_all_blocks_of_a_broken_model(where):
    class Broken(Block):
        def forward(self, x):
            y = self.attention(x)[0]
            if where == "inside":
                torch._dynamo.graph_break()
            return self.out(y) + x

    class Model(Stack):
        def forward(self, x):
            if where == "before":
                torch._dynamo.graph_break()
            for layer in self.layers:
                if where == "between":
                    torch._dynamo.graph_break()
                x = layer(x)
            return self.head(x)

    model = Model(depth=12).eval()
    model.layers = nn.ModuleList(Broken() for _ in range(12))
    captured = fxc.compile(model, SPEC, backend="aot_eager")
    check(captured, torch.randn(2, 8))

    # Twelve blocks, far beyond Dynamo's recompile limit of eight for one function.
    assert len(captured.graphs) <= 6
    assert "graph_break" in captured.explain()
    assert left_behind(model) == []


def test_fullgraph_refuses_a_broken_model_with_dynamo_s_reason():
    class Model(Stack):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    captured = fxc.compile(Model(), SPEC, backend="eager", fullgraph=True)
    with pytest.raises(TraceError, match="User-inserted graph break") as caught:
        captured(torch.randn(2, 8))
    assert isinstance(caught.value.__cause__, torch._dynamo.exc.Unsupported)


def test_on_eager_error_refuses_a_value_from_outside_every_graph():
    class Model(Stack):
        @torch.compiler.disable
        def untraced(self, x):
            return self.layers[0](x)

        def forward(self, x):
            return self.layers[2](self.layers[1](self.untraced(x)))

    spec = {"l": "layers.*"}
    allowed = fxc.compile(Model(), spec, backend="eager")
    allowed(torch.randn(2, 8))
    assert "layers.0  0     eager" in allowed.explain()

    refused = fxc.compile(Model(), spec, backend="eager", on_eager="error")
    with pytest.raises(EagerSiteError, match=r"'layers\.0' \(Block\), call 0"):
        refused(torch.randn(2, 8))


def test_past_the_recompile_limit_values_stay_right():
    class Model(Stack):
        def forward(self, x, flag):
            return super().forward(x) * len(flag)

    model = Model().eval()
    captured = fxc.compile(model, {"l": "layers.*"}, backend="eager", dynamic=False)
    for i in range(12):
        x = torch.randn(2, 8)
        output, records = captured(x, "f" * i)
        states = model.hidden_states(x)
        assert torch.equal(records["l"][1], states[1])
        assert torch.equal(output, model(x, "f" * i))
    assert left_behind(model) == []


@pytest.mark.parametrize("broken", [False, True])
def test_blocks_that_were_compiled_in_place_work(broken):
    model = Stack(depth=20).eval()
    for layer in model.layers:
        layer.compile(backend="eager")

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            for layer in self.model.layers:
                if broken:
                    torch._dynamo.graph_break()
                x = layer(x)
            return x

    spec = {"l": "model.layers.*", "a": fxc.Tap("**.attention", output=0)}
    captured = fxc.compile(Parent(), spec, backend="eager", fullgraph=not broken)
    check(captured, torch.randn(2, 8))

    assert len(captured.graphs) <= 2
    assert left_behind(model) == []


@pytest.mark.parametrize("broken", [False, True])
def test_blocks_that_torch_compile_wrapped_work(broken):
    model = Stack().eval()
    for i in range(3):
        model.layers[i] = torch.compile(model.layers[i], backend="eager")
    wrapped = [layer.__dict__.get("forward") for layer in model.layers]

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            if broken:
                torch._dynamo.graph_break()
            return self.model(x)

    spec = {"l": "model.layers.*", "a": fxc.Tap("**.attention", output=0)}
    captured = fxc.compile(Parent(), spec, backend="eager", fullgraph=not broken)
    check(captured, torch.randn(2, 8))

    assert captured(torch.randn(2, 8)).records.paths("l")[0] == "model.layers.0"
    assert [layer.__dict__.get("forward") for layer in model.layers] == wrapped


def test_a_plain_compiled_instance_of_the_class_shares_no_code():
    spec = {"a": fxc.Tap("layers.*.attention", output=0)}
    plain = torch.compile(Stack(), backend="eager")
    x = torch.randn(2, 8)
    plain(x)
    models = [Stack().eval(), Stack().eval()]
    captured = [
        fxc.compile(models[0], spec, backend="eager", regions="layers.*"),
        fxc.compile(models[1], spec, backend="eager"),
    ]
    for _ in range(2):
        for model, one in zip(models, captured, strict=True):
            records = one(x).records
            assert torch.equal(records["a"][0], model.layers[0].attention(x)[0])
            plain(x)


def test_a_frame_lets_go_of_what_cannot_be_selected_any_more():
    import gc
    import weakref

    alive: list[weakref.ref] = []
    most = 0

    class Watched(Block):
        def forward(self, x):
            nonlocal most
            gc.collect()
            most = max(most, sum(r() is not None for r in alive))
            return super().forward(x)

    model = Stack(depth=8).eval()
    model.layers = nn.ModuleList(Watched() for _ in range(8))
    original = plan.Leaf.snapshot

    def snapshot(self, value):
        made = original(self, value)
        alive.append(weakref.ref(made))
        return made

    spec = {"l": fxc.Tap("layers.*", select=[-2])}
    captured = fxc.compile(model, spec, backend="eager", regions="head")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(plan.Leaf, "snapshot", snapshot)
        records = captured(torch.randn(2, 8)).records

    assert [v is not None for v in records["l"]] == [False] * 6 + [True, False]
    assert len(alive) == 8
    assert most <= 2


@pytest.mark.parametrize(
    "treated",
    [{"reduce": lambda t: t.sum(0)}, {"point": "input"}],
    ids=["reduced", "input"],
)
def test_positions_are_counted_when_calls_return_also_of_nested_targets(treated):
    class Inner(torch.nn.Module):
        def forward(self, x):
            return x * 2

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            torch._dynamo.graph_break()
            y = self.inner(x)
            x.add_(1)
            return y + x

    model = torch.nn.Sequential(Outer())
    tap = fxc.Tap(["0", "0.inner"], select=[1], **treated)
    captured = fxc.compile(model, {"h": tap}, backend="eager", regions="0.inner")
    with torch.no_grad():
        found = fxc.verify(captured, torch.randn(2, 3))

    assert found.differences["h"] == 0.0


class Same(nn.Module):
    """A module that says it equals every other."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__

    def forward(self, x):
        return x * self.factor


def test_a_module_that_is_replaced_or_renamed_between_calls_is_noticed():
    model = nn.Sequential()
    model.add_module("scale", Same(2.0))
    model.add_module("head", nn.Linear(3, 3))
    captured = fxc.compile(model, {"h": "scale"}, backend="eager", regions="head")
    x = torch.ones(2, 3)

    assert torch.equal(captured(x).records["h"][0], 2 * x)
    model.scale = Same(3.0)
    assert torch.equal(captured(x).records["h"][0], 3 * x)

    children = model._modules
    children["other"] = children.pop("scale")
    children["head"] = children.pop("head")
    with pytest.raises(TargetNotFoundError, match="target 'scale' matches no module"):
        captured(x)
