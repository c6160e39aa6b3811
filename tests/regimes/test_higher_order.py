"""Captures inside checkpoints, conditionals, loops, regions and function transforms."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from fxcapture.errors import NeverCalledError, UnreachableValueError
from tests.regimes.blocks import Pair, left_behind

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def capture(model, backend="aot_eager", **targets):
    spec = {name: fxc.Tap(path, optional=True) for name, path in targets.items()}
    return fxc.compile(model, spec, backend=backend, fullgraph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_values_leave_checkpoints_also_nested_ones_and_functions(reentrant):
    def forward(self, x):
        x = checkpoint(self.a, x, use_reentrant=reentrant)
        inner = lambda y: self.b(checkpoint(self.a, y, use_reentrant=reentrant))  # noqa: E731
        return checkpoint(inner, x, use_reentrant=reentrant)

    model = Pair(forward)
    captured = capture(model, a="a", inner="a.0")
    x = torch.randn(2, 4, requires_grad=True)
    output, records = captured(x)
    first = model.a(x)
    expected = [first, model.a(first)]

    assert [torch.equal(r, e) for r, e in zip(records["a"], expected, strict=True)]
    assert len(records["inner"]) == 2
    (output.sum() + records["a"][1].sum()).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model.b(expected[1]).sum() + expected[1].sum()).backward()
    for left, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(left, parameter.grad)
    # The backward recomputed both regions; that added no entry and left no trace.
    assert left_behind(model) == []


def cond_forward(self, x):
    return torch.cond(
        x.sum() > 0, lambda x: self.a(x) * 2, lambda x: self.b(self.b(x)) + 1, (x,)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_conditional_only_the_branch_that_ran_has_values(backend):
    model = Pair(cond_forward)
    captured = capture(model, backend, a="a", b="b")
    for x in (torch.rand(2, 4) + 1, -torch.rand(2, 4) - 1, torch.rand(2, 4) + 2):
        output, records = captured(x)
        if x.sum() > 0:
            assert len(records["a"]) == 1
            assert records["b"] == ()
            torch.testing.assert_close(records["a"][0], model.a(x))
            torch.testing.assert_close(output, model.a(x) * 2)
        else:
            assert records["a"] == ()
            assert len(records["b"]) == 2
            torch.testing.assert_close(records["b"][1], model.b(model.b(x)))
        assert left_behind(model) == []
    assert len(captured.graphs) == 1


def test_a_branch_that_did_not_run_is_an_error_unless_optional():
    captured = fxc.compile(Pair(cond_forward), {"b": "b"}, backend="eager")

    with pytest.raises(NeverCalledError, match="'b' matched 'b'"):
        captured(torch.rand(2, 4) + 1)


def test_gradients_flow_through_a_value_of_a_branch():
    model = Pair(cond_forward)
    x = torch.rand(2, 4) + 1
    output, records = capture(model, a="a", b="b")(x)
    (output.sum() + records["a"][0].pow(2).sum()).backward()
    got = model.a[0].weight.grad.clone()
    model.zero_grad()
    value = model.a(x)
    (value.mul(2).sum() + value.pow(2).sum()).backward()

    torch.testing.assert_close(got, model.a[0].weight.grad)


def test_conditionals_nest_and_hold_checkpoints():
    def forward(self, x):
        inner = lambda x: torch.cond(  # noqa: E731
            x.mean() > 10,
            lambda x: self.b(x),
            lambda x: checkpoint(self.a, self.b(x), use_reentrant=False),
            (x,),
        )
        return torch.cond(x.sum() > 0, inner, lambda x: x.sin(), (x,))

    model = Pair(forward)
    captured = capture(model, a="a", b="b")
    records = captured(torch.rand(2, 4)).records
    assert [len(records[n]) for n in "ab"] == [1, 1]
    records = captured(torch.rand(2, 4) + 20).records
    assert [len(records[n]) for n in "ab"] == [0, 1]
    records = captured(-torch.rand(2, 4)).records
    assert [len(records[n]) for n in "ab"] == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conditional_elsewhere_in_the_graph_leaves_no_override_behind(backend):
    # Dynamo forgets what it traced before such an operator; the value must neither be
    # lost nor counted twice in the next call.
    def forward(self, x):
        y = self.a(x)
        z = torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))
        return self.b(z)

    model = Pair(forward)
    captured = capture(model, backend, a="a", b="b")
    for _ in range(3):
        x = torch.randn(2, 4)
        records = captured(x).records
        assert [len(records[n]) for n in "ab"] == [1, 1]
        torch.testing.assert_close(records["a"][0], model.a(x))
        assert left_behind(model) == []
    assert len(captured.graphs) == 1


def test_an_override_that_dynamo_did_not_undo_is_put_right(monkeypatch):
    from fxcapture import passes

    monkeypatch.setattr(passes, "forgets_overrides", lambda gm: False)

    def forward(self, x):
        y = self.a(x)
        return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))

    model = Pair(forward)
    captured = capture(model, "eager", a="a")
    for _ in range(3):
        assert len(captured(torch.randn(2, 4)).records["a"]) == 1
        assert left_behind(model) == []
    assert "did not undo the override of 'a'" in captured.explain()


def test_a_value_inside_a_loop_is_refused_with_the_reason():
    from torch._higher_order_ops.while_loop import while_loop

    def forward(self, x):
        body = lambda i, x: (i + 1, self.a(x))  # noqa: E731
        return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]

    captured = capture(Pair(forward), "eager", a="a")
    with (
        torch.no_grad(),
        pytest.raises(
            UnreachableValueError, match=r"'a' \(Sequential\).*body of 'while_loop'"
        ),
    ):
        captured(torch.randn(2, 4))


@torch.compiler.nested_compile_region
def region(module, x):
    return module(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_that_share_one_nested_compile_region_are_told_apart(backend):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (x @ self.weight).tanh()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Scale() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = region(layer, x)
            return region(self.layers[1], x)

    model = Model()
    captured = fxc.compile(model, {"l": "layers.*"}, backend=backend, fullgraph=True)
    checked = fxc.verify(captured, torch.randn(2, 4))

    assert checked.differences == {"l": 0.0}
    assert captured(torch.randn(2, 4)).records.paths("l") == (
        "layers.0", "layers.1", "layers.2", "layers.3", "layers.1"
    )  # fmt: skip


def test_regions_of_autocast_and_no_grad_keep_dtype_and_gradient():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
        with torch.no_grad():
            z = self.b(y.float())
        return self.a(z)

    model = Pair(forward)
    captured = capture(model, a="a", b="b")
    records = captured(torch.randn(2, 4)).records

    assert [v.dtype for v in records["a"]] == [torch.bfloat16, torch.float32]
    assert not records["b"][0].requires_grad
    assert records["a"][1].requires_grad


TRANSFORMS = {
    "vmap": lambda self, x: torch.vmap(self.a)(x),
    "grad": lambda self, x: torch.func.grad(lambda y: self.a(y).sum())(x),
    "vmap of grad": lambda self, x: torch.vmap(
        torch.func.grad(lambda y: self.a(y).sum())
    )(x),
    "jvp": lambda self, x: torch.func.jvp(self.a, (x,), (x,))[1],
    "vjp": lambda self, x: torch.func.vjp(self.a, x)[1](x)[0],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_leave_the_function_transforms_a_model_uses(name, backend):
    model = Pair(TRANSFORMS[name])
    spec = {"a": fxc.Tap("a", initial=True), "inner": "a.0"}
    captured = fxc.compile(model, spec, backend=backend, fullgraph=True)
    x = torch.randn(4, 4)
    output, records = captured(x)

    torch.testing.assert_close(records["a"][0], x)
    torch.testing.assert_close(records["a"][1], model.a(x))
    torch.testing.assert_close(records["inner"][0], model.a[0](x))
    torch.testing.assert_close(output, model(x))


def test_a_captured_model_inside_transforms_gives_right_records():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    captured = fxc.compile(model, {"l": "0"}, backend="eager")
    x = torch.randn(3, 4)

    both = torch.vmap(lambda x: (captured(x).output, captured(x).records["l"][0]))(x)
    torch.testing.assert_close(both, (model(x), model[0](x)))
    seen = []

    def loss(x):
        output, records = captured(x)
        seen.append(records["l"][0])
        return output.sum()

    torch.func.grad(loss)(x)
    torch.testing.assert_close(seen[0].detach(), model[0](x).detach())
    # A transform around one call does not spoil the next one.
    captured(x)
    assert captured.sites[0].graph is not None
