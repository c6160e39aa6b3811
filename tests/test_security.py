"""What stored documents and saved programs cannot do: import, call, or fail oddly."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import fxcapture as fxc
from fxcapture import CaptureSpec, Tap, reductions
from fxcapture.cli.app import app
from fxcapture.cli.specs import load_spec
from fxcapture.cli.values import UsageError
from fxcapture.errors import (
    CaptureError,
    FxCaptureError,
    SpecError,
    SpecTypeError,
    TargetNotFoundError,
)
from fxcapture.exporting.manifest import Manifest
from fxcapture.spec.module_table import ModuleTable
from fxcapture.spec.stored import StoredClass, Trust, trusting
from tests.models import Attention, Layer, encoder, ids

EVIL = """
from pathlib import Path
Path("IMPORTED").touch()
def f(*values):
    Path("EXECUTED").touch()
    return values[0]
class Held(tuple):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where ``evilmod`` can be imported, and leaves a file if it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evilmod.py").write_text(EVIL)
    yield tmp_path
    sys.modules.pop("evilmod", None)


def ran() -> bool:
    return Path("IMPORTED").exists() or Path("EXECUTED").exists()


def document(tap: Any) -> str:
    return json.dumps({"format": 1, "taps": {"h": tap}})


# --------------------------------------------------------------------------------------
# Trust
# --------------------------------------------------------------------------------------


def test_a_reduction_that_is_not_trusted_is_not_imported() -> None:
    text = document({"target": ["layers.*"], "reduce": {"object": "evilmod:f"}})

    with pytest.raises(SpecError, match=r"(?s)'evilmod:f' is not trusted.*why: .*"
                       r'what to do: .*trust=\["evilmod"\]'):  # fmt: skip
        CaptureSpec.from_json(text)
    with pytest.raises(SpecError, match="'evilmod:f' is not trusted"):
        Tap.from_json(json.loads(text)["taps"]["h"])
    assert not ran()

    found = CaptureSpec.from_json(text, trust=["evilmod"])["h"].reduce
    assert found is sys.modules["evilmod"].f
    assert ran()


def test_a_stored_name_is_no_predicate(folder: Path) -> None:
    (folder / "layers").mkdir()
    for optional in (False, True):
        tap = {"target": [{"object": "shutil:rmtree"}], "optional": optional}
        spec = CaptureSpec.from_json(document(tap))

        with pytest.raises(TargetNotFoundError, match=r"(?s)target shutil:rmtree.*"
                           r'is not trusted.*trust=\["shutil"\]'):  # fmt: skip
            fxc.compile(encoder(), spec, backend="eager")
    assert (folder / "layers").exists()


def test_a_class_is_found_among_the_models_own() -> None:
    want = {"a": Tap(Attention), "m": Tap(nn.Module, layer_name="attn")}
    for key in ("class", "object"):
        text = CaptureSpec(want).to_json().replace('"class"', f'"{key}"')
        spec = CaptureSpec.from_json(text)
        records = fxc.compile(encoder(), spec, backend="eager")(ids()).records

        assert spec["a"].target.parts == (
            StoredClass("tests.models:Attention", certain=key == "class"),
        )
        assert records.paths("a") == tuple(f"layers.{i}.attn" for i in range(4))
        assert records.paths("m") == records.paths("a")
        assert CaptureSpec.from_json(spec.to_json()) == spec
    assert CaptureSpec.from_json(text, ["tests", "torch.nn.*"]) == CaptureSpec(want)


def test_a_class_that_the_model_lacks_is_an_error_unless_optional() -> None:
    text = CaptureSpec({"a": Tap(nn.Conv2d)}).to_json()
    spec = CaptureSpec.from_json(text)

    with pytest.raises(TargetNotFoundError, match="matches no module"):
        fxc.compile(encoder(), spec, backend="eager")
    tap = json.loads(text)["taps"]["a"] | {"optional": True}
    captured = fxc.compile(encoder(), {"a": Tap.from_json(tap)}, backend="eager")
    assert captured(ids()).records["a"] == ()


@pytest.mark.parametrize(
    ("trust", "module", "covered"),
    [
        ((), "a", False),
        (["a"], "a", True),
        (["a"], "a.b.c", True),
        (["a"], "ab", False),
        (["a.*"], "a", True),
        (["a.b"], "a", False),
        ("a.b", "a.b.c", True),
    ],
)
def test_a_name_stands_for_a_module_and_all_below(trust, module, covered) -> None:
    assert trusting(trust).covers(module) is covered


