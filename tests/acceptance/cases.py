"""Situations in which people lost captures or got wrong ones, as tiny models.

``source`` names the public report that showed the fault; the models and the words are
this project's own.  A case holds everything a front end needs to be tested on it:

    case = BY_ID["dead_side_head"]
    args, kwargs = case.inputs()
    driver = Driver(case.build())          # or Driver(fxcapture.compile(...))
    result = case.run(driver, args, kwargs)
    want = case.expected_records()

Terms
    driver: what a case's ``run`` calls in place of the model.  It gives back the
        model's output alone, whether the model is captured or plain, and keeps the
        records of every call.

A tap says ``optional=True`` where the right answer is "no entry" or "no such position",
which is an error without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fxcapture as fxc
from fxcapture import Tap
from tests.reference import Hits, difference, eager_records

SEED = 20


class Driver:
    """Calls a module, plain or captured; returns outputs, keeps records.

    Attributes:
        module: The module.
        records: The records of each call so far; empty for a plain module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.records: list[fxc.Records] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output(self.module(*args, **kwargs))

    def functional(self, tensors: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A call with other parameters, by ``torch.func.functional_call``."""
        return self._output(
            torch.func.functional_call(self.module, dict(tensors), args, kwargs)
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters by name."""
        return dict(self.module.named_parameters())

    def joined(self, names: Mapping[str, Any]) -> Hits:
        """The records of all calls, one behind the other."""
        return {name: [v for r in self.records for v in r[name]] for name in names}

    def _output(self, result: Any) -> Any:
        if isinstance(result, fxc.Captured):
            self.records.append(result.records)
            return result.output
        return result


Run = Callable[[Driver, tuple[Any, ...], dict[str, Any]], Any]


def one_call(model: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One situation.

    Attributes:
        id: Its name.
        source: The public reports it comes from.
        fault: What went wrong there.
        build: Makes the model; the same weights every time.
        inputs: Makes the arguments; the same values every time, fresh tensors.
        targets: Record name to tap.
        run: How the model is driven; what it returns is compared too.
        grad: Run with gradients recorded.
        expected: Makes the right records where eager hooks cannot see them.
        no_graph: Why ``torch.compile(fullgraph=True)`` refuses the plain model; empty
            if it does not.
        equal: Text of the first difference of two values, empty if equal.
    """

    id: str
    source: str
    fault: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    targets: Mapping[str, Tap]
    run: Run = one_call
    grad: bool = False
    expected: Callable[[Case], Hits] | None = None
    no_graph: str = ""
    equal: Callable[[Any, Any], str] = difference

    @property
    def spec(self) -> fxc.CaptureSpec:
        """The targets as a spec."""
        return fxc.CaptureSpec(self.targets)

    def driven(self, model: nn.Module, run: Run | None = None) -> tuple[Any, Driver]:
        """Drive a model on fresh inputs: what ``run`` returned, and the driver."""
        args, kwargs = self.inputs()
        driver = Driver(model)
        torch.manual_seed(SEED)
        with torch.set_grad_enabled(self.grad):
            return (run or self.run)(driver, args, kwargs), driver

    def expected_records(self) -> Hits:
        """The right records of one run."""
        return self.expected(self) if self.expected else self.hooked_records()

    def hooked_records(self, run: Run | None = None) -> Hits:
        """What copying forward hooks see in one eager run."""
        model = self.build()
        return eager_records(model, self.targets, lambda: self.driven(model, run))[1]


CASES: list[Case] = []


def case(id: str, **fields: Any) -> Callable[[Any], Any]:
    """Make a case of a model class, or of a function that builds the model."""

    def register(make: Callable[[], nn.Module]) -> Any:
        def build() -> nn.Module:
            torch.manual_seed(3)
            return make().eval()

        CASES.append(Case(id=id, build=build, **fields))
        return make

    return register


def floats(*shapes: tuple[int, ...], **named: tuple[int, ...]) -> Callable[[], Any]:
    """Inputs: normally distributed tensors of these shapes."""

    def make() -> Any:
        source = torch.Generator().manual_seed(11)
        return (
            tuple(torch.randn(s, generator=source) for s in shapes),
            {k: torch.randn(s, generator=source) for k, s in named.items()},
        )

    return make


def with_options(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    """The same inputs, and these keyword arguments."""

    def made() -> Any:
        args, kwargs = make()
        return args, kwargs | options

    return made


# --------------------------------------------------------------------------------------
# Parts that several models use
# --------------------------------------------------------------------------------------


def stack_of_linears() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)
    )


class Residual(nn.Module):
    """A pre-norm residual layer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, h):
        return h + torch.tanh(self.mix(self.norm(h)))


class ScaledLinear(nn.Module):
    """Takes its scale as a keyword and nothing else."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, tokens, *, gain=None):
        return self.mix(tokens) * gain


class TwoResults(nn.Module):
    """Returns a tuple; its first element is ready before the second."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, h):
        a = self.first(h)
        return a, torch.sigmoid(self.second(a))


# --------------------------------------------------------------------------------------
# Hooks under compile: the plain job
# --------------------------------------------------------------------------------------


@case(
    "all_linears",
    source="pytorch#96722, pytorch#91665",
    fault="compiled, the model reports some of the layers or none",
    inputs=floats((2, 6)),
    targets={"linears": Tap(nn.Linear)},
)
def _():
    return stack_of_linears()


@case(
    "root_module",
    source="pytorch#117584, pytorch#196819",
    fault="the model's own output is not seen, since its forward is traced directly",
    inputs=floats((2, 6)),
    targets={"whole": Tap(""), "start": Tap("0")},
)
def _():
    return stack_of_linears()


class FixedAffine(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("gain", torch.rand(channels, 1, 1) + 1)
        self.register_buffer("offset", torch.randn(channels, 1, 1))

    def forward(self, image):
        return image * self.gain + self.offset


@case(
    "custom_leaf_inlined",
    source="vision#5508, pytorch#45683",
    fault="a layer of the user's own is dissolved into its operations",
    inputs=floats((2, 3, 5, 5)),
    targets={"affine": Tap("affine"), "by_class": Tap(FixedAffine)},
)
class ConvThenAffine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        self.affine = FixedAffine(5)

    def forward(self, image):
        return F.gelu(self.affine(self.conv(image)))


# --------------------------------------------------------------------------------------
# Values that something writes to, or that alias something
# --------------------------------------------------------------------------------------


@case(
    "conv_then_inplace_relu",
    source="captum#156, thingsvision#44, bdpy#16",
    fault="the record of a convolution shows what an in-place ReLU made of it",
    inputs=floats((2, 2, 4, 4)),
    targets={"conv": Tap("0"), "relu": Tap("1"), "second": Tap("2")},
)
def _():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class WritesItsInput(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.clip = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(channels, channels, 1)
        self.up = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, image):
        image = self.clip(image)
        out = self.up(self.down(image))
        out += image
        return out


@case(
    "preact_block_overwrites_previous",
    source="pytorch#95617, captum#165",
    fault="a block's first operation writes into what the block before it returned",
    inputs=floats((1, 3, 4, 4)),
    targets={
        "blocks": Tap(WritesItsInput),
        "up": Tap("1.up"),
        "stem": Tap("0"),
    },
)
def _():
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), WritesItsInput(3), WritesItsInput(3), nn.ReLU(inplace=True)
    )


