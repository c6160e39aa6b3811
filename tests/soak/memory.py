"""Models that are made, called and dropped: how many live on, and how many bytes.

Run as ``python -m tests.soak.memory MODE captured|plain COUNT``, in a process of its
own: it prints one JSON object.  Bytes are those that Python has allocated, as
``tracemalloc`` counts them, and those of live tensors.

Each model is of classes of its own: for a second instance of a class, plain
``torch.compile`` takes what it compiled for the first one, and would keep nothing new.
What torch keeps in caches of bounded size, of whatever it compiles, is emptied first.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from tests.soak import programs
from tests.soak.programs import draw_input

#: Models before the first measurement: caches of torch fill up.
WARM = 4
BACKEND = "aot_eager"
SPEC = {"h": "blocks.*"}


def _captured(model: nn.Module, grad: bool = False, **settings: Any) -> None:
    captured = fxc.compile(model, SPEC, backend=BACKEND, **settings)
    output, records = captured(*draw_input())
    if grad:
        (output.sum() + records["h"][1].sum()).backward()


def _selected(model: nn.Module) -> None:
    captured = fxc.compile(model, SPEC, backend=BACKEND, fullgraph=True)
    for i in range(3):
        captured(*draw_input(), select={"h": [i]})


def _plain(model: nn.Module, grad: bool = False, **settings: Any) -> None:
    output = torch.compile(model, backend=BACKEND, **settings)(*draw_input())
    if grad:
        output.sum().backward()


def _plain_regions(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    model(*draw_input())


def _asked(model: nn.Module) -> None:
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    compiled(*draw_input(), output_hidden_states=True)


def _exported(model: nn.Module) -> None:
    fxc.export(model, draw_input(), spec=SPEC)(*draw_input())


Make, Use = Callable[[Any], nn.Module], Callable[[nn.Module], None]
#: Mode to (makes a model, uses it), captured and plain.
MODES: dict[str, tuple[tuple[Make, Use], tuple[Make, Use]]] = {
    "whole": (
        (lambda p: p.Model(), lambda m: _captured(m, fullgraph=True)),
        (lambda p: p.Model(), lambda m: _plain(m, fullgraph=True)),
    ),
    "whole, with gradients": (
        (lambda p: p.Model(), lambda m: _captured(m, grad=True, fullgraph=True)),
        (lambda p: p.Model(), lambda m: _plain(m, grad=True, fullgraph=True)),
    ),
    "pieces": (
        (lambda p: p.Model(breaks=True), _captured),
        (lambda p: p.Model(breaks=True), _plain),
    ),
    "regions": (
        (lambda p: p.Model(), lambda m: _captured(m, regions="blocks.*")),
        (lambda p: p.Model(), _plain_regions),
    ),
    "selections": (
        (lambda p: p.Model(), _selected),
        (lambda p: p.Model(), lambda m: _plain(m, fullgraph=True)),
    ),
    "declared": (
        (
            lambda p: p.Decorated(),
            lambda m: fxc.compile(m, backend=BACKEND)(*draw_input()) and None,
        ),
        (
            lambda p: p.Undecorated(),
            lambda m: torch.compile(m, backend=BACKEND)(*draw_input()),
        ),
    ),
    "decorated, compiled": (
        (lambda p: p.Decorated(), _asked),
        (
            lambda p: p.Undecorated(),
            lambda m: torch.compile(m, backend=BACKEND)(*draw_input()),
        ),
    ),
    "exported": (
        (lambda p: p.Model(), _exported),
        (
            lambda p: p.Model(),
            lambda m: torch.export.export(m, draw_input()).module()(*draw_input()),
        ),
    ),
}


def run(mode: str, count: int, *, plain: bool, warm: int = WARM) -> dict[str, float]:
    """Make, call and drop ``count`` models after the first, ``warm`` ones.

    Returns:
        ``alive``: models that live on; ``bytes_per_model``: what each after the first
        ones has left, where there are any.
    """
    make, use = MODES[mode][plain]
    refs: list[weakref.ref[Any]] = []
    bytes_before = 0
    for i in range(warm + count):
        if i == warm:
            tracemalloc.start()
            bytes_before = _bytes()
        name = f"{programs.__name__}_{next(_numbers)}"
        model = make(_import_anew(name))
        with torch.set_grad_enabled("gradients" in mode):
            use(model)
        refs += [weakref.ref(model), weakref.ref(model.blocks[0])]  # type: ignore[index, union-attr]
        del model, sys.modules[name]
        gc.collect()
    found: dict[str, float] = {"alive": sum(ref() is not None for ref in refs)}
    if count:
        found["bytes_per_model"] = (_bytes() - bytes_before) / count
        tracemalloc.stop()
    return found


_numbers = itertools.count()


def _import_anew(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, programs.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _bytes() -> int:
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.bytecode_transformation._cached_cleaned_instructions.cache_clear()
    gc.collect()
    tensors = sum(
        o.untyped_storage().nbytes()
        for o in gc.get_objects()
        if type(o) in (torch.Tensor, nn.Parameter)
    )
    return tracemalloc.get_traced_memory()[0] + tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], int(sys.argv[3]), plain=sys.argv[2] == "plain")))