@pytest.mark.parametrize("trust", [5, [5], ["*"], [""], ["a b"], ["a:b"]])
def test_trust_is_a_list_of_modules(trust: Any) -> None:
    with pytest.raises(SpecTypeError, match="is not a list of modules"):
        CaptureSpec.from_json(document("x"), trust=trust)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tests.test_security:json.loads", "cannot be imported"),
        ("tests.test_security:json", "is not defined in a trusted module"),
        ("tests.test_security:Path", "is not defined in a trusted module"),
        ("tests.test_security:ran.__globals__", "cannot be imported"),
        ("tests.test_security:absent", "cannot be imported"),
        ("tests.absent:x", "cannot be imported"),
    ],
)
def test_trust_ends_where_a_module_holds_anothers_objects(name, text) -> None:
    with pytest.raises(SpecError, match=text):
        Trust(("tests",)).load(name)


def test_the_command_line_imports_what_it_was_told_to(folder: Path) -> None:
    file = folder / "spec.yaml"
    file.write_text("h: {target: 'layers.*', reduce: 'evilmod:f'}\n")

    with pytest.raises(UsageError, match=r"(?s)record 'h': 'evilmod:f' is not trusted"):
        load_spec(file, ())
    found = CliRunner().invoke(
        app, ["sites", "torch.nn:ReLU", "--trust", "x"], catch_exceptions=False
    )
    assert found.exit_code == 2  # sites takes no spec
    command = ["estimate", "torch.nn:ReLU", "--input", "float32[2]", "--spec", file]
    found = CliRunner().invoke(app, [*map(str, command)])
    assert found.exit_code == 2
    assert "--trust" in found.stderr
    found = CliRunner().invoke(app, [*map(str, command), "--trust", "a b"])
    assert found.exit_code == 2
    assert "--trust names no module" in found.stderr
    assert not ran()

    assert load_spec(file, (), ["evilmod"])["h"].reduce is not None
    assert ran()


def test_a_tap_on_the_command_line_is_told(folder: Path) -> None:
    spec = load_spec(None, ["h=layers.*,reduce=evilmod:f", "a=re:x:y", r"b=re\:x"])

    assert spec["h"].reduce is sys.modules["evilmod"].f
    assert spec["a"] == Tap("re:x:y")
    assert spec["b"] == Tap(r"re\:x")


# --------------------------------------------------------------------------------------
# Malformed documents
# --------------------------------------------------------------------------------------

MALFORMED: list[tuple[Any, str]] = [
    ({}, "KeyError: 'target'"),
    ({"target": 5}, "field 'target' is 5; expected a string or a list"),
    ({"target": [5]}, "target 5 is not a stored target"),
    ({"target": [{"object": 5}]}, "'5' names no object"),
    ({"target": [{"object": "os"}]}, "'os' names no object"),
    ({"target": [{"object": "../x:y"}]}, "'../x:y' names no object"),
    ({"target": [{"class": "a:b", "object": "a:b"}]}, "is not a stored target"),
    ({"target": "re:" + "(" * 5000}, "is not a regular expression"),
    ({"target": "re:a{99999999999999999999}"}, "is not a regular expression"),
    ({"target": "a", "targte": 1}, "did you mean 'target'"),
    ({"target": "a", "select": {"slice": [1, 2]}}, "field 'select' is"),
    ({"target": "a", "select": {"slice": ["x", 2, 3]}}, "'x' is of type str"),
    ({"target": "a", "select": {"slyce": 1}}, "field 'select' is"),
    ({"target": "a", "select": 1.5}, "is not a selection"),
    ({"target": "a", "output": [1]}, "output="),
    ({"target": "a", "dtype": "load"}, "no attribute 'load'"),
    ({"target": "a", "dtype": 5}, "no attribute 5"),
    ({"target": "a", "device": 10**30}, "is not a device"),
    ({"target": "a", "reduce": {"kind": "evil"}}, "Reduction(kind='evil')"),
    ({"target": "a", "reduce": {"kind": "topk", "k": "x"}}, "topk(k='x')"),
    ({"target": "a", "reduce": {"kind": "topk", "k": 10**30}}, "is not a count"),
    ({"target": "a", "reduce": {"kind": "topk", "k": 1, "dim": "x"}}, "dim='x'"),
    ({"target": "a", "reduce": {"kind": "topk", "k": 1, "part": 3}}, "part=3"),
    ({"target": "a", "reduce": {"kind": "gather"}}, "names no input"),
    ({"target": "a", "reduce": {"kind": "last", "k": 3}}, "takes no k"),
    ({"target": "a", "reduce": {"kind": "last", "evil": 3}}, "no field of a reduction"),
    ({"target": "a", "reduce": {"objekt": "a:b"}}, "field 'reduce' is"),
    ({"target": "a", "reduce": {"object": None}}, "names no object"),
    ({"target": "a", "attention": 5}, "is not a part of the weights"),
    ({"target": "a", "attention": {"heads": ["slice", 1]}}, "is not a slice"),
    ([1], "of type list"),
    (None, "of type NoneType"),
]