@case(
    "eval_dropout_is_alias",
    source="pytorch#195422",
    fault="in eval mode dropout returns its argument, which is then written to",
    inputs=floats((3, 6)),
    targets={"mix": Tap("mix"), "drop": Tap("drop")},
)
class DropoutThenWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, h):
        h = self.drop(self.mix(h))
        h.neg_()
        h += 0.5
        return h


@case(
    "identity_module",
    source="pytorch#195568, pytorch#9160",
    fault="a module without any operation has no node that could be taken",
    inputs=floats((3, 6)),
    targets={"mix": Tap("mix"), "same": Tap("same"), "empty": Tap("empty")},
)
class ThroughIdentities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.same = nn.Identity()
        self.empty = nn.Sequential()
        self.out = nn.Linear(6, 2)

    def forward(self, h):
        return self.out(self.empty(self.same(self.mix(h))))


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, width))

    def forward(self):
        return self.rows


@case(
    "returns_parameter",
    source="pytorch#167848",
    fault="a module without arguments hands out its own parameter",
    inputs=floats((2, 3, 6)),
    targets={"table": Tap("table")},
)
class AddsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(3, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, h):
        return self.mix(h + self.table())


def _overwrite_output(model: Driver, args: Any, kwargs: Any) -> Any:
    out = model(*args, **kwargs)
    before = out.clone()
    out.fill_(7.0)
    return before


@case(
    "captured_is_model_output",
    source="onnxruntime#3141, pytorch#66137",
    fault="record and output are one tensor, and the caller writes to the output",
    inputs=floats((3, 6)),
    targets={"norm": Tap("norm"), "mix": Tap("mix")},
    run=_overwrite_output,
)
class EndsInNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, h):
        return self.norm(self.mix(h))


class TwoScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, image):
        fine = self.conv(image)
        return [fine, F.avg_pool2d(fine, 2)]


@case(
    "list_output_then_edited",
    source="MemOS#2301, torchdynamo#329",
    fault="the caller edits the list that a module returned",
    inputs=floats((1, 2, 4, 4)),
    targets={"scales": Tap("scales"), "coarse": Tap("scales", output=1)},
)
class EditsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = TwoScales()

    def forward(self, image):
        levels = self.scales(image)
        levels[1] = levels[1] + 1
        levels.insert(0, levels.pop().sum())
        levels.append(levels[1].amax())
        return levels[0] * levels[1] - levels[2]


# --------------------------------------------------------------------------------------
# Which node of a graph is a module's output
# --------------------------------------------------------------------------------------


