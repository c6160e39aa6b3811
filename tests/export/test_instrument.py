"""Graphs made elsewhere: what is located, and what is refused and why."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxcapture import Tap
from fxcapture.errors import AmbiguousSiteError, SpecTypeError, TargetNotFoundError
from fxcapture.foreign.classes import declares_tensor
from fxcapture.foreign.instrument import instrument


class Declared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(x)


class Pair(nn.Module):
    def forward(self, x):
        y = x.sin()
        return y.cos(), y


class HandsBack(nn.Module):
    def forward(self, x):
        return x


class Keeps(nn.Module):
    def forward(self, x):
        self.kept = x.exp()
        return self.kept.neg()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.nothing = Declared(), Pair(), HandsBack()
        self.keeps, self.unused = Keeps(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.nothing(self.pair(self.first(x))[0])
        return self.keeps(x) + self.keeps.kept


def by_fx() -> fx.GraphModule:
    return fx.symbolic_trace(Model())


def by_export() -> torch.export.ExportedProgram:
    with pytest.warns(UserWarning, match="assigned during export"):
        return torch.export.export(Model(), (torch.ones(2, 4),))


@pytest.mark.parametrize("make", [by_fx, by_export])
@pytest.mark.parametrize(
    ("tap", "why"),
    [
        (Tap("pair"), "returns one tensor or a container"),
        (Tap("pair", output=1), "returns one tensor or a container"),
        (Tap("keeps"), "returns one tensor or a container"),
        (Tap("first", point="input"), "which values were its arguments"),
        (Tap("nothing", optional=True), "no call|does not tell"),
        (Tap("unused", optional=True), "no call|does not tell"),
    ],
)
def test_what_a_graph_does_not_determine_is_refused(make, tap: Tap, why: str) -> None:
    with pytest.raises(AmbiguousSiteError, match=why) as caught:
        instrument(make(), {"x": tap})

    assert "fxcapture.export" in caught.value.remedy


def test_a_value_used_twice_outside_is_refused_also_if_one_vouches_for_it() -> None:
    with pytest.raises(AmbiguousSiteError, match="2 of its values are used outside"):
        instrument(by_fx(), {"x": Tap("keeps")}, assume_tensors=True)


def test_what_the_user_vouches_for_is_taken() -> None:
    class Doubles(nn.Module):
        def forward(self, x):
            return helper(x)

    def helper(x):
        return x * 2

    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), Doubles()))
    with pytest.raises(AmbiguousSiteError, match="cannot be read"):
        instrument(gm, {"x": Tap("1")})

    output, records = instrument(gm, {"x": Tap("1")}, assume_tensors=True)(
        torch.ones(1, 2)
    )

    torch.testing.assert_close(records["x"][0], output)


def test_the_graph_that_comes_in_is_not_changed() -> None:
    gm = by_fx()
    code = gm.code
    program = by_export()
    text = str(program)

    instrument(gm, {"x": Tap("first")})
    instrument(program, {"x": Tap("first")})

    assert gm.code == code
    assert str(program) == text


def test_a_kept_signature_determines_a_tuple_and_the_arguments() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Pair())
    x = torch.randn(2, 4)
    program = torch.export.export(
        model, (x,), preserve_module_call_signature=("0", "1")
    )

    records = instrument(
        program, {"pair": Tap("1"), "into": Tap("1", point="input", output=0)}
    )(x).records

    torch.testing.assert_close(records["pair"][0], model(x))
    torch.testing.assert_close(records["into"][0], model[0](x))


def test_a_missing_number_in_a_list_is_refused() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), HandsBack(), nn.Linear(2, 2)))

    with pytest.raises(AmbiguousSiteError, match="nothing of '1'"):
        instrument(gm, {"all": Tap("*")})
    assert len(instrument(gm, {"two": Tap("2")})(torch.ones(1, 2)).records["two"]) == 1


def test_records_alone_leave_the_rest_of_the_graph_out() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))

    captured = instrument(gm, {"first": Tap("0")}, keep_output=False)

    assert captured(torch.ones(1, 2)).output is None
    called = [n.target for n in captured.graph_module.graph.nodes]
    assert "0" in called
    assert "2" not in called


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(TargetNotFoundError, match=r"'frist'.*no module"):
        instrument(by_fx(), {"x": Tap("frist")})
    with pytest.raises(SpecTypeError, match="type Linear"):
        instrument(nn.Linear(1, 1), {"x": Tap("x")})  # type: ignore[arg-type]


# ------------------------------------------------- the model itself, and what came in


class Scaled(nn.Module):
    """Keyword arguments inside and out, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x, scale=1.0, *more):
        return {"y": self.act(self.proj(input=x)) * scale}


