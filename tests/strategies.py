"""Hypothesis strategies: random models, taps for them, selectors, output structures.

Terms
    plan of a model: plain data that says how a model is built, so that a failing
        example prints as something one can read; ``build`` makes the modules.
    pool: modules that may stand at several places of one model.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from fxcapture import Tap

WIDTH = 4


# --------------------------------------------------------------------------------------
# Random models
# --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    main: torch.Tensor
    side: torch.Tensor | None


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


class Scaled(nn.Module):
    """Called with keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, *, gain=1.0):
        return self.mix(hidden) * gain


class Counting(nn.Module):
    """Writes to a buffer after it has computed what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, hidden):
        out = hidden * 2
        self.total += out.sum(0)
        return out


class Constant(nn.Module):
    """Returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(WIDTH))

    def forward(self):
        return self.value


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5),
    "empty": nn.Sequential,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scaled": Scaled,
    "counting": Counting,
    "constant": Constant,
    "pair": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
}

#: What a block does to its hidden state between the calls of its children.
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda h, x: h.mul_(1.5),
    "iadd": lambda h, x: h.__iadd__(1.0),
    "set_row": lambda h, x: h.__setitem__(0, 0.5) or h,
    "write_input": lambda h, x: (x.mul_(0.5), h)[1],
    "write_view": lambda h, x: (h.view(-1)[:2].zero_(), h)[1],
    "residual": lambda h, x: h + x,
    "restart": lambda h, x: x,
    "double": lambda h, x: h * 2,
    "transpose_twice": lambda h, x: h.t().t(),
    "detach": lambda h, x: h.detach(),
}

#: What a block returns, from its hidden state and its input.
RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "tensor": lambda h, x: h,
    "input": lambda h, x: x,
    "view": lambda h, x: h.view(-1, WIDTH),
    "tuple": lambda h, x: (h, h * 2),
    "aliases": lambda h, x: (h, x, h),
    "with_none": lambda h, x: (h, None, 3, "text"),
    "list": lambda h, x: [h, h.sum()],
    "dict": lambda h, x: {"hidden": h, "side": (x, {"deep": h + 1}), "n": 2},
    "ordered": lambda h, x: OrderedDict(hidden=h, input=x),
    "named": lambda h, x: Pair(h, x),
    "dataclass": lambda h, x: Result(h, (x, None)),
}


def first_tensor(value: Any) -> torch.Tensor:
    """What the caller goes on with."""
    while not isinstance(value, torch.Tensor):
        if isinstance(value, dict):
            value = value["hidden"]
        elif isinstance(value, Result):
            value = value.hidden
        else:
            value = value[0]
    return value


class Block(nn.Module):
    """Runs its steps in order: names of ``STEPS``, or numbers of children to call."""

    def __init__(
        self, children: list[nn.Module], steps: tuple[int | str, ...], result: str
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.steps = steps
        self.result = result

    def forward(self, x):
        h = x
        for step in self.steps:
            if step == "break":
                torch._dynamo.graph_break()
            elif isinstance(step, str):
                h = STEPS[step](h, x)
            else:
                h = self.call(self.parts[step], h)
        return RESULTS[self.result](h, x)

    def call(self, part, h):
        if isinstance(part, Scaled):
            return part(hidden=h, gain=0.5)
        if isinstance(part, Constant):
            return h + part()
        return first_tensor(part(h))


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Children are names of ``LEAVES``, other plans, or numbers into the pool."""

    children: tuple[Any, ...]
    steps: tuple[int | str, ...]
    result: str

    def make(self, pool: list[nn.Module]) -> Block:
        made = [
            pool[child % len(pool)]
            if isinstance(child, int)
            else LEAVES[child]()
            if isinstance(child, str)
            else child.make(pool)
            for child in self.children
        ]
        return Block(made, self.steps, self.result)


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """A root block, and what the pool holds."""

    root: BlockPlan
    pool: tuple[str, ...]

    def build(self) -> Block:
        torch.manual_seed(0)
        return self.root.make([LEAVES[name]() for name in self.pool]).eval()


def _blocks(children: st.SearchStrategy[Any], breaks: bool) -> st.SearchStrategy[Any]:
    @st.composite
    def block(draw: st.DrawFn) -> BlockPlan:
        parts = draw(st.lists(children, min_size=1, max_size=3))
        names = sorted(STEPS) + (["break"] if breaks else [])
        steps: list[int | str] = []
        for child in range(len(parts)):
            steps += draw(st.lists(st.sampled_from(names), max_size=2))
            # Mostly once; sometimes not at all, or again at once.
            steps += [child] * draw(st.sampled_from([1, 1, 1, 2, 0]))
        steps += draw(st.lists(st.sampled_from(names), max_size=2))
        result = draw(st.sampled_from(sorted(RESULTS)))
        return BlockPlan(tuple(parts), tuple(steps), result)

    return block()


def model_plans(*, breaks: bool = False) -> st.SearchStrategy[ModelPlan]:
    """Random model plans; with ``breaks``, some of their blocks break the graph."""
    leaves = st.sampled_from(sorted(LEAVES)) | st.integers(0, 2)
    inner = st.recursive(leaves, lambda c: _blocks(c, breaks), max_leaves=6)
    return st.builds(
        ModelPlan,
        root=_blocks(inner, breaks),
        pool=st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=3).map(
            tuple
        ),
    )


POSITIONS = (
    st.none()
    | st.none()
    | st.lists(st.integers(-6, 6), max_size=4)
    | st.builds(
        slice,
        st.none() | st.integers(-4, 4),
        st.none() | st.integers(-4, 4),
        st.none() | st.sampled_from([1, 2, -1, -2]),
    )
)


@st.composite
def taps_of(draw: st.DrawFn, model: nn.Module) -> dict[str, Tap]:
    """One to three taps that fit a model; all optional, since not all parts run."""
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    classes = sorted({type(m) for m in model.modules()}, key=lambda c: c.__name__)
    callable_classes = [c for c in classes if c is not nn.ModuleList]
    taps = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        target = draw(
            st.sampled_from(paths)
            | st.sampled_from(paths)
            | st.sampled_from(callable_classes)
            | st.sampled_from(["**", "parts.*", "**.parts.*", "re:.*[02]"])
        )
        settings: dict[str, Any] = {"select": draw(POSITIONS)}
        if not _may_be(target, model, Constant):
            point = draw(st.sampled_from(["output", "output", "input", "initial"]))
            if point == "input":
                settings["point"] = "input"
            elif point == "initial":
                settings["initial"] = True
        settings["detach"] = draw(st.booleans())
        taps[name] = Tap(target, optional=True, **settings)
    return taps


def _may_be(target: Any, model: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a target may mean a module of a class; globs mean anything."""
    if isinstance(target, type):
        return issubclass(cls, target)
    table = dict(model.named_modules(remove_duplicate=False))
    if target in table:
        return isinstance(table[target], cls)
    return any(isinstance(m, cls) for m in model.modules())
