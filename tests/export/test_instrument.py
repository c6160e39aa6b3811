"""Graphs made elsewhere: what is located, and what is refused and why."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxcapture import Tap
from fxcapture.errors import AmbiguousSiteError, SpecTypeError, TargetNotFoundError
from fxcapture.foreign.instrument import instrument
from fxcapture.foreign.returns import returns_one_tensor


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


class Product(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


class Rebound(nn.Module):
    def forward(self, x):
        x = x - 1
        if x.dim() > 1:
            x = torch.relu(x)
        return x


class Chunks(nn.Module):
    def forward(self, x):
        return x.chunk(2)


class Joined(nn.Module):
    def forward(self, x, more):
        return x + more


class Sometimes(nn.Module):
    def forward(self, x):
        if x.dim() > 1:
            return x.relu()
        return x


class Annotated(nn.Module):
    def forward(self, x):
        y: torch.Tensor = x.relu()
        if x.dim() > 1:
            y = y + y
        return y


class Named(nn.Module):
    def forward(self, x):
        return (y := x.relu()) - y


class NamedAlone(nn.Module):
    def forward(self, x):
        (y := [x])
        return y


class InWith(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            return x[:, 0] if x.dim() > 1 else -x


class WithTarget(nn.Module):
    def forward(self, x):
        with torch.no_grad() as y:
            return y


class Loops(nn.Module):
    def forward(self, x):
        for y in x:  # noqa: B007
            pass
        return y


class Indexed(nn.Module):
    def forward(self, x):
        return x[0]


class Halved(nn.Module):
    def forward(self, x):
        return x // 2


class Negated(nn.Module):
    def forward(self, x):
        return not x


class OfWeight(nn.Module):
    def forward(self, x):
        return self.weight.relu()


class OfModule(nn.Module):
    def forward(self, x):
        return pytest.relu(x)


class OfTorchClass(nn.Module):
    def forward(self, x):
        return torch.Size(x)


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return -x


class Yields(nn.Module):
    def forward(self, x):
        yield x
        return -x


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (nn.Linear, True),
        (nn.MultiheadAttention, False),
        (nn.LSTM, False),
        (nn.Identity, False),
        (Declared, True),
        (Pair, False),
        (HandsBack, False),
        (Keeps, False),
        (Product, True),
        (Rebound, True),
        (Chunks, False),
        (Joined, False),
        (Sometimes, False),
        (Annotated, True),
        (Named, True),
        (NamedAlone, False),
        (InWith, True),
        (WithTarget, False),
        (Loops, False),
        (Indexed, False),
        (Halved, False),
        (Negated, False),
        (OfWeight, True),
        (OfModule, False),
        (OfTorchClass, False),
        (Decorated, False),
        (Yields, False),
    ],
)
def test_only_what_surely_returns_one_tensor_counts(cls: type, expected: bool) -> None:
    assert returns_one_tensor(cls, lambda name: False) is expected
