"""Models of transformers: exported, saved, run elsewhere at several lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.errors import AmbiguousSiteError
from fxcapture.exporting.export import export
from fxcapture.exporting.package import load_package
from fxcapture.foreign.instrument import instrument
from tests.reference import assert_records, eager_records

transformers = pytest.importorskip("transformers")

DIM = torch.export.Dim
Inputs = Callable[[int], dict[str, Any]]
Family = tuple[nn.Module, Inputs, dict[str, Any], fxc.CaptureSpec]

# transformers and torch.onnx name functions of torch that have newer names.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
    ),
]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape)


def llama(layers: int = 3) -> Family:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    spec = {
        "hidden": Tap("layers.*", select=[0, -2], initial=True),
        "mixed": Tap("layers.*.self_attn", output=0),
    }
    return (
        transformers.LlamaModel(config),
        lambda n: {"input_ids": ids(2, n), "use_cache": False},
        {"input_ids": {1: DIM("length", min=2, max=512)}, "use_cache": None},
        fxc.CaptureSpec(spec),
    )


def bert(layers: int = 2) -> Family:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    length = {1: DIM("length", min=2, max=512)}
    spec = {"hidden": Tap("encoder.layer.*", initial=True), "pooled": Tap("pooler")}
    return (
        transformers.BertModel(config),
        lambda n: {
            "input_ids": ids(2, n),
            "attention_mask": torch.ones(2, n, dtype=torch.long),
        },
        {"input_ids": length, "attention_mask": length},
        fxc.CaptureSpec(spec),
    )


def t5() -> Family:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4
    )
    spec = {
        "encoded": Tap("encoder.block.*", output=0),
        "decoded": Tap("decoder.block.*", output=0, select=-1),
    }
    return (
        transformers.T5Model(config),
        lambda n: {
            "input_ids": ids(2, n),
            "decoder_input_ids": ids(2, 5),
            "use_cache": False,
        },
        {
            "input_ids": {1: DIM("length", min=2, max=512)},
            "decoder_input_ids": None,
            "use_cache": None,
        },
        fxc.CaptureSpec(spec),
    )


def clip() -> Family:
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return (
        transformers.CLIPTextModel(config),
        lambda n: {"input_ids": ids(2, n)},
        {"input_ids": {1: DIM("length", min=2, max=77)}},
        fxc.CaptureSpec({"hidden": Tap("encoder.layers.*", initial=True)}),
    )


def vit() -> Family:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    return (
        transformers.ViTModel(config),
        lambda n: {"pixel_values": torch.randn(n, 3, 32, 32)},
        {"pixel_values": {0: DIM("batch", min=2, max=64)}},
        fxc.CaptureSpec({"hidden": Tap("layers.*", select=[0, -1])}),
    )


FAMILIES = [llama, bert, t5, clip, vit]
# What a process does that has the program and nothing else of the model.
RUN_ELSEWHERE = """
import json, sys, torch
from fxcapture.errors import AmbiguousSiteError
from fxcapture.exporting.program import load

folder, names = sys.argv[1], sys.argv[2:]
for name in names:
    program = load(f"{folder}/{name}.pt2")
    runs = torch.load(f"{folder}/{name}.inputs")
    with torch.no_grad():
        made = [program(**inputs) for inputs in runs]
    records = [dict(captured.records) for captured in made]
    torch.save(records, f"{folder}/{name}.records")
loaded = [m for m in sys.modules if m.split(".")[0] in ("transformers", "tests")]
print(json.dumps(loaded))
"""


def reference(family: Family, inputs: dict[str, Any]) -> Any:
    model, _, _, spec = family
    with torch.no_grad():
        return eager_records(model, spec, lambda: model(**inputs))[1]


def test_programs_give_the_eager_records_in_a_process_without_the_model(
    tmp_path: Path,
) -> None:
    wanted: dict[str, list[Any]] = {}
    for make in FAMILIES:
        name = make.__name__
        family = make()
        model, inputs, dynamic, spec = family
        model.eval()
        with torch.no_grad():
            program = export(model, (), inputs(9), spec=spec, dynamic_shapes=dynamic)
        program.save(tmp_path / f"{name}.pt2")
        runs = [inputs(n) for n in (6, 9, 17)]
        torch.save(runs, tmp_path / f"{name}.inputs")
        wanted[name] = [reference(family, run) for run in runs]

    done = subprocess.run(
        [sys.executable, "-c", RUN_ELSEWHERE, str(tmp_path), *wanted],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(fxc.__file__).parents[1],
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    for name, want in wanted.items():
        records = torch.load(tmp_path / f"{name}.records")
        for expected, got in zip(want, records, strict=True):
            assert_records(expected, fxc.Records(got, {}), 1e-6)


@pytest.mark.inductor
@pytest.mark.parametrize("make", [llama, bert], ids=["llama", "bert"])
def test_a_package_gives_the_eager_records(
    make: Callable[[int], Family], tmp_path: Path
) -> None:
    family = make(1)
    model, inputs, dynamic, spec = family
    model.eval()
    with torch.no_grad():
        program = export(model, (), inputs(9), spec=spec, dynamic_shapes=dynamic)
    package = load_package(program.package(tmp_path / "model.pt2"))

    for n in (6, 9, 17):
        run = inputs(n)
        with torch.no_grad():
            captured = package(**run)

        assert_records(reference(family, run), captured.records, 1e-5)
        assert type(captured.output) is dict


@pytest.mark.parametrize("make", [llama, bert], ids=["llama", "bert"])
def test_onnx_outputs_have_the_records_names(
    make: Callable[[], Family], tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    family = make()
    model, inputs, dynamic, spec = family
    model.eval()
    with torch.no_grad():
        program = export(model, (), inputs(9), spec=spec, dynamic_shapes=dynamic)
    program.onnx(tmp_path / "model.onnx", verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [output.name for output in session.get_outputs()]

    assert names == list(program.output_names)
    for n in (6, 17):
        run = inputs(n)
        fed = {i.name: run[i.name].numpy() for i in session.get_inputs()}
        values = [torch.from_numpy(v) for v in session.run(None, fed)]
        records = program.read(dict(zip(names, values, strict=True)))

        assert_records(reference(family, run), records, 1e-5)


def test_a_plain_program_is_instrumented_after_the_fact(tmp_path: Path) -> None:
    model, inputs, dynamic, _ = llama()
    model.eval()
    with torch.no_grad():
        plain = torch.export.export(model, (), inputs(9), dynamic_shapes=dynamic)
    torch.export.save(plain, tmp_path / "plain.pt2")
    spec = fxc.CaptureSpec({"hidden": Tap("layers.*"), "mlp": Tap("layers.*.mlp")})

    loaded = torch.export.load(tmp_path / "plain.pt2")
    with pytest.raises(AmbiguousSiteError, match="whether LlamaMLP returns one tensor"):
        instrument(loaded, spec)  # its forward declares nothing

    captured = instrument(loaded, spec, assume_tensors=True)

    for n in (6, 17):
        run = inputs(n)
        with torch.no_grad():
            want = eager_records(model, spec, lambda run=run: model(**run))[1]
            assert_records(want, captured(**run).records)
