"""The command line: what it prints, its exit codes, and how it treats mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fxcapture as fxc
from fxcapture.cli_app import app
from fxcapture.cli_inputs import load_model
from fxcapture.cli_specs import load_spec, parse_tap
from fxcapture.cli_values import UsageError, scalar

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

existing = make()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "models_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("models_here", None)


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
    assert found["model.layers.2"]["bytes"] == 8 * 32 * 4
    assert "model.layers.0.self_attn" not in found
    deeper = data("sites", *SMALL, "--depth", "4")
    assert "model.layers.0.self_attn" in {row["path"] for row in deeper}


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


@pytest.mark.parametrize(
    ("form", "start"), [("text", "module"), ("svg", "<svg"), ("dot", "digraph")]
)
def test_explain_draws(form: str, start: str, folder: Path) -> None:
    model = ["models_here:with_inputs", "--tap", "h=*,select=-1"]
    assert good("explain", *model, "--format", form).startswith(start)
    good("explain", *model, "--format", form, "--out", "picture")

    assert (folder / "picture").read_text().startswith(start)


def test_export_writes_a_program_that_loads(folder: Path) -> None:
    from fxcapture.captured_program import load

    found = data(
        "export", "models_here:with_inputs", "--tap", "h=1", "--out", "model.pt2"
    )

    assert [o["name"] for o in found["outputs"]] == ["h_0"]
    records = load(folder / "model.pt2")(torch.ones(3, 4)).records
    assert records["h"][0].shape == (3, 8)


def test_bench_times_three_variants() -> None:
    found = data(
        "bench", "models_here:with_inputs", "--tap", "h=1", "--backend", "eager",
        "--rounds", "3",
    )  # fmt: skip

    names = [v["variant"] for v in found["variants"]]
    assert names == ["plain", "captured", "records only"]
    assert found["variants"][0]["over_plain"] == 1.0
    assert found["kept_bytes"] == 3 * 8 * 4


def test_version_and_help() -> None:
    assert fxc.__version__ in good("--version")
    assert "estimate" in good("--help")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fxcapture.cli", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("fxcapture ")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fxcapture import cli

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "fxcapture.cli_app")
    monkeypatch.delitem(sys.modules, "fxcapture.cli_options", raising=False)

    with pytest.raises(SystemExit, match=r"pip install 'fxcapture\[cli\]'"):
        cli.main()


# --------------------------------------------------------------------------------------
# Mistakes
# --------------------------------------------------------------------------------------

MISTAKES = [
    (["estimate", "LlamaForCausalM", *TAP], 2, "did you mean: LlamaForCausalLM"),
    (["estimate", "models_hre:make", *TAP], 2, "no module 'models_hre'"),
    (["estimate", "models_here:mak", *TAP], 2, "did you mean: make"),
    (["estimate", "missing.py:make", *TAP], 2, "no file missing.py"),
    (["estimate", "models_here:number", *TAP], 2, "made a int"),
    (["estimate", "models_here:make", "--set", "x=1", *TAP], 2, "--set key=value"),
    (["estimate", "models_here:make", *TAP], 2, "forward needs inputs: input"),
    (["estimate", "models_here:broken", *TAP], 3, "no weights found"),
    (["estimate", "AutoModel", *TAP], 2, "every architecture"),
    (["estimate", *SMALL], 2, "no spec"),
    (["estimate", *SMALL, "--set", "hiden_size=3", *TAP], 2, "hidden_size"),
    (["estimate", *SMALL, "--set", "hidden_size", *TAP], 2, "write key=value"),
    (["estimate", *SMALL, "--config", "none.json", *TAP], 2, "cannot be read"),
    (["estimate", *SMALL, "--tap", "hidden"], 2, "is no tap"),
    (["estimate", *SMALL, "--tap", "h=model,selct=1"], 2, "did you mean: select"),
    (["estimate", *SMALL, "--tap", "h=model.layer.*"], 2, "matches no module"),
    (["estimate", *SMALL, "--tap", "h=a.b:C"], 2, "cannot be imported"),
    (["estimate", *SMALL, "--tap", "h=model.layers.*,select=9"], 2, "does not exist"),
    (["estimate", *SMALL, "--spec", "none.yaml"], 2, "cannot be read"),
    (["estimate", *SMALL, *TAP, "--input", "ids=integer[2]"], 2, "input_ids=int64"),
    (
        ["export", *SMALL, *TAP, "--out", "x", "--package", "--onnx"], 2, "exclude",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "text"), MISTAKES, ids=lambda v: str(v)[:60]
)
def test_a_mistake_is_said_without_a_traceback(
    arguments: list[str], code: int, text: str
) -> None:
    result = run(*arguments)

    assert result.exit_code == code
    assert text in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


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
