"""What ``import fxcapture`` offers, and what it must not drag in."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import fxcapture
from fxcapture import errors

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(fxcapture.__path__, "fxcapture.")
)


def run_in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@functools.cache
def loaded_by(statement: str) -> frozenset[str]:
    """Modules that a statement makes a new process import beyond ``import torch``."""
    code = f"""
        import sys, torch
        before = set(sys.modules)
        {statement}
        print(*sorted(set(sys.modules) - before))
        """
    return frozenset(run_in_a_new_process(code).split())


def test_the_package_has_a_version() -> None:
    assert fxcapture.__version__.count(".") == 2


def test_all_is_sorted_and_names_what_the_package_has() -> None:
    names = fxcapture.__all__

    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(fxcapture, name), name


def test_all_is_the_public_namespace() -> None:
    public = {
        name
        for name, value in vars(fxcapture).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    public |= {n for n in fxcapture.__all__ if inspect.ismodule(getattr(fxcapture, n))}

    assert public == set(fxcapture.__all__)


@pytest.mark.parametrize(
    "name", ["CaptureSpec", "Captured", "CapturedModule", "Records", "Tap", "compile"]
)
def test_the_core_is_public(name: str) -> None:
    assert name in fxcapture.__all__


def errors_of_lone_imports(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Module to the error of importing it, where nothing of its package is loaded yet.

    Each is imported in a fork of a process that has loaded torch alone.  The package
    itself is an empty stand-in: what its ``__init__`` imports would hide what a module
    forgets, and which modules import each other.
    """
    code = f"""
        import importlib, json, os, sys, types, torch
        package = types.ModuleType({path.name!r})
        package.__path__ = [{str(path)!r}]
        sys.modules[{path.name!r}] = package
        found = {{}}
        for name in {list(names)!r}:
            reading, writing = os.pipe()
            if not os.fork():
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    os.write(writing, repr(error)[:4000].encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                found[name] = pipe.read()
            assert os.wait()[1] == 0, name
        print(json.dumps(found))
        """
    found: dict[str, str] = json.loads(run_in_a_new_process(code))
    return {name: error for name, error in found.items() if error}


def test_every_module_can_be_imported_alone() -> None:
    assert errors_of_lone_imports(Path(fxcapture.__path__[0]), MODULES) == {}


def test_the_check_of_lone_imports_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("import some_package.one, some_package.two")
    (package / "one.py").write_text("VALUE = 1")
    (package / "two.py").write_text("import some_package; some_package.one.VALUE")
    (package / "three.py").write_text("from some_package.four import VALUE")
    (package / "four.py").write_text("VALUE = 4; from some_package.three import no")
    (package / "five.py").write_text("import some_package.four; OTHER = 5")
    names = [f"some_package.{name}" for name in ("one", "two", "three", "four", "five")]

    found = errors_of_lone_imports(package, names)

    assert set(found) == {f"some_package.{n}" for n in ("two", "three", "four", "five")}
    assert "has no attribute 'one'" in found["some_package.two"]
    assert "circular import" in found["some_package.three"]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize(
    "name",
    [
        "torch._dynamo",
        "torch._inductor",
        "transformers",
        "numpy.testing",
        "typer",
    ],
)
def test_importing_the_package_does_not_import(name: str) -> None:
    assert name not in loaded_by("import fxcapture")


def test_the_import_check_can_fail() -> None:
    assert "torch._dynamo" in loaded_by("import torch._dynamo")


def test_importing_initialises_no_cuda_and_changes_no_state_of_torch() -> None:
    code = """
        import torch
        from torch import nn
        before = dict(vars(nn.Module)), torch.get_default_dtype(), torch.initial_seed()
        hooks = dict(nn.modules.module._global_forward_hooks)
        import fxcapture
        after = dict(vars(nn.Module)), torch.get_default_dtype(), torch.initial_seed()
        assert before == after
        assert hooks == dict(nn.modules.module._global_forward_hooks)
        print(torch.cuda.is_initialized())
        """

    assert run_in_a_new_process(code) == "False"


def test_every_error_class_is_listed_and_drawn_in_the_tree() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.FxCaptureError)
    }

    assert classes <= set(errors.__all__)
    for name in classes:
        assert name in errors.__doc__


def test_public_functions_and_classes_have_docstrings_with_types() -> None:
    for name in fxcapture.__all__:
        value = getattr(fxcapture, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters.values():
                assert parameter.annotation is not parameter.empty, (name, parameter)
