"""README and docs: every code block runs, every link leads somewhere.

Python blocks of a page run in order in one namespace, console blocks through the
command line or in a process of their own; a block with a title is a file, which later
ones use; of others the syntax is checked.  Where a block names no backend it would wait
for a C++ compiler: here the default is ``aot_eager``, which gives the same values.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fxcapture as fxc
from fxcapture import errors
from fxcapture.integrations import transformers as integration

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')

#: What a reader of a page has and its blocks leave out: page, block, code before it.
GIVEN = {
    ("docs/model-authors.md", 1): """
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput as MyOutput

class MyAttention(nn.Module):
    def forward(self, x):
        return x, x @ x.mT

class MyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = MyAttention()

    def forward(self, x, **kwargs):
        return x + self.self_attn(x)[0]
""",
    ("docs/model-authors.md", 2): """
import types

model = MyModel()
model.config = types.SimpleNamespace(
    num_hidden_layers=3, use_cache=False, output_hidden_states=False,
    output_attentions=False, return_dict=True,
)
model.embed, model.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
model.layers = nn.ModuleList(MyBlock() for _ in range(3))
ids = torch.arange(6).reshape(1, 6)
""",
    ("docs/attention.md", 1): """
import torch
import fxcapture as fxc
from transformers import LlamaConfig, LlamaModel

model = LlamaModel(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=5,
    num_attention_heads=2, vocab_size=50, use_cache=False,
)).eval()
ids, mask = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
""",
    ("docs/memory.md", 1): """
import torch
import fxcapture as fxc
from transformers import LlamaConfig, LlamaModel

inner = LlamaModel(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=5,
    num_attention_heads=2, vocab_size=50, use_cache=False,
)).eval()
ids, mask = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)

class WithHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.lm_head = inner, torch.nn.Linear(32, 50)
        self.layers = inner.layers

    def forward(self, ids, attention_mask):
        states = self.inner(ids, attention_mask=attention_mask)
        return self.lm_head(states.last_hidden_state)

model = WithHead()
positions = torch.tensor([0, 3])
""",
    ("docs/export.md", 1): """
import torch
from torch import nn
import fxcapture as fxc

class Model(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.fc = first, nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x)

model = Model(nn.Embedding(9, 4))
ids = torch.zeros(2, 5, dtype=torch.long)
""",
    ("docs/export.md", 5): """
torch.export.save(torch.export.export(model, (ids,)), "theirs.pt2")
""",
    ("docs/export.md", 6): """
spec = fxc.CaptureSpec({"hidden": fxc.Tap("layers.*")})
""",
    ("docs/export.md", 7): """
model, x = Model(nn.Identity()), torch.randn(3, 4)
""",
    ("docs/export.md", 8): """
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                     num_attention_heads=2)
""",
    ("docs/transformers.md", 2): """
import torch
from transformers import LlamaConfig, LlamaModel

class AutoModel:
    @staticmethod
    def from_pretrained(name):
        return LlamaModel(LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, vocab_size=50, use_cache=False,
        )).eval()

inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
""",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


@pytest.fixture
def quick_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(fxc.compile.__kwdefaults__, "backend", "aot_eager")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    # A page that installs the integration leaves it installed.
    integration.uninstall()
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def run_blocks(page: Path, namespace: dict[str, Any]) -> int:
    """Run a page's blocks, and say how many there were."""
    count = 0
    found = BLOCK.findall(page.read_text())
    printed = ""  # by the block before, and not shown yet
    for language, info, code in found:
        if language == "text":
            check_output(code, printed)
            printed = ""
            continue
        assert not (printed and shows_output(page)), f"not shown:\n{printed}"
        printed = ""
        title = TITLE.search(info)
        if title:
            Path(title[1]).write_text(code)
        if language == "python" and not title:
            count += 1
            exec(GIVEN.get((name_of(page), count), ""), namespace)
            with contextlib.redirect_stdout(io.StringIO()) as written:
                exec(compile(code, f"{page.name}, block {count}", "exec"), namespace)
            printed = written.getvalue()
        elif language == "python":
            compile(code, f"{page.name}, {title}", "exec")
        elif language == "console":
            run_console(code)
        elif language == "sh":
            check_make(code)
        elif language == "json":
            json.loads(code)
        else:
            assert language == "yaml", f"a block of {language!r} is not checked"
            yaml.safe_load(code)
    assert not (printed and shows_output(page)), f"not shown:\n{printed}"
    return len(found)


def shows_output(page: Path) -> bool:
    """Whether a page shows what each of its blocks prints."""
    return name_of(page).startswith(
        ("README", "docs/index", "docs/tutorial", "docs/how-to/")
    )


def check_output(shown: str, printed: str) -> None:
    """Compare what a page shows with what ran; ``...`` stands for what varies."""
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert checker.check_output(shown, printed, flags), f"it printed:\n{printed}"


def new_module(page: Path) -> dict[str, Any]:
    """A namespace that is a module: Dynamo looks up what a class refers to there."""
    name = "docs_" + re.sub(r"\W", "_", name_of(page))
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


def run_console(code: str) -> None:
    for line in code.splitlines():
        dollar, program, *arguments = shlex.split(line)
        assert (dollar, program in ("fxcapture", "python")) == ("$", True), line
        if program == "python":
            run_python(arguments)
        else:
            run_fxcapture(arguments)


