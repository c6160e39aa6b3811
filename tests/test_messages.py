"""What a user reads when something is wrong: the text is part of the interface.

Each message quotes what was asked for, says why it cannot be, lists what comes close,
and says what to do.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import CaptureSpec, Tap
from fxcapture.errors import (
    AmbiguousTargetError,
    CaptureError,
    EagerSiteError,
    ElementError,
    FxCaptureError,
    NeverCalledError,
    RecordNameError,
    SelectionError,
    SpecError,
    SpecTypeError,
    TargetError,
    TargetNotFoundError,
    TraceError,
    UnsupportedOutputError,
)
from fxcapture.testing import eager_reference
from tests.models import WIDTH, Attention, Encoder, encoder, ids, mlp, rows
from tests.reference import footprint


def failure_of(
    expected: type[FxCaptureError], model: nn.Module, spec: object, *args: object
) -> FxCaptureError:
    """The error that compiling, or else the first call, raises."""
    before = footprint(model)
    with pytest.raises(expected) as caught:
        fxc.compile(model, spec, backend="eager", fullgraph=True)(*args)
    assert footprint(model) == before
    assert type(caught.value) is expected
    return caught.value


def says(error: FxCaptureError, *parts: str) -> None:
    """Every part is in the text, which has the remedy as its last line."""
    text = str(error)
    for part in parts:
        assert part in text
    assert error.remedy
    assert text.splitlines()[-1] == f"  what to do: {error.remedy}"


# --------------------------------------------------------------------------------------
# Targets
# --------------------------------------------------------------------------------------


def test_an_unknown_path_lists_the_paths_that_come_close() -> None:
    error = failure_of(TargetNotFoundError, encoder(), {"r": Tap("layer.1.attn")})

    says(error, "'layer.1.attn'", "matches no module", "why: ", "nearest matches: ")
    assert "'layers.1.attn' (Attention)" in error.nearest
    assert len(error.nearest) <= 5
    assert "optional=True" in error.remedy


@pytest.mark.parametrize(
    ("target", "quoted"),
    [
        ("layers.9", "'layers.9'"),
        ("layers.*.attention", "'layers.*.attention'"),
        ("re:layers\\.[7-9]", "'re:layers\\\\.[7-9]'"),
        ("LayerNorm2", "'LayerNorm2'"),
        (nn.Conv2d, "Conv2d"),
        (lambda path, module: False, "<lambda>"),
    ],
)
def test_a_target_without_a_match_is_quoted_as_written(target, quoted) -> None:
    error = failure_of(TargetNotFoundError, encoder(), {"r": Tap(target)})

    says(error, quoted, "matches no module")


def test_one_part_of_a_list_without_a_match_is_an_error_of_that_part() -> None:
    error = failure_of(TargetNotFoundError, encoder(), {"r": Tap(["norm", "nrom"])})

    says(error, "target 'nrom' matches no module")
    assert "'norm' (LayerNorm)" in error.nearest


def test_a_class_that_matches_nothing_names_the_classes_that_come_close() -> None:
    class Attentoin(nn.Module):
        pass

    error = failure_of(TargetNotFoundError, encoder(), {"r": Tap(Attentoin)})

    says(error, "Attentoin", "matches no module")
    assert "Attention (class)" in error.nearest


def test_a_layer_name_that_excludes_everything_is_named_in_the_reason() -> None:
    tap = Tap(Attention, layer_name="cross_attn")

    error = failure_of(TargetNotFoundError, encoder(), {"r": tap})

    says(error, "Attention", "layer_name='cross_attn'")


def test_an_ambiguous_class_name_lists_the_classes_it_could_be() -> None:
    def linear_of_another_kind() -> nn.Module:
        class Linear(nn.Module):
            def forward(self, h):
                return h

        return Linear()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), linear_of_another_kind())

    error = failure_of(AmbiguousTargetError, model, {"r": Tap("Linear")})

    says(error, "'Linear'", "2 unrelated classes", "torch.nn.modules.linear.Linear")
    assert "linear_of_another_kind.<locals>.Linear" in error.why
    assert "pass the class itself" in error.remedy


def test_a_class_name_shared_by_base_and_subclass_is_not_ambiguous() -> None:
    class Linear(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH))

    records = fxc.compile(model, {"r": Tap("Linear")}, backend="eager")(rows()).records

    assert records.paths("r") == ("0", "1")


def test_a_container_named_exactly_can_never_be_called() -> None:
    error = failure_of(NeverCalledError, encoder(), {"r": Tap("layers")})

    says(error, "'r'", "'layers'", "ModuleList", "is a container")
    assert "layers.0" in error.nearest
    assert "'layers.*'" in error.remedy


def test_a_module_that_is_matched_but_never_called_is_named() -> None:
    error = failure_of(NeverCalledError, encoder(), {"r": Tap("unused")}, ids())

    says(error, "record 'r'", "'unused'", "(Linear)", "never called", "optional=True")


def test_of_many_modules_never_called_five_are_shown_and_the_rest_counted() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])
            self.busy = nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return self.busy(h)

    error = failure_of(NeverCalledError, Idle(), {"r": Tap("idle.*")}, rows())

    says(error, "'idle.0'", "'idle.4'", "and 3 more")
    assert "'idle.5'" not in str(error)


# --------------------------------------------------------------------------------------
# Elements and positions
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [2, -3])
def test_an_element_out_of_range_says_how_many_there_are(output: int) -> None:
    tap = Tap("layers.0.attn", output=output)

    error = failure_of(ElementError, encoder(), {"r": tap}, ids())

    says(error, f"output={output}", "layers.0.attn", "tuple of 2 elements")


@pytest.mark.parametrize("output", [1, -1, "hidden"])
def test_an_element_of_what_is_no_container_says_what_the_module_returned(
    output: int | str,
) -> None:
    tap = Tap("layers.*", output=output)

    error = failure_of(ElementError, encoder(), {"r": tap}, ids())

    says(error, f"output={output!r}", "layers.0", "tensor has no elements")
    says(error, "output=None")
    with pytest.raises(ElementError, match="tensor has no elements"):
        eager_reference(encoder(), fxc.CaptureSpec({"r": tap}), (ids(),))


def test_position_zero_of_what_is_no_container_is_all_of_it() -> None:
    # Layers of older transformers return tuples; a spec of output=0 fits both.
    taps = {"whole": Tap("layers.*"), "first": Tap("layers.*", output=0)}

    records = fxc.compile(encoder(), taps, backend="eager")(ids()).records

    assert all(map(torch.equal, records["whole"], records["first"]))


class Keyed(nn.Module):
    def forward(self, h):
        return {"logits": h, "hidden": h + 1}


def test_a_key_that_does_not_exist_lists_the_keys() -> None:
    tap = Tap("0", output="logit")

    error = failure_of(ElementError, nn.Sequential(Keyed()), {"r": tap}, rows())

    says(error, "output='logit'", "'logits', 'hidden'")
    assert error.nearest[0] == "logits"


def test_an_input_that_forward_does_not_take_lists_its_parameters() -> None:
    tap = Tap("layers.0", point="input", output="scales")

    error = failure_of(ElementError, encoder(), {"r": tap})

    says(error, "record 'r'", "'scales'", "'layers.0'", "(Layer)", "h, scale")
    assert "scale" in error.nearest


def test_an_input_position_that_forward_does_not_have_is_an_error() -> None:
    tap = Tap("layers.0", point="input", output=2)

    says(failure_of(ElementError, encoder(), {"r": tap}), "input 2", "'layers.0'")


@pytest.mark.parametrize(
    ("select", "shown"), [(4, "4"), ([0, 4, 9], "4, 9"), (-5, "-5"), ([-1, -7], "-7")]
)
def test_a_position_that_does_not_exist_says_the_range(select, shown: str) -> None:
    tap = Tap("layers.*", select=select)

    error = failure_of(SelectionError, encoder(), {"r": tap}, ids())

    says(error, "record 'r'", f"position {shown} does not exist", "'layers.*'")
    assert "called 4 times" in error.why
    assert "from -4 to 3" in error.why
    assert "optional=True" in error.remedy


def test_the_initial_position_is_counted_in_the_range() -> None:
    tap = Tap("layers.*", select=5, initial=True)

    error = failure_of(SelectionError, encoder(), {"r": tap}, ids())

    assert "called 4 times" in error.why
    assert "initial input is position 0" in error.why
    assert "from -5 to 4" in error.why


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_selection_of_one_call_is_checked_like_that_of_the_spec(fullgraph) -> None:
    captured = fxc.compile(
        encoder(), {"r": Tap("layers.*")}, backend="eager", fullgraph=fullgraph
    )

    with pytest.raises(SelectionError, match="position 4 does not exist"):
        captured(ids(), select={"r": 4})
    with pytest.raises(SelectionError, match="position -5 does not exist"):
        captured.select(r=[-5])(ids())
    assert len(captured(ids()).records["r"]) == 4


def test_select_of_an_unknown_record_lists_the_records() -> None:
    captured = fxc.compile(encoder(), {"hidden": Tap("layers.*")}, backend="eager")

    for call in (
        lambda: captured.select(hiden=[1]),
        lambda: captured(ids(), select={"hiden": 1}),
    ):
        with pytest.raises(TargetNotFoundError, match="'hiden'") as caught:
            call()

        assert caught.value.nearest == ("hidden",)
        says(caught.value, "which the spec does not have")


# --------------------------------------------------------------------------------------
# Specs
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Tap(3), "target 3 is of type int"),
        (lambda: Tap(nn.Linear(2, 2)), "a module object (Linear)"),
        (lambda: Tap(dict), "dict is a class, but not a module class"),
        (lambda: Tap("a", output=1.5), "output=1.5 is of type float"),
        (lambda: Tap("a", output=True), "output=True is a bool"),
        (lambda: Tap("a", select="0"), "select='0' is not a selection"),
        (lambda: Tap("a", select=[0, "1"]), "'1' is of type str"),
        (lambda: Tap("a", select=1.0), "it is of type float"),
        (lambda: Tap("a", select={0: 1}), "it is of type dict"),
        (lambda: Tap("a", initial=1), "initial=1 is not a bool"),
        (lambda: Tap("a", detach="yes"), "detach='yes' is not a bool"),
        (lambda: Tap("a", optional=None), "optional=None is not a bool"),
        (lambda: Tap("a", dtype="float16"), "dtype='float16' is not a torch.dtype"),
        (lambda: Tap(nn.Linear, layer_name=3), "layer_name 3 is not a string"),
        (lambda: CaptureSpec({1: Tap("a")}), "record name 1 is not a name"),
        (lambda: CaptureSpec({"": Tap("a")}), "record name '' is not a name"),
        (lambda: CaptureSpec("layers.*"), "a spec cannot be made of 'layers.*'"),
        (lambda: CaptureSpec(Tap("a")), "a spec cannot be made of Tap('a')"),
    ],
)
def test_a_wrong_type_is_a_type_error_that_shows_the_value(make, text: str) -> None:
    with pytest.raises(SpecTypeError) as caught:
        make()

    says(caught.value, text)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Tap([]), "target [] is empty"),
        (lambda: Tap("a..b"), "target 'a..b' is not a dotted path"),
        (lambda: Tap(" a"), "target ' a' is not a dotted path"),
        (lambda: Tap("re:("), "target 're:(' is not a regular expression"),
        (lambda: Tap("a", point="middle"), "point='middle' is not a point"),
        (lambda: Tap("a", reduce="max"), "reduce='max' is not a reduction"),
        (lambda: Tap("a", device="nowhere"), "device='nowhere' is not a device"),
        (lambda: Tap("a", select=slice(0, 4, 0)), "has a step of zero"),
        (lambda: Tap("a", point="input", initial=True), "the first input twice"),
        (lambda: CaptureSpec.from_json("{"), "not a stored spec"),
        (lambda: CaptureSpec.from_json('{"format": 99}'), "spec format 99"),
    ],
)
def test_a_malformed_value_is_a_value_error_that_shows_the_value(make, text) -> None:
    with pytest.raises(SpecError) as caught:
        make()

    says(caught.value, text)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a", "a"], "they are equal"),
        (["a.b", "a_b"], "an exported program would call both 'a_b'"),
    ],
)
def test_record_names_that_collide_are_both_quoted(names: list[str], why: str) -> None:
    with pytest.raises(RecordNameError) as caught:
        CaptureSpec([(name, Tap("layers.0")) for name in names])

    says(caught.value, repr(names[0]), repr(names[1]), why, "another name")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("model", [lambda h: h, None, nn.Linear])
def test_what_is_no_module_cannot_be_compiled(model) -> None:
    with pytest.raises(SpecTypeError, match=f"model is of type {type(model).__name__}"):
        fxc.compile(model, {"r": "0"})


def test_on_eager_takes_two_values_only() -> None:
    with pytest.raises(SpecTypeError, match="on_eager='warn' is not known") as caught:
        fxc.compile(mlp(), {"r": "0"}, on_eager="warn")

    says(caught.value, '"allow" or "error"')


# --------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------


class AsksItsInput(Encoder):
    def forward(self, ids):
        if ids.sum() > 3:
            return self.norm(self.tokens(ids))
        return self.tokens(ids)


def test_an_untraceable_model_is_named_with_the_reason_for_the_break() -> None:
    error = failure_of(TraceError, AsksItsInput(), {"r": Tap("norm")}, ids())

    says(error, "AsksItsInput", "cannot be traced as one graph", "drop fullgraph=True")
    assert "ata-dependent" in error.why
    assert error.__cause__ is not None


def test_a_value_outside_every_graph_is_refused_if_asked_to() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        @torch._dynamo.disable
        def forward(self, h):
            return self.part(h)

    model = nn.Sequential(Breaks())
    captured = fxc.compile(model, {"r": "0.part"}, backend="eager", on_eager="error")

    with pytest.raises(EagerSiteError, match=r"'0\.part'") as caught:
        captured(rows())

    says(caught.value, "outside every graph", 'on_eager="allow"')
    assert caught.value.why


class Cache:
    def __init__(self, h):
        self.h = h


class KeepsCache(nn.Module):
    def forward(self, h):
        return h + 1, Cache(h)


def test_an_object_that_no_graph_returns_is_named_with_its_place() -> None:
    model = nn.Sequential(KeepsCache())

    error = failure_of(UnsupportedOutputError, model, {"r": Tap("0")}, rows())

    says(error, "record 'r'", "Cache", "[1]", "output=")


def test_the_tensor_beside_such_an_object_can_be_had() -> None:
    model = nn.Sequential(KeepsCache(), nn.Identity())
    model[1].forward = lambda pair: pair[0]
    captured = fxc.compile(model, {"r": Tap("0", output=0)}, backend="eager")

    assert torch.equal(captured(rows()).records["r"][0], rows() + 1)


@pytest.mark.parametrize(
    ("child", "parents"),
    [
        (SpecError, (FxCaptureError, ValueError)),
        (SpecTypeError, (SpecError, TypeError)),
        (RecordNameError, (SpecError,)),
        (TargetError, (FxCaptureError, LookupError)),
        (TargetNotFoundError, (TargetError,)),
        (AmbiguousTargetError, (TargetError,)),
        (NeverCalledError, (TargetError,)),
        (SelectionError, (TargetError, IndexError)),
        (ElementError, (TargetError,)),
        (CaptureError, (FxCaptureError, RuntimeError)),
        (TraceError, (CaptureError,)),
        (UnsupportedOutputError, (CaptureError,)),
        (EagerSiteError, (CaptureError,)),
    ],
)
def test_errors_stand_in_one_tree_and_are_builtin_errors_too(child, parents) -> None:
    assert issubclass(child, FxCaptureError)
    assert all(issubclass(child, parent) for parent in parents)


def test_an_error_that_was_pickled_says_the_same() -> None:
    error = failure_of(TargetNotFoundError, encoder(), {"r": Tap("layer.1.attn")})

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is TargetNotFoundError
    assert str(again) == str(error)
    assert again.nearest == error.nearest


class Anything(nn.Module):
    def forward(self, *args, **kwargs):
        return args[0] * 2


@pytest.mark.parametrize("which", [1, "named"])
def test_an_argument_that_the_call_did_not_have_is_named(which) -> None:
    tap = Tap("0", point="input", output=which)

    error = failure_of(ElementError, nn.Sequential(Anything()), {"r": tap}, rows())

    says(error, "record 'r'", f"without the argument {which!r}", "names no parameters")