class KeepsStatistics(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("power", torch.zeros(()))

    def forward(self, h):
        h = self.mix(h)
        self.power.copy_((h * h).mean())
        return h


@case(
    "output_is_not_last_op",
    source="vision#4302, pytorch#110115",
    fault="a module's last operation is bookkeeping and not its result",
    inputs=floats((3, 6)),
    targets={"body": Tap("body"), "by_class": Tap(KeepsStatistics)},
)
class ReadsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = KeepsStatistics()
        self.out = nn.Linear(6, 2)

    def forward(self, h):
        return self.out(self.body(h)) / (1 + self.body.power)


@case(
    "dead_side_head",
    source="pytorch#169141, torchtitan#3539",
    fault="a module is called and its result dropped",
    inputs=floats((3, 6)),
    targets={"side": Tap("side"), "body": Tap("body")},
)
class UnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.side = nn.Linear(6, 2)

    def forward(self, h):
        h = self.body(h)
        self.side(h)
        return h


# --------------------------------------------------------------------------------------
# How often a module is called, and under which name
# --------------------------------------------------------------------------------------


@case(
    "one_relu_two_calls",
    source="CLIP#239, captum#578, nni#2485",
    fault="an activation used twice keeps its last value only",
    inputs=floats((3, 6)),
    targets={"every": Tap("act"), "latest": Tap("act", select=-1)},
)
class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.SiLU()

    def forward(self, h):
        return self.act(self.upper(self.act(self.lower(h))))


class MixAndBend(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, h):
        return torch.sin(self.mix(h))


@case(
    "back_to_back_calls",
    source="pytorch#132993, pytorch#137457",
    fault="calls of one module with nothing between them are taken for one",
    inputs=floats((3, 6)),
    targets={"cell": Tap("cell"), "inside": Tap("cell.mix")},
)
class ThreeInARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = MixAndBend()

    def forward(self, h):
        return self.cell(self.cell(self.cell(h)))


@case(
    "one_module_two_names",
    source="pytorch#139438, pytorch#195568, pytorch#179278",
    fault="one object under two names: a shared module is one module, both calls count",
    inputs=floats((3, 6)),
    targets={
        "left": Tap("left"),
        "right": Tap("right"),
        "by_class": Tap(nn.Linear),
    },
)
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = self.left

    def forward(self, h):
        return self.right(F.relu(self.left(h)))


@case(
    "albert_shared_layer",
    source="s3prl#333, VeOmni#933",
    fault="one layer applied many times gives as many hidden states",
    inputs=floats((2, 3, 6)),
    targets={
        "states": Tap("layer"),
        "some": Tap(Residual, output=0, select=[0, -2]),
    },
)
class OneLayerManyTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Residual()

    def forward(self, h):
        for _ in range(5):
            h = self.layer(h)
        return h


@case(
    "same_layer_repeated_in_list",
    source="pytorch#179278, ColossalAI#2033",
    fault="a list that holds one layer twice",
    inputs=floats((3, 6)),
    targets={"third": Tap("stages.2"), "second": Tap("stages.1")},
)
class RepeatsALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        outer, inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.stages = nn.ModuleList([outer, inner, outer])

    def forward(self, h):
        for stage in self.stages:
            h = F.elu(stage(h))
        return h


@case(
    "tied_weights_two_modules",
    source="mct-model-optimization#1217, pytorch#81296",
    fault="modules that share a parameter are taken for one module",
    inputs=lambda: ((torch.tensor([[4, 0, 2, 5]]),), {}),
    targets={"tokens": Tap("tokens"), "logits": Tap("logits"), "mid": Tap("mid")},
)
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 6)
        self.mid = nn.Linear(6, 6, bias=False)
        self.logits = nn.Linear(6, 6, bias=False)
        self.logits.weight = self.mid.weight = self.tokens.weight

    def forward(self, ids):
        return self.logits(F.relu(self.mid(self.tokens(ids))))


class Lookup(nn.Module):
    def forward(self, query, memory):
        weights = F.softmax(query @ memory.mT, dim=-1)
        return weights @ memory, weights


@case(
    "decoder_step_loop",
    source="espnet#1644, TransformerLens#697",
    fault="attention called once for each decoding step keeps a single step",
    inputs=floats((2, 1, 6), (2, 4, 6)),
    targets={
        "weights": Tap("lookup", output=1),
        "final_two": Tap("lookup", output=1, select=[-1, -2]),
    },
)
class StepByStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.update = nn.Linear(6, 6)
        self.lookup = Lookup()

    def forward(self, query, memory):
        for _ in range(3):
            found, _weights = self.lookup(query, memory)
            query = torch.tanh(self.update(query + found))
        return query


@case(
    "loop_count_kwarg",
    source="pytorch#44851, vision#6817",
    fault="an int argument says how often a module is called",
    inputs=with_options(floats((3, 6)), rounds=4),
    targets={"cell": Tap("cell")},
)
class Rounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, h, rounds=1):
        for _ in range(rounds):
            h = torch.cos(self.cell(h))
        return h


@case(
    "loop_over_time_axis",
    source="pytorch#44851, pytorch#58302",
    fault="a dimension of the input says how often a module is called",
    inputs=floats((2, 4, 6)),
    targets={"cell": Tap("cell"), "latest": Tap("cell", select=[-1])},
)
class OverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)

    def forward(self, frames):
        state = frames.new_zeros(frames.shape[0], 5)
        for frame in frames.unbind(1):
            state = self.cell(frame, state)
        return state


@case(
    "while_on_value",
    source="pytorch#99598, torchdynamo#330",
    fault="values say how often a module is called, so no one graph exists",
    inputs=floats((3, 6)),
    targets={"halve": Tap("halve"), "latest": Tap("halve", select=[-1])},
    no_graph="a loop that asks a tensor when to stop",
)
class UntilSmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halve = nn.Linear(6, 6, bias=False)
        nn.init.eye_(self.halve.weight).data.mul_(0.5)

    def forward(self, h):
        while h.abs().max() > 0.25:
            h = self.halve(h)
        return h


@case(
    "branch_on_value",
    source="pytorch#54602, torchdynamo#115",
    fault="values decide which of two modules runs",
    inputs=lambda: ((torch.full((3, 6), 0.5),), {}),
    targets={"above": Tap("above"), "below": Tap("below", optional=True)},
    no_graph="a branch that asks a tensor",
)
class EitherOr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h):
        if h.mean() > 0:
            return self.above(h)
        return self.below(h)


