"""Which package may import which: one direction, and private torch in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fxcapture

PACKAGE = Path(fxcapture.__file__).parent

#: Packages and top-level files, lowest first.  A file imports from its own package or
#: from a lower one; a package may not import from a higher one in any way, not inside
#: a function and not for annotations.
ORDER = (
    "errors",
    "_torch",
    "reductions",
    "spec",
    "trace",
    "plan",
    "passes",
    "inspect",
    "runtime",
    "exporting",
    "foreign",
    "modeling",
    "testing",
    "integrations",
    "__init__",
    "cli",
    "__main__",
)
RANK = {name: i for i, name in enumerate(ORDER)}

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
    "safetensors",
)
#: Where an extra belongs, and may be imported.
OF_EXTRAS = ("integrations", "cli")


def files(*parts: str) -> list[Path]:
    return sorted(PACKAGE.joinpath(*parts).rglob("*.py"))


def name_of(path: Path) -> str:
    """A file's dotted name without the leading ``fxcapture.``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in files()}


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top, in functions, for annotations."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(str(node.module))
    return found


def own_imports(path: Path) -> set[str]:
    """The files of this package that a file imports, by their dotted names."""
    found = set()
    for name in imports_of(path):
        own = name.removeprefix("fxcapture.")
        if name == "fxcapture":
            continue
        if name.startswith("fxcapture.") and own in NAMES:
            found.add(own)
    if "fxcapture" in imports_of(path) and not found:
        found.add("__init__")
    return found


def package_of(name: str) -> str:
    return name.split(".")[0]


every_file = pytest.mark.parametrize(
    "path", files(), ids=lambda p: str(p.relative_to(PACKAGE))
)


@every_file
def test_a_file_imports_from_its_package_or_a_lower_one(path: Path) -> None:
    if name_of(path) == "__init__":
        return  # it names what is public, of every package
    rank = RANK[package_of(name_of(path))]

    upward = {n for n in own_imports(path) if RANK[package_of(n)] > rank}

    assert not upward


def test_every_file_belongs_to_a_package_of_the_order() -> None:
    assert {package_of(name) for name in NAMES} <= set(ORDER)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name_of(p): own_imports(p) for p in files() if name_of(p) != "__init__"}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name in done:
            return
        for other in graph.get(name, ()):
            if other != name:
                visit(other, (*way, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def nested_imports(path: Path) -> set[str]:
    """What a file imports of this package inside a function, or for annotations."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in tree.body:
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or names[0]
            if module.split(".")[0] == "fxcapture":
                found.add(module)
    return found


@every_file
def test_nothing_of_this_package_is_imported_inside_a_function(path: Path) -> None:
    # The command line says in one place what it needs besides torch.
    allowed = {"fxcapture.cli.app"} if name_of(path) == "cli" else set()

    assert nested_imports(path) <= allowed


@every_file
def test_the_core_needs_torch_alone(path: Path) -> None:
    if package_of(name_of(path)) in OF_EXTRAS:
        return
    roots = {name.split(".")[0] for name in imports_of(path)}

    assert not roots & set(EXTRAS)


PRIVATE_ATTRIBUTES = re.compile(r"torch\.(.+\.)?_[a-z]")


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
    private = {n for n in found if PRIVATE_ATTRIBUTES.match(n)}
    # Operators may have an underscore in their name, and so have documented checks.
    return {n for n in private if not re.match(r"torch\.(ops\.|_check|_assert)", n)}


def test_private_torch_is_used_in_one_package_alone() -> None:
    found = {
        (name_of(path), name)
        for path in files()
        if package_of(name_of(path)) != "_torch"
        for name in private_torch(path)
    }

    assert found == set()


def test_the_check_for_private_names_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "uses.py"
    path.write_text("import torch._dynamo\ntorch._guards.tracing\ntorch._check(x)\n")

    assert private_torch(path) == {"torch._dynamo", "torch._guards"}


def test_no_file_is_longer_than_the_house_allows() -> None:
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in files()}

    assert {n: k for n, k in lengths.items() if k > 400} == {}


def test_few_files_stand_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 3


@pytest.mark.parametrize("path", files("passes"), ids=lambda p: p.name)
def test_a_pass_reads_no_environment_and_keeps_no_state(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert "os" not in {name.split(".")[0] for name in imports_of(path)}
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Global, ast.Nonlocal))]


def test_no_bare_except_and_no_assert_on_what_users_pass() -> None:
    checked = [*files("spec"), PACKAGE / "runtime" / "captured_module.py"]
    for path in checked:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), path.name
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, path.name
