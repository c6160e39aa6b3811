"""Graphs made elsewhere: what is located, and what is refused and why."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxcapture import Tap
from fxcapture.errors import AmbiguousSiteError, SpecTypeError, TargetNotFoundError
from fxcapture.frontends.returns import returns_one_tensor
from fxcapture.instrument import instrument


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
    ],
)
def test_only_what_surely_returns_one_tensor_counts(cls: type, expected: bool) -> None:
    assert returns_one_tensor(cls, lambda name: False) is expected