@case(
    "branch_on_flag",
    source="vision#6817, transformers#31200",
    fault="a boolean argument decides whether a module runs",
    inputs=with_options(floats((3, 6)), with_side=False),
    targets={"side": Tap("side", optional=True), "body": Tap("body")},
)
class OptionalSide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h, with_side=True):
        out = self.body(h)
        if with_side:
            out = out + self.side(h)
        return out


@case(
    "train_only_head",
    source="vision#4302, timm#800, vision#8634",
    fault="a head that runs in training mode only: the two modes have two graphs",
    inputs=floats((3, 6)),
    targets={"side": Tap("side", optional=True), "drop": Tap("drop")},
)
class TrainingHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.4)
        self.side = nn.Linear(6, 3)

    def forward(self, h):
        h = self.drop(self.body(h))
        return (h, self.side(h)) if self.training else h


class Nested(nn.Module):
    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.inside = inside

    def forward(self, h):
        h = self.mix(h)
        return torch.tanh(h) if self.inside is None else h - self.inside(h)


@case(
    "block_inside_block",
    source="transformers#44638, nnterp#55",
    fault="a class matches a module and one inside it",
    inputs=floats((3, 6)),
    targets={"every": Tap(Nested), "outer": Tap("0")},
)
def _():
    return nn.Sequential(Nested(Nested()), Nested())


class NamedLinear(nn.Linear):
    pass


class SameMathsOtherClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, h):
        return h @ self.weight.T


@case(
    "class_target_and_subclass",
    source="transformers#47117",
    fault="a layer was swapped for a subclass (counts) or a look-alike (does not)",
    inputs=floats((3, 6)),
    targets={"linears": Tap(nn.Linear)},
)
def _():
    return nn.Sequential(nn.Linear(6, 6), NamedLinear(6, 6), SameMathsOtherClass())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h, other=None):
        other = h if other is None else other
        weights = (self.query(h) @ self.key(other).mT).softmax(-1)
        return weights @ other, weights


class TwoAttentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.cross_attn = Attends(), Attends()

    def forward(self, h, memory):
        h = h + self.attn(h)[0]
        return h + self.cross_attn(h, memory)[0]


@case(
    "self_vs_cross_attention",
    source="transformers#47117",
    fault="two attentions of one class, told apart by their name's last part",
    inputs=floats((1, 3, 6), (1, 4, 6)),
    targets={
        "own": Tap(Attends, output=1, layer_name="attn"),
        "cross": Tap(Attends, output=1, layer_name="cross_attn"),
        "cross_latest": Tap(Attends, output=1, layer_name="cross_attn", select=-1),
    },
)
class TwoKindsOfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoAttentions(), TwoAttentions()])

    def forward(self, h, memory):
        for block in self.blocks:
            h = block(h, memory)
        return h


@case(
    "name_is_prefix_of_other",
    source="vision#4302, peft#2144",
    fault="the path of layer 1 is the beginning of that of layer 11",
    inputs=floats((3, 6)),
    targets={"one": Tap("layers.1"), "eleven": Tap("layers.11")},
)
class TwelveLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(12)])

    def forward(self, h):
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


@case(
    "container_never_called",
    source="torchdistill#139, grad-cam-pytorch#7",
    fault="a list of modules is named, and a list is never called",
    inputs=floats((3, 6)),
    targets={"list": Tap("parts", optional=True), "first": Tap("parts.0")},
)
class ListOfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, h):
        for part in self.parts:
            h = F.relu(part(h))
        return h


@case(
    "module_list_slice",
    source="transformers#34103, pytorch#141939",
    fault="forward runs a slice of its list; what stands outside it is not called",
    inputs=floats((3, 6)),
    targets={
        "inside": Tap("layers.1"),
        "outside": Tap("layers.3", optional=True),
        "every": Tap(nn.Linear, optional=True),
    },
)
class MiddleLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, h):
        for layer in self.layers[1:3]:
            h = F.relu(layer(h))
        return h


@case(
    "nested_module_lists",
    source="pytorch#141939",
    fault="lists of lists: the containers between have no call of their own",
    inputs=floats((3, 6)),
    targets={"deep": Tap("groups.1.0"), "deeper": Tap("groups.0.1.mix")},
)
class GroupsOfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            [nn.ModuleList([Residual(), Residual()]) for _ in range(2)]
        )

    def forward(self, h):
        for group in self.groups:
            for layer in group:
                h = layer(h)
        return h


class CallsForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Residual()

    def forward(self, h):
        return h * 0.5 + self.body.forward(h)


def _direct_call_counts(case: Case) -> Hits:
    model = case.build()
    (h,), _ = case.inputs()
    seen: Hits = {"body": [], "mix": [], "layer": []}
    with torch.no_grad():
        for i, layer in enumerate(model):
            normed = layer.body.norm(h)
            mixed = layer.body.mix(normed)
            body = h + torch.tanh(mixed)
            if i == 0:
                seen["mix"].append(mixed)
                seen["body"].append(body)
            h = h * 0.5 + body
            if i == 0:
                seen["layer"].append(h)
    return seen


@case(
    "forward_called_directly",
    source="llama#1055, mistral-inference#246, executorch#16456",
    fault="a parent calls child.forward(); hooks do not see that, and it is a call",
    inputs=floats((3, 6)),
    targets={"body": Tap("0.body"), "mix": Tap("0.body.mix"), "layer": Tap("0")},
    expected=_direct_call_counts,
)
def _():
    return nn.Sequential(CallsForward(), CallsForward())


