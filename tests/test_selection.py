"""Other selections of one trace: siblings, per-call ones, and many in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters

import fxcapture as fxc
from fxcapture import Tap
from tests.models import (
    WIDTH,
    Attention,
    Encoder,
    bert,
    encoder,
    ids,
    llama,
    mlp,
    rows,
)
from tests.reference import assert_records, assert_same, eager_records


def graphs_traced() -> int:
    return counters["stats"]["unique_graphs"]


def wanted(model: nn.Module, spec: Any, *args: Any, **select: Any) -> Any:
    return eager_records(model, spec, lambda: model(*args), select=select)[1]


# --------------------------------------------------------------------------------------
# No recompiles
# --------------------------------------------------------------------------------------

REAL_MODELS = pytest.mark.parametrize(
    ("build", "inputs", "taps"),
    [
        pytest.param(
            llama,
            ids,
            {
                "hidden": Tap("model.layers.*", output=0, select=[0, -1], initial=True),
                "attention": Tap("**.self_attn", output=0),
            },
            id="llama",
        ),
        pytest.param(
            bert,
            ids,
            {"hidden": Tap("encoder.layer.*", output=0), "pooled": "pooler"},
            id="bert",
        ),
        pytest.param(mlp, rows, {"linears": nn.Linear}, id="mlp"),
    ],
)


@REAL_MODELS
def test_a_second_call_recompiles_nothing_and_there_is_one_graph(
    build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], taps: Any
) -> None:
    captured = fxc.compile(build(), taps, backend="eager", fullgraph=True)
    plain = build()
    want = wanted(plain, captured.spec, inputs())

    first = captured(inputs())
    with torch._dynamo.config.patch(error_on_recompile=True):
        second = captured(inputs())

    assert graphs_traced() == 1
    assert not counters["graph_break"]
    assert len(captured.graphs) == 1
    assert_records(want, first.records, 1e-6)
    assert_records(want, second.records, 1e-6)


@REAL_MODELS
def test_a_model_that_also_runs_plainly_compiled_costs_one_graph_each(
    build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], taps: Any
) -> None:
    model = build()
    captured = fxc.compile(model, taps, backend="eager", fullgraph=True)
    plain = torch.compile(model, backend="eager", fullgraph=True)
    captured(inputs()), plain(inputs())

    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            captured(inputs()), plain(inputs())

    assert graphs_traced() == 2


def test_a_broken_run_recompiles_nothing_on_its_second_and_third_call() -> None:
    class Breaks(Encoder):
        def forward(self, ids):
            torch._dynamo.graph_break()
            return super().forward(ids)

    captured = fxc.compile(Breaks().eval(), {"hidden": "layers.*"}, backend="eager")
    captured(ids())
    captured(ids())
    traced = graphs_traced()

    with torch._dynamo.config.patch(error_on_recompile=True):
        captured(ids())

    assert graphs_traced() == traced


# --------------------------------------------------------------------------------------
# One trace for every selection
# --------------------------------------------------------------------------------------


def test_siblings_share_the_trace_and_give_what_they_select() -> None:
    spec = {"hidden": Tap("layers.*"), "weights": Tap(Attention, output=1)}
    captured = fxc.compile(encoder(), spec, backend="eager", fullgraph=True)
    captured(ids())

    for select in (
        {"hidden": [1]},
        {"hidden": 0, "weights": [-1]},
        {"hidden": slice(None, None, 2)},
        {"hidden": [], "weights": None},
        {"hidden": (3, 0, -1)},
    ):
        records = captured.select(**select)(ids()).records
        assert_records(wanted(encoder(), captured.spec, ids(), **select), records)

    assert graphs_traced() == 1


def test_a_sibling_of_a_sibling_keeps_what_it_does_not_name() -> None:
    spec = {"hidden": Tap("layers.*"), "weights": Tap(Attention, output=1)}
    captured = fxc.compile(encoder(), spec, backend="eager")

    sibling = captured.select(hidden=[0]).select(weights=[1])

    want = wanted(encoder(), captured.spec, ids(), hidden=[0], weights=[1])
    assert_records(want, sibling(ids()).records)
    want = wanted(encoder(), captured.spec, ids(), hidden=[0], weights=[2])
    assert_records(want, sibling(ids(), select={"weights": 2}).records)
    assert_records(wanted(encoder(), spec_of(captured), ids()), captured(ids()).records)


def spec_of(captured: fxc.CapturedModule) -> fxc.CaptureSpec:
    return captured.spec


def test_a_sibling_called_first_traces_for_all() -> None:
    captured = fxc.compile(encoder(), {"h": "layers.*"}, backend="eager")
    sibling = captured.select(h=[2])

    sibling(ids())
    captured(ids())

    assert graphs_traced() == 1
    assert_records(wanted(encoder(), captured.spec, ids()), captured(ids()).records)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [True, False])
def test_many_selections_in_a_row_are_each_right(backend: str, grad: bool) -> None:
    captured = fxc.compile(chain(), {"h": "*"}, backend=backend)
    everything = wanted(chain(), captured.spec, rows())["h"]

    with torch.set_grad_enabled(grad):
        for i in range(100 if backend == "eager" else 12):
            # The bits of i say which positions, as written or from the end.
            chosen = [p - 4 * (i // 16 % 2) for p in range(4) if i >> p & 1]
            got = captured(rows(), select={"h": chosen}).records["h"]

            kept = {p % 4 for p in chosen}
            want = [v if p in kept else None for p, v in enumerate(everything)]
            assert_same(want, list(got))

    assert graphs_traced() == 1


def test_the_same_selection_written_in_other_ways_compiles_once() -> None:
    captured = fxc.compile(encoder(), {"h": "layers.*"}, backend="eager")

    for select in ([1, 3], (3, 1), [1, 1, 3], {1, 3}, [-3, -1], slice(1, None, 2)):
        captured(ids(), select={"h": select})

    programs = {id(g) for g in captured.graphs}
    assert graphs_traced() == 1
    assert len(programs) == 1


def test_a_selection_with_symbolic_shapes() -> None:
    captured = fxc.compile(
        encoder(2), {"h": "layers.*"}, backend="aot_eager", dynamic=True, fullgraph=True
    )
    for n, select in ((5, [0]), (7, [0, 1]), (3, [-1])):
        x = ids(2, n)
        want = wanted(encoder(2), captured.spec, x, h=select)
        assert_records(want, captured(x, select={"h": select}).records)

    assert graphs_traced() == 1


def test_selecting_in_a_broken_run_is_right_too() -> None:
    class Breaks(Encoder):
        def forward(self, ids):
            torch._dynamo.graph_break()
            return super().forward(ids)

    torch.manual_seed(1)
    model = Breaks().eval()
    captured = fxc.compile(model, {"h": Tap("layers.*", initial=True)}, backend="eager")
    for select in ([0], [1, -1], [4], slice(1, 3), None, []):
        want = wanted(model, captured.spec, ids(), h=select)
        assert_records(want, captured(ids(), select={"h": select}).records)


def test_what_is_not_selected_is_no_output_of_the_graph() -> None:
    captured = fxc.compile(
        encoder(), {"h": Tap("layers.*", select=[1])}, backend="eager"
    )
    captured(ids())

    (graph,) = captured.graphs

    assert len(graph.graph.output_node().args[0]) == 2  # the model's own, and one tap


# --------------------------------------------------------------------------------------
# With capture off, the graph is the plain one
# --------------------------------------------------------------------------------------


def described(gm: fx.GraphModule) -> list[tuple[str, str, str, str]]:
    """Each operation with its arguments by number; inputs count from their first use.

    A mark that copies an input uses it earlier than the model does, which changes the
    order in which Dynamo lists the graph's inputs and nothing else.
    """
    numbers: dict[fx.Node, str] = {}

    def number(node: fx.Node) -> str:
        return numbers.setdefault(node, f"%{len(numbers)}")

    return [
        (
            node.op,
            str(node.target),
            str(fx.node.map_arg(node.args, number)),
            str(fx.node.map_arg(node.kwargs, number)),
        )
        for node in gm.graph.nodes
        if node.op != "placeholder"
    ]


NOTHING: dict[str, Any] = {
    "empty": {},
    "all": {"h": Tap("**", select=[], optional=True)},
    "initial": {"h": Tap("re:.*(attn|2)", select=[], initial=True)},
    "reduced": {"h": Tap(nn.Linear, select=[], reduce="mean")},
    "input": {"h": Tap(nn.Linear, select=[], reduce="last", point="input")},
    "absent": {"h": Tap(nn.Conv2d, optional=True)},
}


@pytest.mark.parametrize(
    ("build", "inputs", "taps"),
    [
        pytest.param(build, inputs, NOTHING[name], id=f"{build.__name__}-{name}")
        for build, inputs, names in (
            (llama, ids, ["empty", "all"]),
            (bert, ids, ["empty", "all"]),
            (mlp, rows, list(NOTHING)),
        )
        for name in names
    ],
)
def test_a_graph_without_capture_is_the_plain_graph_node_for_node(
    build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], taps: Any
) -> None:
    plain: list[fx.GraphModule] = []
    seen: list[fx.GraphModule] = []

    def keep(into: list[fx.GraphModule]) -> Callable[..., Any]:
        def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
            into.append(gm)
            return gm

        return backend

    torch.compile(build(), backend=keep(plain), fullgraph=True)(inputs())
    fxc.compile(build(), taps, backend=keep(seen), fullgraph=True)(inputs())

    assert described(seen[0]) == described(plain[0])


# --------------------------------------------------------------------------------------
# Records only
# --------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Writes to a buffer in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, h):
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h))
            self.calls[i] += 1
        return h


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_without_the_output_the_graph_ends_at_the_last_record(backend: str) -> None:
    spec = {"h": Tap("layers.*", select=[0, 1])}
    captured = fxc.compile(encoder(), spec, backend=backend, keep_output=False)
    whole = fxc.compile(encoder(), spec, backend=backend)
    whole(ids())

    output, records = captured(ids())

    assert output is None
    assert_records(wanted(encoder(), captured.spec, ids()), records)
    short, long = (len(c.graphs[0].graph.nodes) for c in (captured, whole))
    assert short < long * 0.75


def test_without_the_output_what_stands_before_the_last_record_still_happens() -> None:
    torch.manual_seed(0)
    model = Counts()
    captured = fxc.compile(
        model, {"h": Tap("layers.*", select=[2])}, backend="eager", keep_output=False
    )

    captured(rows())

    assert model.calls[:2].tolist() == [1, 1]
    assert model.calls[3].item() == 0


def test_without_the_output_random_numbers_are_those_of_the_whole_model() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.5),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.5),
    ).train()
    spec = fxc.CaptureSpec({"last": "3", "first": Tap("0")})
    captured = fxc.compile(model, spec, backend="eager", keep_output=False)
    torch.manual_seed(7)
    want = wanted(model, spec, rows())
    torch.manual_seed(7)

    assert_records(want, captured(rows()).records)


def test_without_the_output_a_broken_run_gives_none_and_right_records() -> None:
    class Breaks(Encoder):
        def forward(self, ids):
            torch._dynamo.graph_break()
            return super().forward(ids)

    torch.manual_seed(1)
    model = Breaks().eval()
    captured = fxc.compile(model, {"h": "layers.*"}, backend="eager", keep_output=False)

    output, records = captured(ids())

    assert output is None
    assert_records(wanted(model, captured.spec, ids()), records)