INPUTS = {
    "out": Tap("", output="y"),
    "into": Tap("", point="input"),
    "scale": Tap("", point="input", output="scale"),
    "mean": Tap("", point="input", output="x", reduce="mean"),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("by", ["fx", "export"])
def test_the_models_own_arguments_are_known(by: str, keyword: bool) -> None:
    model, x = Scaled(), torch.randn(2, 4)
    args, kwargs = ((x,), {"scale": 2.0}) if keyword else ((x, 2.0), {})
    graph = (
        fx.symbolic_trace(model)
        if by == "fx"
        else torch.export.export(model, args, kwargs)
    )

    records = instrument(graph, INPUTS)(*args, **kwargs).records

    torch.testing.assert_close(records["out"][0], model(x, 2.0)["y"])
    torch.testing.assert_close(records["into"][0], x)
    assert records["scale"] == (2.0,)
    torch.testing.assert_close(records["mean"][0], x.mean(1))


def test_an_argument_passed_by_name_has_its_number_too() -> None:
    x, scale = torch.randn(2, 4), torch.tensor(2.0)
    program = torch.export.export(Scaled(), (x,), {"scale": scale})

    records = instrument(program, {"second": Tap("", point="input", output=1)})(
        x, scale=scale
    ).records

    assert records["second"] == (scale,)


@pytest.mark.parametrize("which", [None, 0, "input"])
def test_a_module_call_in_the_graph_tells_its_arguments(which) -> None:
    x = torch.randn(2, 4)
    tap = Tap("proj", point="input", output=which)

    records = instrument(fx.symbolic_trace(Scaled()), {"into": tap})(x).records

    torch.testing.assert_close(records["into"][0], x)


@pytest.mark.parametrize(
    ("path", "which", "why"),
    [
        ("", "nope", "it has no input 'nope'"),
        ("", 2, "it has no input 2"),
        ("proj", "nope", "it received no input 'nope'"),
        ("proj", 1, "it received no input 1"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused(path, which, why) -> None:
    tap = Tap(path, point="input", output=which)

    with pytest.raises(AmbiguousSiteError, match=why):
        instrument(fx.symbolic_trace(Scaled()), {"x": tap})


def test_an_argument_that_an_export_does_not_name_is_refused() -> None:
    program = torch.export.export(Scaled(), (torch.ones(2, 4),))

    with pytest.raises(AmbiguousSiteError, match="received an input 'nope'"):
        instrument(program, {"x": Tap("", point="input", output="nope")})


def test_a_dynamo_graph_knows_neither_arguments_nor_results_of_its_model() -> None:
    graphs: list[fx.GraphModule] = []
    torch.compile(Scaled(), backend=lambda gm, _: graphs.append(gm) or gm)(
        torch.ones(2, 4)
    )

    with pytest.raises(AmbiguousSiteError, match="a flat tuple of tensors"):
        instrument(graphs[0], {"x": Tap("")})
    with pytest.raises(AmbiguousSiteError, match="takes parameters and flat tensors"):
        instrument(graphs[0], {"x": Tap("", point="input")})


@pytest.mark.parametrize("keep_output", [True, False])
@pytest.mark.filterwarnings(
    # torch copies pytree specs with a graph, and its pytree module complains.
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)
def test_the_module_of_an_exported_program_keeps_its_containers(keep_output) -> None:
    model, x = Scaled(), torch.randn(2, 4)
    gm = torch.export.export(model, (x, 2.0)).module()
    spec = {"whole": Tap(""), "into": Tap("", point="input"), "proj": Tap("proj")}

    captured = instrument(gm, spec, keep_output=keep_output)
    output, records = captured(x, 2.0)

    expected = model(x, 2.0)
    assert (output is None) is not keep_output
    torch.testing.assert_close(records["whole"][0], expected)
    torch.testing.assert_close(records["into"][0], x)
    torch.testing.assert_close(records["proj"][0], model.proj(x))
    assert repr(captured) == f"CapturedGraph({captured.spec!r})"


@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)
def test_a_container_that_a_graph_takes_apart_is_no_input_of_it() -> None:
    class TakesDict(nn.Module):
        def forward(self, batch):
            return batch["x"] * 2

    batch = {"x": torch.ones(2)}
    program = torch.export.export(TakesDict(), (batch,))
    spec = {"into": Tap("", point="input")}

    (into,) = instrument(program, spec)(batch).records["into"]
    torch.testing.assert_close(into, batch)
    with pytest.raises(AmbiguousSiteError, match="takes containers"):
        instrument(program.module(), spec)


# ---------------------------------------------------------------- what a class declares


class Product(nn.Module):
    """Evidently a tensor to whoever reads it, and nothing reads it."""

    def forward(self, x):
        return x * x.sigmoid()


class Quoted(nn.Module):
    def forward(self, x) -> "torch.Tensor":  # noqa: UP037
        return x * 2


class OfParameter(nn.Module):
    def forward(self, x) -> nn.Parameter:
        return nn.Parameter(x * 2)


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x) -> torch.Tensor:
        return -x


class Several(nn.Module):
    def forward(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 2


class Unresolved(nn.Module):
    def forward(self, x) -> NotImportedHere.Tensor:  # noqa: F821
        return x * 2


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (nn.Linear, True),
        (nn.TransformerEncoderLayer, True),
        (nn.MultiheadAttention, False),
        (nn.LSTM, False),
        (nn.MaxPool2d, False),
        (nn.Identity, False),
        (nn.Sequential, False),
        (Declared, True),
        (Quoted, True),
        (OfParameter, True),
        (Pair, False),
        (HandsBack, False),
        (Keeps, False),
        (Product, False),
        (Decorated, False),
        (Several, False),
        (Unresolved, False),
        (None, False),
    ],
)
def test_only_what_is_declared_to_be_a_tensor_counts(cls, expected: bool) -> None:
    assert declares_tensor(cls) is expected


@pytest.mark.parametrize("make", [fx.symbolic_trace, "export"])
def test_no_source_is_read_for_what_a_module_returns(make) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Product()), torch.randn(2, 4)
    graph = torch.export.export(model, (x,)) if make == "export" else make(model)

    with pytest.raises(AmbiguousSiteError, match="cannot be read from the graph"):
        instrument(graph, {"x": Tap("1")})

    records = instrument(graph, {"x": Tap("1")}, assume_tensors=True)(x).records
    torch.testing.assert_close(records["x"], (model(x),))