@case(
    "called_with_keywords_only",
    source="pytorch#156695, pytorch#35643, transformers#29247",
    fault="called with keywords alone, a module has no positional input to record",
    inputs=floats((3, 6), gain=(3, 1)),
    targets={
        "out": Tap("layers.1"),
        "received": Tap("layers.1", output=0, point="input"),
        "received_by_name": Tap("layers.1", output="tokens", point="input"),
        "gain": Tap("layers.0", output="gain", point="input"),
    },
)
class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ScaledLinear(), ScaledLinear()])

    def forward(self, h, gain):
        for layer in self.layers:
            h = layer(gain=gain, tokens=h)
        return h


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, *parts):
        return self.mix(parts[-1]) * parts[0]


@case(
    "star_args_unpack",
    source="pytorch#64497, pytorch#58302",
    fault="a module's tuple is spread over the next module's arguments",
    inputs=floats((3, 6)),
    targets={
        "pair": Tap("split"),
        "second": Tap("split", output=1),
        "join": Tap("join"),
    },
)
class SplitAndJoin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = TwoResults(), Joins()

    def forward(self, h):
        return self.join(*self.split(h))


@case(
    "chunk_and_extend",
    source="apex#1843",
    fault="forward grows a list inside a generator",
    inputs=floats((1, 3, 4, 4)),
    targets={
        "first": Tap("bottlenecks.0"),
        "second": Tap("bottlenecks.1"),
        "widen": Tap("widen"),
    },
)
class GrowsAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(3, 6, 1)
        self.narrow = nn.Conv2d(12, 3, 1)
        self.bottlenecks = nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(2)])

    def forward(self, image):
        parts = [*torch.chunk(self.widen(image), 2, dim=1)]
        parts.extend(step(parts[-1]) for step in self.bottlenecks)
        return self.narrow(torch.cat(parts, dim=1))


def opaque_to_fx(module, h):
    return torch.square(module(h))


torch.fx.wrap("opaque_to_fx")


@case(
    "module_called_in_wrapped_function",
    source="mmrazor#621, TensorRT#1871, vision#4302",
    fault="a module is called inside a function that torch.fx does not enter",
    inputs=floats((3, 6)),
    targets={"inside": Tap("inside"), "after": Tap("after")},
)
class CalledInHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h):
        return self.after(opaque_to_fx(self.inside, h))


@case(
    "module_built_in_forward",
    source="captum#1082, pytorch#125725",
    fault="a module made inside forward is no part of the model",
    inputs=floats((3, 6)),
    targets={"act": Tap(nn.Sigmoid, optional=True), "linears": Tap(nn.Linear)},
)
class MakesActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, h):
        return self.out(nn.Sigmoid()(self.mix(h)))


@case(
    "shape_check_in_forward",
    source="timm#1176, timm#800",
    fault="forward looks at a shape before it runs",
    inputs=floats((3, 6)),
    targets={"mix": Tap("mix")},
)
class ChecksShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, h):
        rows, width = h.shape
        if width != self.mix.in_features or rows < 1:
            raise ValueError(f"wrong shape {h.shape}")
        return self.mix(h)


# --------------------------------------------------------------------------------------
# Positions
# --------------------------------------------------------------------------------------


@case(
    "hidden_states_selected",
    source="transformers#48081, transformers#48825, TorchSpec#87, sglang#38307",
    fault="positions shift, or what was not asked for stays alive",
    inputs=lambda: ((torch.tensor([[7, 1, 4]]),), {}),
    targets={
        "states": Tap(Residual, output=0, select=[0, -2]),
        "last": Tap(Residual, output=0, select=[3]),
        "absent": Tap(Residual, output=0, select=[99], optional=True),
        "tokens": Tap("tokens"),
    },
)
class SmallEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 6)
        self.layers = nn.ModuleList([Residual() for _ in range(4)])
        self.norm = nn.LayerNorm(6)

    def forward(self, ids):
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


# --------------------------------------------------------------------------------------
# What a module returns
# --------------------------------------------------------------------------------------


class ReturnsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h):
        return {
            "signal": self.left(h),
            "gate": torch.sigmoid(self.right(h)),
            "version": 2,
        }


@case(
    "dict_output",
    source="braindecode#1138, pytorch#45682",
    fault="a module returns a dict",
    inputs=floats((3, 6)),
    targets={"all": Tap("part"), "gate": Tap("part", output="gate")},
)
class UsesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = ReturnsDict()

    def forward(self, h):
        found = self.part(h)
        return found["gate"] * found["signal"]


@dataclasses.dataclass
class Encoded:
    tokens: torch.Tensor
    summary: torch.Tensor | None = None
    rest: tuple[Any, ...] | None = None


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, h):
        h = self.mix(h)
        return Encoded(tokens=h, rest=(h.amax(), None))


@case(
    "dataclass_output",
    source="pytorch#54913, transformers#28222, mmrazor#621",
    fault="a module returns a dataclass that pytree does not know",
    inputs=floats((3, 6)),
    targets={"all": Tap("part"), "tokens": Tap("part", output="tokens")},
)
class UsesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = ReturnsDataclass()

    def forward(self, h):
        found = self.part(h)
        return found.tokens - found.rest[0]


class Largest(nn.Module):
    def forward(self, h):
        return torch.topk(h, 3)