@pytest.mark.parametrize(("tap", "text"), MALFORMED, ids=lambda v: str(v)[:40])
def test_a_malformed_tap_is_one_error_of_its_record(tap: Any, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        CaptureSpec.from_json(document(tap))

    assert str(caught.value).startswith("record 'h': ")
    assert text in str(caught.value)
    with pytest.raises(SpecError):
        Tap.from_json(tap)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "of type list"),
        ("", "JSONDecodeError"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"format":1,"taps":{"a":' + "[" * 70 + "]" * 70 + "}}", "nested more than"),
        ("1" * 5000, "ValueError"),
        ('{"format":1,"taps":[]}', "field 'taps' is []; expected an object"),
        ('{"format":1}', "field 'taps' is missing"),
        ('{"taps":{}}', "field 'format' is missing"),
        ('{"format":1,"tap":{},"taps":{}}', "unknown field 'tap'; did you mean 'taps'"),
        ('{"format":1,"taps":{"a":"x","a":"y"}}', "has the field 'a' twice"),
        (b"\xff\xfe\xff", "UnicodeDecodeError"),
        (5, "of type int"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_text_that_is_no_spec_says_why(text: Any, why: str) -> None:
    with pytest.raises(SpecError, match="the text is not a stored spec") as caught:
        CaptureSpec.from_json(text)
    assert why in str(caught.value)


def test_a_document_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxcapture.spec.documents.MAX_CHARACTERS", 100)

    with pytest.raises(SpecError, match=r"it has 101 characters; at most 100"):
        CaptureSpec.from_json(" " * 101)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "evil"}, "is not a kind"),
        ({"kind": "topk", "k": "x"}, "is not a count"),
        ({"kind": "topk", "k": True}, "is not a count"),
        ({"kind": "topk", "k": 1, "source": "m"}, "takes no input"),
        ({"kind": "mean", "source": 5}, "source=5"),
        ({"kind": "mean", "dim": 1}, "takes no k, dim or part"),
    ],
)
def test_a_reduction_is_checked_when_it_is_made(fields: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        reductions.Reduction(**fields)


def test_files_of_the_command_line_are_bounded(folder: Path) -> None:
    for name, text in (("a.json", "[" * 100_000), ("a.yaml", "[" * 5_000)):
        (folder / name).write_text(text)
        with pytest.raises(UsageError, match=r"is not (JSON|YAML)"):
            load_spec(folder / name, ())


# --------------------------------------------------------------------------------------
# Manifests and saved programs
# --------------------------------------------------------------------------------------


class Side(enum.Enum):
    LEFT = 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Careful(dict):
    """Runs code of its own to be made."""

    def __new__(cls, *args: Any) -> Careful:
        raise AssertionError("made by a manifest")


@dataclasses.dataclass
class Finalised:
    x: Any

    def __del__(self) -> None:
        Path("EXECUTED").touch()


class Holds(nn.Module):
    def forward(self, x):
        return {
            Side.LEFT: x * 2,
            (torch.float16, 1): Pair(x + 1, None),
            "n": x.shape[0],
            1: 0.5,
        }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Holds()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.part(x)[Side.LEFT])


