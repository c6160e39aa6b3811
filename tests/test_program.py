"""The captured model as a whole: every kind of tap, records, sites, explanations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import CaptureSpec, Records, Tap
from fxcapture.errors import VerificationError
from fxcapture.testing import assert_parity, verify
from tests.models import WIDTH, Attention, Encoder, encoder, ids, llama, mlp, rows
from tests.reference import assert_records, assert_same, eager_records

# Dynamo looks at .grad of what crosses a graph break, also of plain models.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


class Broken(Encoder):
    """The same model in pieces."""

    def forward(self, ids):
        torch._dynamo.graph_break()
        return super().forward(ids)


def broken() -> Encoder:
    torch.manual_seed(1)
    return Broken(4).eval()


#: One graph, ATen graphs, and pieces.
WAYS = pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(encoder, {"backend": "eager", "fullgraph": True}, id="graph"),
        pytest.param(encoder, {"backend": "aot_eager", "fullgraph": True}, id="aot"),
        pytest.param(broken, {"backend": "eager"}, id="pieces"),
    ],
)


def every_other(h: torch.Tensor) -> torch.Tensor:
    return h[:, ::2] * 2


TAPS = {
    "plain": Tap("layers.*"),
    "tuple": Tap("layers.0.attn"),
    "element": Tap(Attention, output=1),
    "element_from_end": Tap(Attention, output=-2),
    "initial": Tap("layers.*", initial=True, select=[0, -1]),
    "input": Tap("norm", point="input"),
    "input_by_name": Tap("layers.1", point="input", output="h"),
    "whole": Tap(""),
    "detached": Tap("layers.1", detach=True),
    "cast": Tap("layers.*", dtype=torch.float64, select=-1),
    "cast_integers": Tap("", point="input", dtype=torch.float16),
    "last": Tap("layers.*", reduce="last"),
    "mean_of_input": Tap("norm", point="input", reduce="mean"),
    "custom": Tap("layers.*", reduce=every_other, initial=True, dtype=torch.bfloat16),
    "mean_of_tuple": Tap("layers.2.attn", reduce="mean"),
    "moved": Tap("norm", device="cpu"),
    "absent": Tap("nowhere.*", optional=True),
    "idle": Tap("unused", optional=True),
}


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(encoder, {"backend": "eager", "fullgraph": True}, id="graph"),
        pytest.param(broken, {"backend": "eager"}, id="pieces"),
    ],
)
@pytest.mark.parametrize("name", sorted(TAPS))
def test_each_kind_of_tap_alone(name: str, build: Any, settings: Any) -> None:
    spec = CaptureSpec({name: TAPS[name]})
    model, plain = build(), build()
    output, want = eager_records(plain, spec, lambda: plain(ids()))

    got = fxc.compile(model, spec, **settings)(ids())

    assert_same(output, got.output)
    assert_records(want, got.records)


@WAYS
def test_every_kind_of_tap_together(build: Any, settings: Any) -> None:
    spec = CaptureSpec(TAPS)
    model, plain = build(), build()
    output, want = eager_records(plain, spec, lambda: plain(ids()))
    captured = fxc.compile(model, spec, **settings)

    for _ in range(2):
        got = captured(ids())

        assert_same(output, got.output)
        assert_records(want, got.records)


def test_a_mapping_stands_for_a_spec_and_a_target_for_a_tap() -> None:
    captured = fxc.compile(mlp(), {"first": "0", "all": nn.Linear}, backend="eager")

    assert captured.spec == CaptureSpec({"first": Tap("0"), "all": Tap(nn.Linear)})
    assert len(captured(rows()).records["all"]) == 3


def test_the_result_unpacks_and_has_names() -> None:
    result = fxc.compile(mlp(), {"r": "0"}, backend="eager")(rows())

    output, records = result
    assert result.output is output
    assert result.records is records


def test_records_are_a_mapping_of_tuples_with_paths() -> None:
    spec = {
        "h": Tap("layers.*", select=[1], initial=True),
        "none": Tap("x", optional=True),
    }
    records = fxc.compile(encoder(), spec, backend="eager")(ids()).records

    assert list(records) == ["h", "none"]
    assert len(records) == 2
    assert isinstance(records["h"], tuple)
    assert [v is None for v in records["h"]] == [True, False, True, True, True]
    assert records["none"] == ()
    assert records.paths("h") == ("layers.0", *(f"layers.{i}" for i in range(4)))
    with pytest.raises(KeyError):
        records["absent"]
    text = repr(records)
    assert "h: 5 positions" in text
    assert "[1] 'layers.0': float32[2, 5, 8]" in text


def test_sites_are_in_call_order_and_say_where_they_run() -> None:
    captured = fxc.compile(encoder(2), {"r": Tap("**", optional=True)}, backend="eager")
    assert len(captured.sites) == 0

    captured(ids())

    paths = [s.path for s in captured.sites]
    assert paths[:3] == ["tokens", "layers.0.attn.query", "layers.0.attn.key"]
    assert paths[-2:] == ["norm", ""]
    assert {s.graph for s in captured.sites} == {0}
    assert captured.sites[3].class_name == "Attention"
    assert captured.sites[3].shapes == ((2, 5, 8), (2, 5, 5))


def test_explain_has_a_line_for_each_position() -> None:
    spec = {"h": Tap("layers.*", select=[0, -1], initial=True)}
    captured = fxc.compile(encoder(2), spec, backend="eager")
    assert captured.explain() == "no call has been made yet"

    captured(ids())

    lines = captured.explain().splitlines()
    assert lines[0].split()[:5] == ["record", "position", "site", "call", "where"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["h", "0", "layers.0"],
        ["h", "1", "layers.0"],
        ["h", "2", "layers.1"],
    ]
    assert "(input)" in lines[1]
    assert "not selected" in lines[2]
    assert "graph 0" in lines[3]


def test_explain_of_a_broken_run_names_the_graphs_and_the_reason() -> None:
    captured = fxc.compile(broken(), {"h": "layers.*", "r": ""}, backend="eager")
    captured(ids())

    text = captured.explain()

    assert "not one graph, because:" in text
    assert "graph_break" in text
    assert " graph " in text or " eager" in text


def test_keywords_of_torch_compile_are_passed_on() -> None:
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(len(inputs))
        return gm

    captured = fxc.compile(
        mlp(), {"r": "0"}, backend=backend, dynamic=False, fullgraph=True, options=None
    )
    captured(rows())
    captured(rows(5, WIDTH))

    assert len(seen) == 2  # static shapes: a graph for each

    with pytest.raises(TypeError, match="no_such_keyword"):
        fxc.compile(mlp(), {"r": "0"}, backend="eager", no_such_keyword=1)


def test_keyword_arguments_and_defaults_reach_the_model() -> None:
    model, plain = llama(), llama()
    captured = fxc.compile(model, {"h": "model.layers.*"}, backend="eager")
    mask = torch.ones(2, 5, dtype=torch.long)
    run = lambda: plain(input_ids=ids(), attention_mask=mask)  # noqa: E731
    output, want = eager_records(plain, captured.spec, run)

    got = captured(input_ids=ids(), attention_mask=mask)

    assert type(got.output) is type(output)
    assert_same(output.logits, got.output.logits, 1e-6)
    assert_records(want, got.records, 1e-6)


def test_the_testing_module_agrees_with_the_oracle() -> None:
    from fxcapture.testing import eager_reference

    taps = {n: t for n, t in TAPS.items() if n != "detached"}
    spec = CaptureSpec(taps)
    plain = encoder()
    output, want = eager_records(plain, spec, lambda: plain(ids()))

    reference = eager_reference(encoder(), spec, (ids(),))
    captured = fxc.compile(encoder(), spec, backend="eager")

    assert_same(output, reference.output)
    assert_records(want, reference.records)
    assert set(assert_parity(captured, ids()).differences.values()) == {0.0}


def test_parity_fails_where_a_record_is_wrong() -> None:
    def wrong(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [t * 1.01 for t in gm(*args)]

    captured = fxc.compile(mlp(), {"r": "0"}, backend=wrong)

    with (
        torch.no_grad(),
        pytest.raises(VerificationError, match=r"record 'r' is .* away"),
    ):
        assert_parity(captured, rows())


class Parameters(nn.Module):
    def forward(self, h, scale=2.0, *more, flag=True):
        return h * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "which", "want"),
    [
        ((), {}, "scale", 2.0),
        ((), {}, 1, 2.0),
        ((3.0,), {}, "scale", 3.0),
        ((), {"scale": 3.0}, 1, 3.0),
        ((3.0, 4.0), {}, "flag", True),
        ((3.0, 4.0), {"flag": False}, "flag", False),
        ((3.0, 4.0), {}, 2, 4.0),
    ],
)
def test_an_argument_is_found_however_it_was_passed(args, kwargs, which, want) -> None:
    class Calls(Holder):
        def forward(self, h):
            return self.part(h, *args, **kwargs)

    tap = Tap("part", point="input", output=which)
    captured = fxc.compile(Calls(Parameters()), {"r": tap}, backend="eager")

    assert captured(rows()).records["r"] == (want,)
    assert_parity(captured, rows(), tolerance=0.0)


def test_an_input_passed_by_keyword_through_a_forward_without_a_signature() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return self.part(input=h)

    model = Calls()
    original = model.part.forward
    model.part.forward = lambda *args, **kwargs: original(*args, **kwargs)
    spec = {
        "first": Tap("part", point="input"),
        "named": Tap("part", point="input", output="input"),
        "states": Tap("part", initial=True),
    }

    captured = fxc.compile(model, spec, backend="eager")

    records = captured(rows()).records

    assert_same([rows()], list(records["first"]))
    assert_same([rows()], list(records["named"]))
    assert_same(rows(), records["states"][0])
    assert_parity(captured, rows(), tolerance=0.0)


def test_records_print_whatever_they_hold() -> None:
    values = {
        "pair": ((torch.ones(2), None),),
        "table": ({"n": 3, "rows": [torch.ones(1, dtype=torch.int64)]},),
    }

    text = repr(Records(values, {"pair": ("a",), "table": ("b",)}))

    assert "[0] 'a': tuple(float32[2], None)" in text
    assert "[0] 'b': dict(n=3, rows=list(int64[1]))" in text
    assert repr(Records({}, {})) == "Records()"


# --------------------------------------------------------------------------------------
# The captured model as a module
# --------------------------------------------------------------------------------------


def test_it_shows_what_the_model_has() -> None:
    model = encoder(1)
    captured = fxc.compile(model, {"r": "norm"}, backend="eager")

    assert {"layers", "sites", "select", "unused"} <= set(dir(captured))
    assert repr(captured) == f"CapturedModule({captured.spec!r})\n{model!r}"
    with pytest.raises(AttributeError, match="'Encoder' object has no attribute 'no'"):
        _ = captured.no
    with pytest.raises(AttributeError, match="layers"):
        _ = fxc.CapturedModule.__new__(fxc.CapturedModule).layers


def test_explain_draws_too() -> None:
    captured = fxc.compile(encoder(1), {"r": "norm"}, backend="eager")
    captured(ids())

    assert "LayerNorm" in captured.explain("text")
    assert captured.explain("svg").startswith("<svg")


class UsesCaptured(nn.Module):
    """What an export of a function that calls a captured model returns."""

    def __init__(self, captured: fxc.CapturedModule) -> None:
        super().__init__()
        self.inner = captured

    def forward(self, x):
        output, records = self.inner(x)
        return output, records["r"]


@pytest.mark.filterwarnings(
    # Overrides that the trace puts up and takes back.
    "ignore:While compiling, we found certain side effects:UserWarning"
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("keep_output", [True, False])
def test_its_records_are_outputs_of_an_export_around_it(strict, keep_output) -> None:
    plain = encoder(2)
    spec = CaptureSpec({"r": Tap("layers.*", select=-1)})
    output, want = eager_records(plain, spec, lambda: plain(ids()))
    captured = fxc.compile(encoder(2), spec, backend="eager", keep_output=keep_output)

    program = torch.export.export(UsesCaptured(captured), (ids(),), strict=strict)
    got = program.module()(ids())

    assert_same(output if keep_output else None, got[0])
    assert_same(want["r"], list(got[1]))


# --------------------------------------------------------------------------------------
# Verification
# --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Parts:
    value: torch.Tensor
    pair: Pair
    table: dict[Any, Any]
    note: str = "constant"


class Structured(nn.Module):
    def forward(self, h):
        return Parts(h * 2, Pair(h + 1, h.shape), {"empty": h[:0], 3: None})


class AsDict(nn.Module):
    def forward(self, h):
        return {"h": h, 3: h.sin()}


class Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.as_dict = nn.Identity()

    def forward(self, h):
        self.as_dict(h)
        return self.part(h)


def test_every_kind_of_value_is_compared() -> None:
    spec = {
        "whole": Tap("part"),
        "field": Tap("part", output="value"),
        "last_field": Tap("part", output="table"),
        "of_dict": Tap("as_dict", output=3),
        "chosen": Tap("part", output="pair", select=slice(0, None)),
    }
    model = Holder(Structured())
    model.as_dict = AsDict()
    captured = fxc.compile(model, spec, backend="eager")

    result = assert_parity(captured, rows())

    assert result.differences == dict.fromkeys(spec, 0.0)
    assert result.scales["field"] == (rows() * 2).abs().max()
    assert str(result).splitlines()[-1].split() == ["(output)", "0"]


def test_a_run_without_its_output_is_verified_by_its_records() -> None:
    captured = fxc.compile(mlp(), {"r": "2"}, backend="eager", keep_output=False)

    result = assert_parity(captured, rows(), tolerance=0.0)

    assert result.output_difference is None
    assert "(output)" not in str(result)


@pytest.mark.parametrize(
    ("part", "tap"),
    [
        (nn.TransformerEncoderLayer(WIDTH, 2, dropout=0.0).eval(), "part.linear1"),
        (nn.TransformerEncoderLayer(WIDTH, 2, dropout=0.0).eval(), "part"),
    ],
)
def test_what_torch_fuses_is_verified_unfused(part: nn.Module, tap: str) -> None:
    captured = fxc.compile(Holder(part), {"r": tap}, backend="eager")
    enabled = torch.backends.mha.get_fastpath_enabled()

    with torch.no_grad():
        result = assert_parity(captured, rows(2, 3, WIDTH))

    assert result.scales["r"] > 0
    assert torch.backends.mha.get_fastpath_enabled() == enabled


class Changes(nn.Module):
    """Returns one thing when it runs and another when it is compiled."""

    def __init__(self, run: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.compiled = run, compiled

    def forward(self, h):
        return self.compiled(h) if torch.compiler.is_compiling() else self.run(h)


@pytest.mark.parametrize(
    ("run", "compiled", "what"),
    [
        (lambda h: h * 2, lambda h: h[:1], r"r\[0\] is 'torch.float32\[1, 8\]'"),
        (lambda h: h * 2, lambda h: h.double(), r"r\[0\] is 'torch.float64\[3, 8\]'"),
        (lambda h: h * 2, lambda h: None, r"r\[0\] is 'NoneType'"),
        (lambda h: (h * 2,), lambda h: [h * 2], r"r\[0\] is 'list'"),
        (lambda h: {"a": h}, lambda h: {"b": h}, r"r\[0\] is 'dict'"),
        (lambda h: (h * 2, 1.0), lambda h: (h * 2, 2.0), r"r\[0\]\[1\] is 2.0"),
    ],
    ids=["shape", "dtype", "none", "list", "keys", "constant"],
)
def test_what_is_no_number_is_an_error_of_its_own(run, compiled, what: str) -> None:
    model = Holder(Changes(run, compiled))
    captured = fxc.compile(model, {"r": "part"}, backend="eager")

    with pytest.raises(VerificationError, match=what):
        verify(captured, rows())


class CalledMore(Holder):
    def forward(self, h):
        if torch.compiler.is_compiling():
            h = self.part(h)
        return self.part(h)


def test_a_call_more_is_an_error_of_its_own() -> None:
    captured = fxc.compile(CalledMore(nn.Tanh()), {"r": "part"}, backend="eager")

    with pytest.raises(VerificationError, match="record 'r' has 2 positions") as caught:
        verify(captured, rows())
    assert caught.value.why == "the eager reference has 1"