def run_fxcapture(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from fxcapture.cli.app import app

    if arguments[0] in ("verify", "bench") and "--backend" not in arguments:
        arguments = [*arguments, "--backend", "aot_eager"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{shlex.join(arguments)}\n{result.output}"


def run_python(arguments: list[str]) -> None:
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_make(code: str) -> None:
    """Shell blocks call ``make``, with targets that exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in code.splitlines():
        program, target, *_ = shlex.split(line, comments=True)
        assert program == "make", line
        assert target in targets, line


@pytest.mark.usefixtures("quick_backend")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs(page: Path) -> None:
    torch._dynamo.reset()
    run_blocks(page, new_module(page))


@pytest.mark.usefixtures("quick_backend")
def test_the_code_of_the_readme_runs() -> None:
    readme = ROOT / "README.md"

    # As pasted: it needs torch alone.
    assert "transformers" not in BLOCK.findall(readme.read_text())[0][2]
    assert run_blocks(readme, new_module(readme)) > 0


@pytest.mark.usefixtures("quick_backend")
def test_the_picture_on_the_first_page_is_of_the_model_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    drawn = importlib.import_module("make_images").draw_readme()

    assert drawn == (ROOT / "docs/images/readme.svg").read_text()
    for page in ("README.md", "docs/index.md"):
        assert "images/readme.svg" in (ROOT / page).read_text()
    first = [
        next(code for language, _, code in BLOCK.findall(page) if language == "python")
        for page in map(Path.read_text, (ROOT / "README.md", ROOT / "docs/index.md"))
    ]
    assert first[0] == first[1]


@pytest.mark.usefixtures("quick_backend")
def test_contributing_names_targets_that_exist() -> None:
    assert run_blocks(ROOT / "CONTRIBUTING.md", {}) > 0


@pytest.mark.usefixtures("quick_backend")
@pytest.mark.parametrize(
    "block",
    [
        "python\nassert 1 == 2",
        'python title="x.py"\ndef f(:',
        "console\n$ fxcapture sites nowhere:at_all",
        "console\n$ python missing.py",
        "console\nfxcapture --help",
        "sh\nmake nothing",
        "sh\ncurl somewhere",
        "yaml\na: [",
        "json\n{",
        "cpp\nint main();",
        "text\nprinted by nothing",
        "python\nprint(1)\n```\n\n```text\n2",
    ],
)
def test_a_block_that_fails_is_noticed(block: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{block}\n```\n")

    with pytest.raises((AssertionError, SyntaxError, ValueError, yaml.YAMLError)):
        run_blocks(page, {})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_relative_links_lead_to_files(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{target} in {name_of(page)}"


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    text = (site / "api" / "index.html").read_text()
    shown = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r":\w+:<|::\s*<|=====", shown)


def test_every_public_name_stands_in_the_api_page() -> None:
    text = (ROOT / "docs/api.md").read_text()
    entries = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    shown = {entry.rpartition(".")[2] for entry in entries}
    for module in ("modeling.decorators", "errors"):
        shown |= set(importlib.import_module(f"fxcapture.{module}").__all__)

    assert set(fxc.__all__) <= shown


def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    to_markdown = importlib.import_module("griffe_markdown").to_markdown

    assert to_markdown("See :class:`~a.Tap` and :func:`f`.") == "See `a.Tap` and `f`."
    assert to_markdown("One.\n\nExample::\n\n    f(1)\n\n    g()\n\nTwo.") == (
        "One.\n\n**Example**\n\n```python\nf(1)\n\ng()\n```\n\nTwo."
    )
    table = "====  =====\na     b\n====  =====\nc     d\n      e\n====  ====="
    assert to_markdown(table) == "| a | b |\n| --- | --- |\n| c | d e |"
    assert to_markdown("Terms\n    x: one,\n        two.\n    y: three.\n") == (
        "**Terms**\n\n- x: one,\n    two.\n- y: three."
    )
    assert to_markdown("Invariants\n    Never.") == "**Invariants.** Never."


def test_every_public_error_has_a_page_and_stands_in_the_index() -> None:
    classes = [n for n in errors.__all__ if isinstance(getattr(errors, n), type)]
    index = (ROOT / "docs/errors/index.md").read_text()

    for name in classes:
        text = (ROOT / f"docs/errors/{name}.md").read_text()
        for heading in ("Symptom", "Cause", "Triggers", "Fix"):
            assert f"## {heading}" in text, name
        assert f"{name}.md" in index


def test_the_navigation_names_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/-]+\.md)", text))

    assert named == {str(p.relative_to(ROOT / "docs")) for p in PAGES}


def test_the_guarantees_point_to_tests_that_exist() -> None:
    text = (ROOT / "docs/guarantees.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", text))

    assert len(named) > 5
    assert [n for n in named if not (ROOT / n).is_file()] == []


def test_results_that_documents_name_exist_and_say_where_they_are_from() -> None:
    pages = [*PAGES, ROOT / "README.md"]
    named = {
        name
        for page in pages
        for name in re.findall(r"benchmarks/results/([\w]+)\.md", page.read_text())
    }

    for name in named:
        stored = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        # A benchmark with a stamp of its own names at least torch and the threads.
        stamp = json.dumps(stored["environment"])
        assert "torch" in stamp, name
        assert "threads" in stamp, name