SPEC = {"p": Tap("part"), "fc": Tap(nn.Linear, reduce=reductions.last(), optional=True)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "program.pt2"
    fxc.export(Model(), (torch.ones(2, 3),), spec=SPEC).save(path)
    return path


def manifest_of(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("fxcapture.json"))
        return archive.read(name).decode()


def with_manifest(path: Path, text: str, out: Path) -> Path:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            own = name.endswith("fxcapture.json")
            new.writestr(name, text if own else old.read(name))
    return out


def slot(data: Any) -> Any:
    return data["records"][0]["slots"][0]


def structure(data: Any) -> Any:
    return slot(data)["structure"]


EDITS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda d: d.pop("records"), "field 'records' is missing"),
    (lambda d: d.pop("spec"), "field 'spec' is missing"),
    (lambda d: d.update(records=None), "field 'records' is None; expected a list"),
    (lambda d: d.update(format="1"), "format '1'"),
    (lambda d: d.update(zzz=1), "unknown field 'zzz'"),
    (lambda d: d["outputs"][0].update(zzz=1), "unknown field 'outputs[0].zzz'"),
    (lambda d: d["outputs"][0].update(name="x"), "the name of an output"),
    (lambda d: d["outputs"][0].update(shape=[None]), "'outputs[0].shape'"),
    (lambda d: d["records"].append(3), "field 'records[2]' is 3"),
    (lambda d: d["records"][0]["slots"].append("x"), "'records[0].slots[1]' is 'x'"),
    (lambda d: structure(d).update(kind="evil"), "expected one of tensor, int"),
    (lambda d: structure(d).update({"class": "../x"}), "names no object"),
    (lambda d: structure(d).pop("fields"), "fields' is missing"),
    (lambda d: structure(d)["keys"].pop(), "one part for each key"),
    (lambda d: structure(d)["keys"].__setitem__(0, "("), "is no literal"),
    (lambda d: structure(d)["keys"].__setitem__(0, "(" * 3000), "is no literal"),
    (lambda d: structure(d)["keys"].__setitem__(0, "-" * 99999), "is no literal"),
    (lambda d: structure(d)["keys"].__setitem__(0, "[1]"), "literals that can be"),
    (lambda d: structure(d)["keys"].__setitem__(0, {"dtype": "nn"}), "a torch.dtype"),
    (lambda d: slot(d).update(tensors=[]), "says nothing of leaf 0"),
    (lambda d: slot(d)["tensors"][0].__setitem__(1, "no"), "the name of an output"),
    (lambda d: slot(d).update(tensors=[[0]]), "a leaf's number and its output"),
    (lambda d: d.update(keep_output=False), "other outputs than the program returns"),
]


@pytest.mark.parametrize(("edit", "text"), EDITS, ids=[t for _, t in EDITS])
def test_a_broken_manifest_is_one_error_of_its_file(
    edit: Any, text: str, saved: Path, folder: Path
) -> None:
    data = json.loads(manifest_of(saved))
    edit(data)
    path = with_manifest(saved, json.dumps(data), folder / "broken.pt2")

    with pytest.raises(CaptureError) as caught:
        fxc.load(path)
    assert "broken.pt2" in str(caught.value)
    assert text in str(caught.value)


def test_keys_that_are_no_literals_survive_being_saved(saved: Path) -> None:
    x = torch.randn(2, 3)
    found = fxc.load(saved)(x).records["p"][0]

    assert list(found) == list(Holds()(x))
    assert torch.equal(found[Side.LEFT], x * 2)
    assert type(found[torch.float16, 1]) is Pair


def test_a_key_without_a_written_form_says_so(folder: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x):
            return {frozenset([1]): x + 1}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            return self.odd(x)[frozenset([1])]

    program = fxc.export(Around(), (torch.ones(2),), spec={"o": "odd"})

    assert list(program(torch.ones(2)).records["o"][0]) == [frozenset([1])]
    with pytest.raises(CaptureError, match=r"(?s)cannot be saved.*has no written form"):
        program.save(folder / "p.pt2")


def test_a_manifest_imports_no_class_unless_trusted(saved: Path, folder: Path) -> None:
    data = json.loads(manifest_of(saved))
    pair = structure(data)["children"][1]
    pair["class"] = "evilmod:Held"
    path = with_manifest(saved, json.dumps(data), folder / "evil.pt2")
    x = torch.ones(2, 3)

    found = fxc.load(path)(x).records["p"][0][torch.float16, 1]
    assert type(found).__name__ == "Held"
    assert not ran()
    found = fxc.load(path, trust=["evilmod"])(x).records["p"][0][torch.float16, 1]
    assert type(found) is sys.modules["evilmod"].Held
    pair["class"] = "evilmod:Absent"
    path = with_manifest(saved, json.dumps(data), folder / "evil.pt2")
    with pytest.raises(CaptureError, match="'evilmod:Absent' cannot be imported"):
        fxc.load(path, trust=["evilmod"])


