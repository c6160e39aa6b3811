"""What ``import fxcapture`` offers, and what it must not drag in."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap

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


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_alone(name: str) -> None:
    if name == "fxcapture.cli":
        pytest.importorskip("typer")
    importlib.import_module(name)


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