@case(
    "topk_return_type",
    source="pytorch#42741",
    fault="a module returns torch.return_types.topk, one element of it integers",
    inputs=floats((3, 6)),
    targets={
        "indices": Tap("largest", output=1),
        "values": Tap("largest", output=0),
        "both": Tap("largest"),
    },
    grad=True,
)
class UsesTopK(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.largest = nn.Linear(6, 6), Largest()

    def forward(self, h):
        values, indices = self.largest(self.mix(h))
        return values.mean() - indices.to(values.dtype).sum()


class OnlyChecks(nn.Module):
    def forward(self, h):
        torch._assert(h.ndim == 2, "rows and columns")


@case(
    "returns_none",
    source="braindecode#1138, captum#1845",
    fault="a call that returns None is an entry, unlike a call that did not happen",
    inputs=floats((3, 6)),
    targets={"check": Tap("check"), "mix": Tap("mix")},
)
class ChecksFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.check, self.mix = OnlyChecks(), nn.Linear(6, 6)

    def forward(self, h):
        self.check(h)
        return self.mix(h)


class ReturnsMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, h):
        h = self.mix(h)
        return h, h.shape[1], "kept", [(h.var(), None), h.sum()]


@case(
    "mixed_python_outputs",
    source="captum#1845, pytorch#108640",
    fault="tensors, numbers, text and containers in one output",
    inputs=floats((3, 6)),
    targets={
        "all": Tap("part"),
        "width": Tap("part", output=1),
        "nested": Tap("part", output=3),
    },
)
class UsesMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = ReturnsMixture()

    def forward(self, h):
        h, width, _text, nested = self.part(h)
        return h * width - nested[0][0]


class ReturnsShape(nn.Module):
    def forward(self, h):
        return h.shape


@case(
    "returns_size",
    source="pytorch#92812, pytorch#132930",
    fault="a module returns a torch.Size, whose numbers may be symbolic",
    inputs=floats((3, 6)),
    targets={"shape": Tap("shape")},
)
class UsesShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shape, self.mix = ReturnsShape(), nn.Linear(6, 6)

    def forward(self, h):
        rows, width = self.shape(h)
        return self.mix(h).view(width * rows)


class Positives(nn.Module):
    def forward(self, h):
        return torch.masked_select(h, h > 0)


@case(
    "value_dependent_shape",
    source="nnsight#467, pytorch#124686",
    fault="the shape of the value depends on values",
    inputs=floats((3, 6)),
    targets={"kept": Tap("kept")},
)
class KeepsPositives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.kept = nn.Linear(6, 6), Positives()

    def forward(self, h):
        return self.kept(self.mix(h)).mean()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 4)

    def forward(self, tokens):
        scores = self.score(tokens)
        return scores, torch.argmax(scores, dim=-1)


@case(
    "moe_dispatch",
    source="nnsight#467, vllm#28284, VeOmni#933",
    fault="experts see as many tokens as were sent to them, or are not called at all",
    inputs=floats((7, 6)),
    targets={
        "scores": Tap("gate", output=0),
        "chosen": Tap("gate", output=1),
        "experts": Tap(ScaledLinear, optional=True),
        "idle": Tap("experts.2", optional=True),
    },
    no_graph="experts are skipped where no token was sent to them",
)
class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList([ScaledLinear() for _ in range(4)])
        self.gate.score.bias.data[2] = -1e3

    def forward(self, tokens):
        chosen = self.gate(tokens)[1]
        out = tokens.clone()
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number)[:, 0]
            if len(mine):
                out[mine] = expert(tokens[mine], gain=2.0)
        return out


# --------------------------------------------------------------------------------------
# Attention of torch.nn
# --------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, h):
        mixed, _ = self.attention(h, h, h, need_weights=self.need_weights)
        return h - mixed


_ATTENTION = {
    "mixed": Tap("attention", output=0),
    "weights": Tap("attention", output=1),
}


@case(
    "mha_with_weights",
    source="pytorch#34537, pytorch#18334",
    fault="attention weights that the model computes and drops",
    inputs=floats((2, 4, 6)),
    targets=_ATTENTION,
    grad=True,
)
def _():
    return SelfAttention(need_weights=True)


@case(
    "mha_fast_path",
    source="pytorch#78109, pytorch#109528",
    fault="without gradients one fused kernel computes the whole attention",
    inputs=floats((2, 4, 6)),
    targets=_ATTENTION,
)
def _():
    return SelfAttention(need_weights=True)


@case(
    "mha_no_weights",
    source="RT-DETR#680, pytorch#109528",
    fault="an element of the output is None and keeps its position",
    inputs=floats((2, 4, 6)),
    targets=_ATTENTION,
)
def _():
    return SelfAttention(need_weights=False)


@case(
    "mha_out_proj",
    source="pytorch#78109, peft#1324",
    fault="a submodule that holds weights and is never called",
    inputs=floats((2, 4, 6)),
    targets={"projection": Tap("attention.out_proj", optional=True)},
)
def _():
    return SelfAttention(need_weights=True)


@case(
    "encoder_layer_fast_path",
    source="pytorch#128413, pytorch#132700",
    fault="a fused kernel for inference calls none of the layer's submodules",
    inputs=floats((2, 4, 12)),
    targets={
        "attention": Tap("self_attn", output=0),
        "widen": Tap("linear1"),
        "norm": Tap("norm2"),
    },
)
def _():
    return nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)


