"""Which module may import which: one direction, and private torch in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fxcapture

PACKAGE = Path(fxcapture.__file__).parent

#: Layers of the core, lowest first; a module imports from its own layer or below.
LAYERS = (
    ("errors", "_compat"),
    ("attention_kernel",),
    ("structure", "attention", "reductions"),
    ("selector",),
    ("spec",),
    ("attention_tap",),
    ("sites", "records"),
    ("mark", "declare"),
    ("match",),
    ("plan", "declared_spec", "outputs"),
    ("passes",),
    ("frame", "manifest"),
    ("frontends",),
    ("drawing", "drawing_svg", "drawing_text", "fake_run", "liveness", "memory"),
    ("program",),
    ("reference",),
    ("verification",),
    ("testing",),
)
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}

#: Extras: nothing of the core may import them.
EXTRAS = (
    "transformers",
    "typer",
    "rich",
    "yaml",
    "matplotlib",
    "numpy",
    "onnx",
    "peft",
    "accelerate",
)


def files(*parts: str) -> list[Path]:
    return sorted(PACKAGE.joinpath(*parts).rglob("*.py"))


def part_of(path: Path) -> str:
    """The layer name of a file: the first part of its path inside the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports when it is imported, and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(str(node.module))
    return found


def own_parts(path: Path) -> set[str]:
    names = {n.split(".")[1] for n in imports_of(path) if n.startswith("fxcapture.")}
    return {
        n for n in names if (PACKAGE / n).exists() or (PACKAGE / f"{n}.py").exists()
    }


core_files = [p for p in files() if part_of(p) in RANK and p.name != "__init__.py"]


@pytest.mark.parametrize("path", core_files, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_core_module_imports_from_its_layer_or_below(path: Path) -> None:
    rank = RANK[part_of(path)]

    upward = {n for n in own_parts(path) if RANK.get(n, len(LAYERS)) > rank}

    assert not upward


@pytest.mark.parametrize("path", core_files, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_core_module_needs_torch_alone(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}

    assert not roots & set(EXTRAS)


#: Private names outside of ``_compat``; it should only shrink.
ALLOWED_PRIVATE = {
    # The class of operator overloads has no public name.
    ("prune_unneeded.py", "torch._ops"),
    ("prune_unneeded.py", "torch._ops.OpOverload"),
    ("fx.py", "torch._ops"),
    ("fx.py", "torch._ops.OpOverload"),
    ("resolve.py", "torch._dynamo"),
    ("resolve.py", "torch._dynamo.config"),
}


def private_torch(path: Path) -> set[str]:
    """Private names of torch that a file mentions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            found.add(ast.unparse(node))
    private = {n for n in found if re.match(r"torch\.(.+\.)?_[a-z]", n)}
    # Operators may have an underscore in their name, and so have documented checks.
    return {n for n in private if not re.match(r"torch\.(ops\.|_check|_assert)", n)}


def test_private_torch_is_used_in_one_place_alone() -> None:
    places = ("_compat.py", "_dynamo.py")

    found = {
        (path.name, name)
        for path in files()
        if path.name not in places
        for name in private_torch(path)
    }

    assert found <= ALLOWED_PRIVATE


def test_the_check_for_private_names_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "uses.py"
    path.write_text("import torch._dynamo\ntorch._guards.tracing\ntorch._check(x)\n")

    assert private_torch(path) == {"torch._dynamo", "torch._guards"}


def test_the_layers_name_files_that_exist() -> None:
    for name in RANK:
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name


def test_no_file_is_longer_than_the_house_style_allows() -> None:
    lengths = {p.name: len(p.read_text().splitlines()) for p in files()}

    assert {n: k for n, k in lengths.items() if k > 600} == {}


@pytest.mark.parametrize("path", files("passes"), ids=lambda p: p.name)
def test_a_pass_reads_no_environment_and_keeps_no_state(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert "os" not in {name.split(".")[0] for name in imports_of(path)}
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Global, ast.Nonlocal))]


def test_no_bare_except_and_no_assert_on_what_users_pass() -> None:
    for path in [PACKAGE / "spec.py", PACKAGE / "selector.py", PACKAGE / "program.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), path.name
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, path.name