@pytest.mark.parametrize("name", ["Careful", "Finalised"])
def test_a_loaded_class_that_runs_code_has_a_stand_in(name: str, saved: Path) -> None:
    data = json.loads(manifest_of(saved))
    made = {
        "kind": "dict" if name == "Careful" else "dataclass",
        "class": f"{__name__}:{name}",
        "fields": [],
        "keys": ["'x'"],
        "children": [{"kind": "const", "value": 1}],
    }
    structure(data)["children"][1] = made
    found = Manifest.from_json(json.dumps(data)).records[0].slots[0]
    assert found is not None

    assert found.structure.children[1].build(lambda i: None, int) in ({"x": 1}, (1,))
    assert not ran()


def test_a_module_is_not_asked_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    data = {"format": 1, "versions": {}, "spec": None, "spec_text": "",
            "keep_output": True, "outputs": [], "records": [{"name": "r", "paths": [],
            "slots": [{"tensors": [], "sizes": [], "structure": {"kind": "sequence",
            "class": "lazy_module:Made", "fields": ["class", "x"], "children": [
                {"kind": "const"}, {"kind": "const", "value": {"enum": "lazy_module:E",
                "member": "A", "value": None}}]}}]}]}  # fmt: skip

    found = Manifest.from_json(json.dumps(data)).records[0].slots[0]

    assert found is not None
    assert found.structure.build(lambda i: None, int) == (None, "A")
    assert asked == []


def test_the_spec_of_a_program_is_not_imported(saved: Path, folder: Path) -> None:
    data = json.loads(manifest_of(saved))
    data["spec"]["taps"]["fc"]["reduce"] = {"object": "evilmod:f"}
    path = with_manifest(saved, json.dumps(data), folder / "evil.pt2")

    program = fxc.load(path)
    assert program(torch.ones(2, 3)).records["fc"]
    with pytest.raises(SpecError, match="'evilmod:f' is not trusted"):
        _ = program.spec
    assert not ran()
    assert fxc.load(path, trust=["evilmod"]).spec["fc"].reduce is not None
    made = fxc.export(Model(), (torch.ones(2, 3),), spec=SPEC)
    assert made.spec == CaptureSpec(SPEC)


@pytest.mark.parametrize("keep", [0, 10, 1000, -100])
def test_a_damaged_file_is_one_error(keep: int, saved: Path, folder: Path) -> None:
    (folder / "cut.pt2").write_bytes(saved.read_bytes()[:keep])

    with pytest.raises(CaptureError, match=r"cut\.pt2"):
        fxc.load("cut.pt2")
    with pytest.raises(CaptureError, match=r"cut\.pt2"):
        fxc.load_package("cut.pt2")
    with pytest.raises(FileNotFoundError):
        fxc.load("absent.pt2")


def test_what_is_not_in_a_dictionary_of_outputs_is_named(saved: Path) -> None:
    program = fxc.load(saved)

    for values in ({}, (), {"fc_0": torch.ones(3)}):
        with pytest.raises(CaptureError, match=r"the output 'p_0_.*' has no value"):
            program.read(values)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------
# Fuzz
# --------------------------------------------------------------------------------------

