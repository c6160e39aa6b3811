"""Function calls inside of modules as sites, in every way to a record."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from fxcapture.errors import AmbiguousSiteError, NeverCalledError, SpecError
from fxcapture.testing.reference import eager_reference


@dataclasses.dataclass
class RoutedOutput:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    router_probs: tuple[torch.Tensor, ...] | None = None


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.linear(x)) + 1


class Block(nn.Module):
    """Calls functions by many names, before, between and behind its children."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second = Child(), Child()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(x)
        y = y + self.first(y)
        if self.breaks:
            torch._dynamo.graph_break()
        z = fxc.named("router", torch.softmax(self.second(y), -1)) * 1
        z.add_(1)
        z *= 2
        left, right = z.chunk(2, -1)
        values, _ = z.topk(2)
        z = F.normalize((1 - z) / 3 + values.sum() + left.sum() - right.mean())
        return z + z.unflatten(-1, (2, 2)).flatten(-2)


class Model(nn.Module):
    def __init__(self, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(breaks), Block(breaks)])
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.checkpoints:
            x = checkpoint(self.layers[0], x, use_reentrant=False)
        return x


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))

TAPS: dict[str, Callable[[], fxc.Tap]] = {
    "a function": lambda: fxc.Tap("layers.*::silu"),
    "of children": lambda: fxc.Tap("**.first::silu"),
    "of a class": lambda: fxc.Tap(Child, function="silu"),
    "an operator and its in-place forms": lambda: fxc.Tap("layers.*::add"),
    "the first": lambda: fxc.Tap("layers.*::add[0]"),
    "the last": lambda: fxc.Tap("layers.*::add[-1]", select=[-1]),
    "in place": lambda: fxc.Tap("layers.*::mul"),
    "a method": lambda: fxc.Tap("layers.*::flatten"),
    "a container": lambda: fxc.Tap("layers.*::topk"),
    "an element": lambda: fxc.Tap("layers.*::topk", output=1),
    "of a tuple": lambda: fxc.Tap("layers.1::chunk", output=1),
    "an argument by name": lambda: fxc.Tap(
        "layers.*::softmax", point="input", output="input"
    ),
    "an argument by position": lambda: fxc.Tap(
        "layers.*::add[0]", point="input", output=1
    ),
    "of a reflected operator": lambda: fxc.Tap(
        "layers.*::sub[0]", point="input", output="other"
    ),
    "what is written to": lambda: fxc.Tap("layers.*::mul[1]", point="input"),
    "a composite": lambda: fxc.Tap("layers.*::normalize"),
    "reduced": lambda: fxc.Tap("layers.*::silu", reduce=lambda h: h.sum(-1)),
    "last": lambda: fxc.Tap("layers.*::silu", dtype=torch.float64, detach=True),
    "a name": lambda: fxc.Tap("**::router"),
    "initial": lambda: fxc.Tap("layers.*::silu", initial=True, select=[0, -1]),
}


def _eager(built: Model, spec: Any) -> Any:
    return fxc.compile(built, spec, backend="eager", fullgraph=True)(X)[1]


def _aot(built: Model, spec: Any) -> Any:
    return fxc.compile(built, spec, backend="aot_eager", fullgraph=True)(X)[1]


def _pieces(built: Model, spec: Any) -> Any:
    captured = fxc.compile(built, spec, backend="eager")
    captured(X)
    return captured(X)[1]


def _regions(built: Model, spec: Any) -> Any:
    captured = fxc.compile(built, spec, backend="eager", regions="layers.*")
    captured(X)
    return captured(X)[1]


def _functional(built: Model, spec: Any) -> Any:
    function, params, buffers = fxc.functional(built, spec)
    return function(params, buffers, X)[1]


def _export(built: Model, spec: Any) -> Any:
    return fxc.export(built, (X,), spec=spec)(X)[1]


