"""transformers' own capture tests, with its implementation and with ours.

Fetches the source distribution of the installed transformers release from the package
index, runs those of its tests that are about capture (the monkey-patching tests, and
the common model tests for six model families) twice, and then reports, as a pytest run,
each test that passes with transformers' implementation: it has to pass with ours.

    python scripts/transformers_tests.py [--cache DIR] [-k EXPRESSION]

The source distribution holds the common tests, but neither the families' own test files
nor two mix-ins that the common tests inherit from; small configurations and empty
classes stand in for them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = (
    "can_capture_specific_layers",
    "hidden_states_output",
    "attention_outputs",
    "model_outputs_equivalence",
    "format_of_can_record_outputs",
    "capture_outputs_decorator",
    "retain_grad_hidden_states_attentions",
    "router_logits",
    "image_features",
    "gradient_checkpointing",
    "determinism",
    "MonkeyPatch",
)
#: Needs the network, or a package that is not installed, with either implementation.
UNWANTED = ("peft", "deepspeed")

FAMILIES = """
import unittest
import torch
from transformers import *
from .test_modeling_common import ModelTesterMixin, ids_tensor, floats_tensor
from .test_modeling_common import random_attention_mask

TEXT = dict(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2,
            num_attention_heads=4)
VISION = dict(hidden_size=32, intermediate_size=37, num_hidden_layers=3,
              num_attention_heads=4, image_size=16, patch_size=8)


class Tester:
    batch_size, seq_length, is_training = 2, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    vocab_size = 99

    def __init__(self, make, **fields):
        self.make = make
        self.__dict__.update(fields)

    def get_config(self):
        return self.make()

    def inputs(self):
        ids = ids_tensor([2, 7], 90) + 3
        return {"input_ids": ids, "attention_mask": random_attention_mask([2, 7])}

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.inputs()


class SeqTester(Tester):
    def inputs(self):
        ids = ids_tensor([2, 7], 90) + 3
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids,
                "decoder_attention_mask": mask}


class VisionTester(Tester):
    def inputs(self):
        return {"pixel_values": floats_tensor([2, 3, 16, 16])}


class LlavaTester(Tester):
    vision_config = VISION

    def inputs(self):
        ids = ids_tensor([2, 7], 90) + 3
        ids[ids == 98] = 97
        ids[:, 1:5] = 98
        return {"pixel_values": floats_tensor([2, 3, 16, 16]), "input_ids": ids,
                "attention_mask": torch.ones_like(ids)}


class Common(ModelTesterMixin):
    def setUp(self):
        self.model_tester = self.tester()


class LlamaTest(Common, unittest.TestCase):
    all_model_classes = (LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification,
                         LlamaForTokenClassification)

    def tester(self):
        return Tester(lambda: LlamaConfig(
            **TEXT, num_key_value_heads=2, pad_token_id=0))


class BertTest(Common, unittest.TestCase):
    all_model_classes = (BertModel, BertForMaskedLM, BertForTokenClassification,
                         BertForSequenceClassification, BertForQuestionAnswering)

    def tester(self):
        return Tester(lambda: BertConfig(**TEXT))


class T5Test(Common, unittest.TestCase):
    all_model_classes = (T5Model, T5ForConditionalGeneration)
    is_encoder_decoder = True

    def tester(self):
        return SeqTester(lambda: T5Config(
            vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2,
            num_decoder_layers=2, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1))


class Qwen2MoeTest(Common, unittest.TestCase):
    all_model_classes = (Qwen2MoeModel, Qwen2MoeForCausalLM)
    test_all_params_have_gradient = False

    def tester(self):
        return Tester(lambda: Qwen2MoeConfig(
            **TEXT, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4,
            shared_expert_intermediate_size=16, num_experts_per_tok=2, pad_token_id=0))


class CLIPVisionTest(Common, unittest.TestCase):
    all_model_classes = (CLIPVisionModel, CLIPVisionModelWithProjection)

    def tester(self):
        return VisionTester(lambda: CLIPVisionConfig(**VISION, projection_dim=32),
                            seq_length=5, num_hidden_layers=3, is_training=False)