_watching = False
_seen: list[str] = []
_REFUSED = ("import", "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pickle.")


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event.startswith(_REFUSED):
        _seen.append(f"{event} {args[:1]}")


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Inside, nothing may be imported or done to the machine; only errors of ours."""
    global _watching
    _seen.clear()
    _watching = True
    try:
        with contextlib.suppress(FxCaptureError):
            yield
    finally:
        _watching = False
    assert _seen == []
    assert not ran()


def test_the_watch_can_fail() -> None:
    with pytest.raises(AssertionError), nothing_runs():
        __import__("evilmod")


NAMES = st.sampled_from(
    ["evilmod:f", "evilmod:Held", "os:system", "shutil:rmtree", "builtins:eval",
     "torch:load", "torch.nn:Linear", "collections:OrderedDict", "a:b", "os", ":", "",
     "re:x", "re:(", "re:(a+)+$", "**.**", "l*", "\\", "[", "T", "'x'", "('a', 1)",
     "__import__('evilmod')", "float16", "nn", "cpu", "cuda:9", "last", "mean", "topk",
     "tensor", "const", "sequence", "dict", "dataclass", "opaque", "LEFT", "p_0"]
)  # fmt: skip
FIELDS = st.sampled_from(
    ["target", "object", "class", "kind", "select", "slice", "reduce", "dtype", "k",
     "device", "attention", "heads", "output", "point", "initial", "layer_name", "keys",
     "optional", "taps", "format", "children", "index", "value", "enum", "member",
     "tuple", "fields", "tensors", "sizes", "structure", "slots", "shape", "name"]
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([10**30, -(2**63), 0.5, float("inf"), float("nan")])
    | NAMES
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(FIELDS | NAMES, inner, max_size=4)
    ),
    max_leaves=8,
)

STORED_SPEC = CaptureSpec(
    {
        "a": Tap(["layers.*", Layer], select=slice(0, None, 2), dtype=torch.float16),
        "b": Tap("x", reduce=reductions.topk(3), device="cpu", optional=True),
        "c": fxc.AttentionWeights("y", heads=[1, 0], queries=slice(-2, None)),
    }
).to_json()


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """A document with some of its values, fields or characters changed."""
    data = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        at, key = {"": data}, ""
        while isinstance(at[key], (dict, list)) and at[key] and draw(st.booleans()):
            at = at[key]
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = draw(st.sampled_from(keys))
        if not key and at == {"": data}:
            continue
        how = draw(st.sampled_from(["change", "change", "drop", "add"]))
        if how == "drop":
            del at[key]  # type: ignore[arg-type]
        elif how == "add" and isinstance(at, dict):
            at[draw(FIELDS)] = draw(VALUES)
        else:
            at[key] = draw(VALUES)
    made = json.dumps(data)
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(made) - 1))
        made = made[:place] + draw(st.text(max_size=2)) + made[place + 1 :]
    return made


SPECS = st.one_of(
    mutated(STORED_SPEC),
    mutated(STORED_SPEC),
    VALUES.map(document),
    VALUES.map(json.dumps),
    st.text(),
)
TABLE = ModuleTable(encoder())
FEW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=10_000)


def check_spec(text: str) -> None:
    with nothing_runs():
        spec = CaptureSpec.from_json(text)
        for tap in spec.values():
            with contextlib.suppress(FxCaptureError):
                tap.target.match(TABLE)
        assert CaptureSpec.from_json(spec.to_json()) == spec


def check_manifest(text: str) -> None:
    with nothing_runs():
        manifest = Manifest.from_json(text)
        values = {o.name: torch.ones((), dtype=torch.int64) for o in manifest.outputs}
        manifest.read(values)


def check_flips(saved: Path, flips: list[tuple[float, int]]) -> None:
    data = bytearray(saved.read_bytes())
    for where, bits in flips:
        data[int(where * (len(data) - 1))] ^= bits
    Path("flipped.pt2").write_bytes(data)
    with contextlib.suppress(FxCaptureError):
        fxc.load("flipped.pt2")
    assert not ran()


@pytest.fixture(scope="module")
def stored_manifest(saved: Path) -> str:
    return manifest_of(saved)


FLIPS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3
)


@FEW
@given(SPECS)
def test_no_spec_runs_anything(text: str) -> None:
    check_spec(text)


@FEW
@given(st.data())
def test_no_manifest_runs_anything(stored_manifest: str, data: Any) -> None:
    check_manifest(data.draw(mutated(stored_manifest)))


@settings(FEW, max_examples=30)
@given(FLIPS)
def test_no_flipped_byte_runs_anything(saved: Path, flips: Any) -> None:
    check_flips(saved, flips)


@pytest.mark.nightly
@MANY
@given(SPECS)
def test_no_spec_of_many_runs_anything(text: str) -> None:
    check_spec(text)


@pytest.mark.nightly
@MANY
@given(st.data())
def test_no_manifest_of_many_runs_anything(stored_manifest: str, data: Any) -> None:
    check_manifest(data.draw(mutated(stored_manifest)))


@pytest.mark.nightly
@MANY
@given(FLIPS)
def test_no_flipped_byte_of_many_runs_anything(saved: Path, flips: Any) -> None:
    check_flips(saved, flips)