def _saved(built: Model, spec: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.pt2")
        fxc.export(built, (X,), spec=spec).save(path)
        return fxc.load(path)(X)[1]


def _strict(built: Model, spec: Any) -> Any:
    return fxc.export(built, (X,), spec=spec, strict=True)(X)[1]


def _backend(built: Model, spec: Any) -> Any:
    compiled = torch.compile(built, backend=fxc.backend(spec, "eager"), fullgraph=True)
    with fxc.recording() as run:
        compiled(X)
    return run


def _instrument(built: Model, spec: Any) -> Any:
    return fxc.instrument(torch.export.export(built, (X,)), spec)(X)[1]


WAYS = {
    "eager": _eager,
    "aot_eager": _aot,
    "pieces": _pieces,
    "regions": _regions,
    "functional": _functional,
    "export": _export,
    "saved": _saved,
    "strict": _strict,
    "backend": _backend,
    "instrument": _instrument,
}
#: What a graph that was made elsewhere does not tell, and says so.
UNTOLD = {
    "backend": {"a name", "initial"},
    "instrument": {"a name", "a composite", "initial"},
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected.to(found.dtype))
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_values_equal_the_reference(way: str) -> None:
    spec = {name: make() for name, make in TAPS.items()}
    untold = UNTOLD.get(way, set())
    spec = {name: tap for name, tap in spec.items() if name not in untold}
    built = model(breaks=way == "pieces")
    expected = eager_reference(model(), fxc.CaptureSpec(spec), (X,)).records
    torch._dynamo.reset()
    records = WAYS[way](built, spec)
    for name in spec:
        assert_same(records[name], expected[name])
        assert len(records[name]) > 0


@pytest.mark.parametrize("way", ["eager", "aot_eager", "pieces", "regions"])
@torch.no_grad()
def test_values_inside_a_checkpoint(way: str) -> None:
    spec = {"h": fxc.Tap("layers.*::silu"), "last": fxc.Tap("layers.*::add[-1]")}
    expected = eager_reference(
        model(checkpoints=True), fxc.CaptureSpec(spec), (X,)
    ).records
    records = WAYS[way](model(breaks=way == "pieces", checkpoints=True), spec)
    assert len(records["h"]) == 3
    for name in spec:
        assert_same(records[name], expected[name])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_a_name_gives_the_same_value_in_training_and_with_dynamic_shapes(
    training: bool, dynamic: bool
) -> None:
    spec = {name: make() for name, make in TAPS.items()}
    built = model().train(training)
    captured = fxc.compile(
        built, spec, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (2, 3, 5):
        x = X[:1].expand(rows, 4).contiguous() * torch.arange(1.0, rows + 1)[:, None]
        expected = eager_reference(built, fxc.CaptureSpec(spec), (x,)).records
        records = captured(x)[1]
        for name in spec:
            assert_same(records[name], expected[name])


@torch.no_grad()
def test_one_graph_and_no_node_more_for_what_is_not_selected() -> None:
    built = model()
    captured = fxc.compile(
        built,
        {"h": fxc.Tap("layers.*::topk", select=[])},
        backend="eager",
        fullgraph=True,
    )
    captured(X)
    plain: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        plain.append(gm)
        return gm

    torch.compile(built, backend=keep, fullgraph=True)(X)
    captured(X, select={"h": [0]})
    captured(X)
    assert [g.meta["fxcapture_number"] for g in captured.graphs] == [0, 0]
    first = next(iter(captured.graphs))
    own = [(n.op, str(n.target)) for n in first.graph.nodes if n.op != "placeholder"]
    assert own == [
        (n.op, str(n.target)) for n in plain[0].graph.nodes if n.op != "placeholder"
    ]


@torch.no_grad()
def test_the_graph_ends_at_the_inner_value() -> None:
    captured = fxc.compile(
        model(),
        {"h": fxc.Tap("layers.0::silu")},
        backend="eager",
        fullgraph=True,
        keep_output=False,
    )
    captured(X)
    [graph] = captured.graphs
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["y"]


@torch.no_grad()
def test_a_later_write_shows_in_no_record() -> None:
    spec = {
        "h": fxc.Tap("layers.0::mul[0]"),
        "in": fxc.Tap("layers.0::add[1]", point="input"),
    }
    expected = eager_reference(model(), fxc.CaptureSpec(spec), (X,)).records
    for way in ("eager", "aot_eager", "pieces", "functional", "export"):
        records = WAYS[way](model(breaks=way == "pieces"), spec)
        assert_same(records["h"], expected["h"])
        assert_same(records["in"], expected["in"])
        assert not torch.equal(records["h"][0] + 1, records["in"][0])


@pytest.mark.parametrize("way", ["eager", "pieces", "regions", "functional", "export"])
@torch.no_grad()
def test_a_direct_call_of_forward_is_the_inner_module_s(way: str) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Child(), Child()

        def helper(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first.forward(F.silu(x))
            if way == "pieces":
                torch._dynamo.graph_break()
            return self.helper(self.second(x))

    class Direct(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Parent(), Parent()])

    torch.manual_seed(0)
    built = Direct().eval()
    spec = {"own": fxc.Tap("layers.*::silu"), "inner": fxc.Tap("**.first::silu")}
    expected = eager_reference(built, fxc.CaptureSpec(spec), (X,)).records
    records = WAYS[way](built, spec)
    assert len(records["own"]) == 4
    for name in spec:
        assert_same(records[name], expected[name])


# ---------------------------------------------------------------------- what is refused


def error_of(built: nn.Module, tap: fxc.Tap, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        fxc.compile(built, {"h": tap}, backend="eager", fullgraph=True)(X)
    return str(caught.value)


def test_an_unknown_name_tells_the_calls_there_are() -> None:
    text = error_of(model(), fxc.Tap("layers.0::sofmax"), NeverCalledError)
    assert "'layers.0' (Block), which does not call 'sofmax' itself" in text
    assert "silu, add, router, softmax, mul" in text.replace(
        "softmax, router", "router, softmax"
    )
    assert "nearest matches: softmax" in text


def test_a_call_of_an_inner_module_is_named() -> None:
    text = error_of(model(), fxc.Tap("layers.0::linear"), NeverCalledError)
    assert "does not call 'linear' itself" in text
    inner = error_of(model(), fxc.Tap("layers.0.first::linear"), NeverCalledError)
    assert "name one of these, or the module that makes the call: " in inner
    assert "'layers.0.first.linear::linear' does" in inner


def test_an_index_that_there_is_not() -> None:
    text = error_of(model(), fxc.Tap("layers.0::silu[1]"), NeverCalledError)
    assert "a call of it calls silu 1 time" in text
    optional = fxc.Tap("layers.0::silu[1]", optional=True)
    records = fxc.compile(model(), {"h": optional}, backend="eager")(X)[1]
    assert records["h"] == ()


def test_what_the_compiler_makes_of_a_call_is_not_matched() -> None:
    built = model()
    program = torch.export.export(built, (X,))
    assert any(str(n.target) == "aten.clamp_min.default" for n in program.graph.nodes)
    with pytest.raises(NeverCalledError, match="does not call 'clamp_min' itself"):
        fxc.instrument(program, {"h": fxc.Tap("layers.0::clamp_min")})
    with pytest.raises(AmbiguousSiteError, match="took it apart"):
        fxc.instrument(
            program,
            {"h": fxc.Tap("layers.0::normalize", point="input")},
        )


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("a::", "function '' is not the name of a function call"),
        ("a::1x", "function '1x' is not the name"),
        ("a::b[x]", "function 'b[x]' is not the name"),
        (["a::b", "c"], "name different functions: 'b', none"),
        (["a::b", "c::d"], "name different functions"),
    ],
)
def test_a_malformed_target(target: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text.replace("[", r"\[").replace("]", r"\]")):
        fxc.Tap(target)


def test_a_function_in_both_places_and_beside_attention() -> None:
    with pytest.raises(SpecError, match="drop one of the two"):
        fxc.Tap("a::b", function="c")
    with pytest.raises(SpecError, match="name the attention module alone"):
        fxc.AttentionWeights("a::b")


def test_a_symbolically_traced_graph_is_refused() -> None:
    traced = torch.fx.symbolic_trace(model())
    with pytest.raises(AmbiguousSiteError, match="which values of a symbolically"):
        fxc.instrument(traced, {"h": fxc.Tap("layers.0::silu")})


def test_names_have_one_spelling() -> None:
    same = ["a::sub", "a::sub_", "a::__rsub__", "a::isub", "a::subtract"]
    assert len({fxc.Tap(t).function for t in same}) == 1
    tap = fxc.Tap("layers.*::truediv[-1]", point="input")
    assert fxc.Tap.from_json(tap.to_json()) == tap
    assert tap.written == "'layers.*'::div[-1]"


# ------------------------------------------------------------------------- named values


def test_a_named_value_is_nothing_where_nothing_is_captured() -> None:
    graphs: list[Any] = []

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fxc.named("h", x.sin()).cos()

    def keep(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    x = torch.randn(3)
    assert fxc.named("h", x) is x
    torch.compile(Named(), backend=keep, fullgraph=True)(x)
    assert [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_method"] == [
        "sin",
        "cos",
    ]
    program = torch.export.export(Named(), (x,))
    assert sum(n.op == "call_function" for n in program.graph.nodes) == 2
    assert torch.equal(torch.jit.script(Named())(x), x.sin().cos())
    records = fxc.compile(Named(), {"h": fxc.Tap("::h")}, backend="eager")(x)[1]
    assert torch.equal(records["h"][0], x.sin())


# --------------------------------------------------------------------- declared, listed


def test_a_declaration_names_a_function_call() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gate(x).softmax(-1)

    class Routed(nn.Module):
        _can_record_outputs = {  # noqa: RUF012
            "hidden_states": Router,
            "router_probs": fxc.OutputRecorder(Router, function="softmax"),
        }

        def __init__(self) -> None:
            super().__init__()
            self.config = None
            self.layers = nn.ModuleList([Router(), Router()])

        @fxc.capture_outputs
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return RoutedOutput(x)

    torch.manual_seed(0)
    built = Routed().eval()
    probs, h = [], X
    for layer in built.layers:
        probs.append(layer.gate(h).softmax(-1))
        h = layer(h)
    compiled = torch.compile(built, backend="aot_eager", fullgraph=True)
    captured = fxc.compile(built, backend="eager", fullgraph=True)
    for run in (
        lambda: built(X, output_router_probs=True).router_probs,
        lambda: compiled(X, output_router_probs=True).router_probs,
        lambda: captured(X)[1]["router_probs"],
    ):
        assert_same(run(), tuple(probs))


def test_sites_lists_the_calls_inside_with_the_target_of_each() -> None:
    built = model()
    survey = fxc.sites(built, (X,), inside="layers.0")
    paths = [point.path for point in survey]
    assert paths[0] == "layers.0::silu[0]"
    assert "layers.0::router[0]" in paths
    assert not any("first" in path for path in paths)
    point = survey[paths.index("layers.0::softmax[0]")]
    assert point.arguments == "input=(2, 4), dim=-1"
    assert (point.shapes, point.dtypes, point.num_bytes) == (
        ((2, 4),),
        ("float32",),
        32,
    )
    assert point.line.startswith("test_functions.py:")
    for point in survey:
        records = _eager(built, {"h": fxc.Tap(point.path)})
        [value] = records["h"]
        shapes = [t.shape for t in (value if isinstance(value, tuple) else (value,))]
        assert tuple(map(tuple, shapes)) == point.shapes
    assert "layers.0::chunk[0]" in str(survey)


def test_verify_sees_function_calls() -> None:
    spec = {name: make() for name, make in TAPS.items()}
    with torch.no_grad():
        captured = fxc.compile(model(), spec, backend="aot_eager", fullgraph=True)
        found = fxc.verify(captured, X)
    assert set(found.differences.values()) == {0.0}