class LlavaTest(Common, unittest.TestCase):
    all_model_classes = (LlavaModel, LlavaForConditionalGeneration)
    _is_composite = True
    # The layers above the selected one do not take part.
    test_all_params_have_gradient = False

    def tester(self):
        return LlavaTester(lambda: LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION),
            text_config=LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=0),
            image_token_index=98, vision_feature_layer=-2))
"""

CONFTEST = """
import os
if os.environ.get("FXCAPTURE_STANDS_IN"):
    from fxcapture.integrations import transformers as integration
    integration.install()
"""

COMPARISON = """
import json, pathlib
import pytest
RESULTS = json.loads(pathlib.Path(__file__).with_name("results.json").read_text())
PASSING = sorted(t for t, outcome in RESULTS["theirs"].items() if outcome == "passed")

def test_there_is_something_to_compare():
    assert len(PASSING) >= 60, f"only {len(PASSING)} tests pass with transformers"

@pytest.mark.parametrize("test", PASSING)
def test_what_passes_with_transformers_passes_with_ours(test):
    assert RESULTS["ours"].get(test) == "passed"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="keep the download here")
    parser.add_argument("-k", dest="only", help="a pytest expression")
    options = parser.parse_args()
    version = importlib.metadata.version("transformers")
    with tempfile.TemporaryDirectory() as scratch:
        cache = options.cache or Path(scratch) / "cache"
        work = Path(scratch) / "work"
        fetch(version, cache)
        lay_out(cache / f"transformers-{version}.tar.gz", work)
        expression = options.only or (
            f"({' or '.join(WANTED)}) and not ({' or '.join(UNWANTED)})"
        )
        results = {
            who: run(who, work, cache / "packages", expression)
            for who in ("theirs", "ours")
        }
        return compare(work, results)


def fetch(version: str, cache: Path) -> None:
    """Download the source distribution, and a package that its tests import."""
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    if not (cache / f"transformers-{version}.tar.gz").exists():
        command = ["download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run(
            [*pip, *command, f"transformers=={version}", "-d", str(cache)], check=True
        )
    if not (cache / "packages").exists():
        command = ["install", "--no-deps", "--target", str(cache / "packages")]
        subprocess.run([*pip, *command, "parameterized>=0.9"], check=True)


def lay_out(archive: Path, work: Path) -> None:
    """The tests of the archive as a package, with stand-ins for what it leaves out."""
    tests = work / "tests"
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if "/tests/" in m.name and m.isfile()]
        for member in members:
            target = tests / member.name.split("/tests/", 1)[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            if source is not None:
                target.write_bytes(source.read())
    for package, module, name in (
        ("exporters", "test_export", "ExportTesterMixin"),
        ("generation", "test_utils", "GenerationTesterMixin"),
    ):
        folder = tests / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        if not (folder / f"{module}.py").exists():
            (folder / f"{module}.py").write_text(f"class {name}: ...\n")
    (tests / "__init__.py").touch()
    (tests / "test_capture_families.py").write_text(FAMILIES)
    (work / "conftest.py").write_text(CONFTEST)
    (work / "pytest.ini").write_text("[pytest]\n")


def run(who: str, work: Path, packages: Path, expression: str) -> dict[str, str]:
    """Outcome of each test, with one of the implementations."""
    report = work / f"{who}.xml"
    paths = [str(work), str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "FXCAPTURE_STANDS_IN": "1" if who == "ours" else "",
    }
    files = ["tests/test_capture_families.py", "tests/test_monkey_patching.py"]
    print(f"-- with {who} --", flush=True)
    subprocess.run(
        [
            *[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
            *["-k", expression, f"--junitxml={report}", "--tb=short", "-W", "ignore"],
        ],
        cwd=work,
        env=environment,
        check=False,
    )
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        failed = children & {"failure", "error"}
        outcome = (
            "failed" if failed else "skipped" if "skipped" in children else "passed"
        )
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return outcomes


def compare(work: Path, results: dict[str, dict[str, str]]) -> int:
    """The comparison as a pytest run of its own, which ends the output."""
    folder = work / "comparison"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "test_comparison.py").write_text(COMPARISON)
    (folder / "pytest.ini").write_text("[pytest]\n")
    better = sorted(
        test
        for test, outcome in results["ours"].items()
        if outcome == "passed" and results["theirs"].get(test) == "failed"
    )
    print(f"-- passing with ours and failing with theirs: {len(better)} --")
    print("\n".join(better), flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"],
        cwd=folder,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