def _without_padding(model: Driver, args: Any, kwargs: Any) -> Any:
    out = model(*args, **kwargs)
    lengths = (~kwargs["src_key_padding_mask"]).sum(1).tolist()
    return [row[:n] for row, n in zip(out, lengths, strict=True)]


def _rows_differ(want: Any, got: Any) -> str:
    """Compare each row up to its own length: padding carries no meaning."""

    def dense(value: Any, like: Any) -> Any:
        if isinstance(like, torch.Tensor) and like.is_nested and not value.is_nested:
            return [v[: len(row)] for v, row in zip(value, like.unbind(), strict=True)]
        if isinstance(value, torch.Tensor):
            return list(value.unbind())
        if isinstance(value, dict):
            return {k: dense(v, like[k]) for k, v in value.items()}
        return [dense(v, entry) for v, entry in zip(value, like, strict=True)]

    return difference(dense(want, want), dense(got, want), 1e-5)


@case(
    "encoder_padding_mask",
    source="pytorch#82919, pytorch#106668",
    fault="with a padding mask the encoder works on nested tensors inside",
    inputs=with_options(
        floats((2, 4, 12)),
        src_key_padding_mask=torch.tensor([[False] * 4, [False, False, True, True]]),
    ),
    targets={
        "lower": Tap("layers.0"),
        "upper": Tap("layers.1"),
        "attention": Tap("layers.1.self_attn", output=0),
    },
    run=_without_padding,
    equal=_rows_differ,
)
def _():
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


# --------------------------------------------------------------------------------------
# Wrappers and replaced parts
# --------------------------------------------------------------------------------------


@case(
    "compiled_root",
    source="eole#179, nanoGPT#325, pytorch#101107",
    fault="the model is compiled already, and its paths have a prefix",
    inputs=floats((3, 6)),
    targets={
        "middle": Tap("2"),
        "acts": Tap(nn.ReLU),
    },
)
def _():
    return torch.compile(stack_of_linears(), backend="eager")


@case(
    "data_parallel_prefix",
    source="MQBench#230, sagemaker-debugger#393, train-llm-from-scratch#37",
    fault="a wrapper puts its attribute's name in front of every path",
    inputs=floats((3, 6)),
    targets={"middle": Tap("2")},
)
def _():
    return nn.DataParallel(stack_of_linears())


@case(
    "checkpoint_wrapper",
    source="pytorch#117399, xtuner#1452, torchtitan#3104",
    fault="a checkpointed block: hooks inside are a side effect that is not allowed",
    inputs=floats((3, 6)),
    targets={"block": Tap("1"), "inside": Tap("1.mix")},
    grad=True,
)
def _():
    return nn.Sequential(
        nn.Linear(6, 6), checkpoint_wrapper(Residual()), nn.Linear(6, 6)
    )


def _call_and_backward(model: Driver, args: Any, kwargs: Any) -> Any:
    out = model(*args, **kwargs)
    out.square().sum().backward()
    return out