def test_a_call_that_is_not_selected_may_stay_undetermined() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Product()), torch.randn(2, 4)
    spec = {"x": Tap(["0", "1"], select=[0])}

    for graph in (fx.symbolic_trace(model), torch.export.export(model, (x,))):
        captured = instrument(graph, spec)

        torch.testing.assert_close(captured(x).records["x"], (model[0](x), None))
        assert [site.path for site in captured.sites] == ["0", "1"]


def test_a_graph_can_be_instrumented_again() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    first = instrument(fx.symbolic_trace(model), {"a": Tap("0", reduce=torch.sin)})

    captured = instrument(first.graph_module, {"b": Tap("1", reduce=torch.cos)})
    (output, values), records = captured(x)

    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(first.read(values)["a"], (model[0](x).sin(),))
    torch.testing.assert_close(records["b"], (model(x).cos(),))


def test_a_callable_is_given_a_container_whole() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 3)), torch.randn(2, 5, 4)
    kept = nn.Sequential(nn.Linear(4, 4), Pair())
    spec = {"x": Tap("1", reduce=lambda pair: pair[0].sum() - pair[1].sum())}

    program = torch.export.export(kept, (x,), preserve_module_call_signature=("1",))
    for graph, part in ((fx.symbolic_trace(model), model), (program, kept)):
        first, second = part(x)
        found = instrument(graph, spec)(x).records["x"][0]
        torch.testing.assert_close(found, first.sum() - second.sum())