@case(
    "checkpoint_backward_recompute",
    source="pytorch#81296, pytorch#134310, opacus#176",
    fault="backward runs the block again, and the hooks with it",
    inputs=floats((3, 6)),
    targets={"blocks": Tap(Residual), "inside": Tap("layers.0.mix")},
    grad=True,
    run=_call_and_backward,
    expected=lambda case: case.hooked_records(one_call),
)
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])

    def forward(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return h


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.ModuleDict({"first": nn.Linear(base.in_features, 2)})
        self.up = nn.ModuleDict({"first": nn.Linear(2, base.out_features)})

    def forward(self, h):
        extra = self.up["first"](self.down["first"](h))
        return self.base_layer(h) + 0.5 * extra


class Forwards(nn.Module):
    """A shell around a model, which may have any name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, *args, **kwargs):
        return getattr(self, self.name)(*args, **kwargs)


@case(
    "adapter_wrapped_linear",
    source="peft#3110, peft#1424, peft#2144",
    fault="an adapter renames paths and puts three linears where one was",
    inputs=floats((3, 6)),
    targets={
        "adapted": Tap("base_model.model.0"),
        "base": Tap("base_model.model.0.base_layer"),
        "linears": Tap(nn.Linear),
    },
)
def _():
    layers = nn.Sequential(Adapted(nn.Linear(6, 6)), Adapted(nn.Linear(6, 6)))
    return Forwards("base_model", Forwards("model", layers))


@case(
    "instance_forward_replaced",
    source="diffusers#14135, nncf#3310",
    fault="a library gave one instance a forward of its own",
    inputs=floats((3, 6)),
    targets={"replaced": Tap("0"), "linears": Tap(nn.Linear)},
)
def _():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    original = model[0].forward
    model[0].forward = lambda h: original(h.neg()) * 3.0
    return model


def _scale_up(module, args, output):
    return output * 3 - 1


@case(
    "user_hook_replaces_output",
    source="pytorch#121695, pytorch#1926",
    fault="a forward hook of the user's returns another output, which is what counts",
    inputs=floats((3, 6)),
    targets={"hooked": Tap("0"), "next": Tap("1")},
)
def _():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].register_forward_hook(_scale_up)
    return model


def _shift_input(module, args):
    return (args[0] + 0.25,)


@case(
    "user_pre_hook_changes_input",
    source="pytorch#117584, pytorch#167329, pytorch#123979",
    fault="a forward pre-hook of the user's changes what a module receives",
    inputs=floats((3, 6)),
    targets={
        "hooked": Tap("0"),
        "received": Tap("0", point="input"),
        "whole": Tap(""),
    },
)
def _():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].register_forward_pre_hook(_shift_input)
    return model


def _scripted_values(case: Case) -> Hits:
    # torch refuses hooks on a scripted module.
    model = case.build()
    (h,), _ = case.inputs()
    with torch.no_grad():
        body = model.body(h)
        return {"body": [body], "inside": [], "out": [model.out(body)]}


@case(
    "scripted_child",
    source="pytorch#34329, pytorch#86818",
    fault="a scripted child: its value can be read, its insides cannot",
    inputs=floats((3, 6)),
    targets={
        "body": Tap("body"),
        "inside": Tap("body.0", optional=True),
        "out": Tap("out"),
    },
    expected=_scripted_values,
    no_graph="Dynamo refuses scripted modules",
)
class ScriptedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.body = torch.jit.script(body.eval())
        self.out = nn.Linear(6, 2)

    def forward(self, h):
        return self.out(self.body(h))


@case(
    "dynamic_quantized_linear",
    source="pytorch#37151, pytorch#37233",
    fault="quantisation put modules with packed weights in the place of linears",
    inputs=floats((3, 6)),
    targets={"first": Tap("0"), "act": Tap("1")},
    no_graph="packed weights are no tensors",
)
def _():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


# --------------------------------------------------------------------------------------
# Regions, randomness, state
# --------------------------------------------------------------------------------------


def _under_autocast(model: Driver, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*args, **kwargs)


@case(
    "outer_autocast",
    source="pytorch#42358, V2V4Real#30",
    fault="under autocast the dtype changes from layer to layer",
    inputs=floats((3, 6)),
    targets={"norm": Tap("norm"), "mix": Tap("mix"), "whole": Tap("")},
    run=_under_autocast,
)
class MixNormOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.out = nn.Linear(6, 2)

    def forward(self, h):
        return self.out(self.norm(self.mix(h)).softmax(dim=1))


@case(
    "frozen_no_grad_backbone",
    source="pytorch#112231, opacus#176",
    fault="the target runs under no_grad inside a graph that has gradients",
    inputs=floats((3, 6)),
    targets={
        "backbone": Tap("backbone"),
        "inside": Tap("backbone.mix"),
        "out": Tap("out"),
    },
    grad=True,
)
class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.out = Residual(), nn.Linear(6, 2)

    def forward(self, h):
        with torch.no_grad():
            h = self.backbone(h)
        return self.out(h)


class AlwaysDrops(nn.Module):
    def forward(self, h):
        return F.dropout(h, p=0.4, training=True)


@case(
    "dropout_on_in_eval",
    source="pytorch#158643, pytorch#101154",
    fault="capture must not move the random stream",
    inputs=floats((4, 10)),
    targets={"lower": Tap("1"), "mix": Tap("2"), "upper": Tap("3")},
)
def _():
    return nn.Sequential(
        nn.Linear(10, 10), AlwaysDrops(), nn.Linear(10, 10), AlwaysDrops()
    )


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.latest = None

    def forward(self, h):
        self.latest = self.mix(h)
        return torch.tanh(self.latest)


@case(
    "module_stores_activation",
    source="pytorch#155114, TICO#129",
    fault="a module keeps an activation in an attribute of its own",
    inputs=floats((3, 6)),
    targets={"part": Tap("part"), "mix": Tap("part.mix")},
)
class UsesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Remembers()

    def forward(self, h):
        return self.part(h) * self.part.latest


# --------------------------------------------------------------------------------------
# Many calls, and functional transforms
# --------------------------------------------------------------------------------------


def _many_lengths(model: Driver, args: Any, kwargs: Any) -> Any:
    return [model(args[0][:, :n]) for n in (4, 2, 6, 10, 3, 9, 5, 8, 7)]


@case(
    "many_sequence_lengths",
    source="pytorch#142507, pytorch#186537",
    fault="another length with each call: a record frozen to the first shape",
    inputs=floats((1, 10, 6)),
    targets={"states": Tap(Residual, output=0)},
    run=_many_lengths,
)
def _():
    return nn.Sequential(Residual(), Residual())


def _gradient_of_parameters(model: Driver, args: Any, kwargs: Any) -> Any:
    def loss(parameters: Any) -> torch.Tensor:
        return model.functional(parameters, *args).square().mean()

    return torch.func.grad(loss)(model.parameters())


@case(
    "func_grad_over_params",
    source="pytorch#126882, pytorch#141845, functorch#1124",
    fault="inside torch.func.grad a value is a wrapper that is dead afterwards",
    inputs=floats((3, 6)),
    targets={"mix": Tap("0"), "act": Tap("1")},
    grad=True,
    run=_gradient_of_parameters,
    expected=lambda case: case.hooked_records(one_call),
    no_graph="a compiled function cannot be called inside torch.func.grad",
)
def _():
    return nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 2))


def _other_parameters(model: Driver, args: Any, kwargs: Any) -> Any:
    shifted = {k: p.detach() - 0.1 for k, p in model.parameters().items()}
    return model.functional(shifted, *args)


@case(
    "functional_call_swapped_params",
    source="functorch#488, pytorch#146036",
    fault="functional_call with other parameters: the values must be of those",
    inputs=floats((3, 6)),
    targets={"first": Tap("0"), "last": Tap("2")},
    run=_other_parameters,
)
def _():
    return nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 2))


BY_ID = {case.id: case for case in CASES}
