"""Models that are made, called and dropped: how many live on, and how many bytes.

Run as ``python -m tests.soak.memory MODE COUNT``, in a process of its own: it prints
one JSON object.  Bytes are those that Python has allocated, as ``tracemalloc`` counts
them, and those of live tensors.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxcapture as fxc
from tests.soak.programs import Decorated, Model, Undecorated, draw_input

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


Make, Use = Callable[[], nn.Module], Callable[[nn.Module], None]
#: Mode to (makes a model, uses it), captured and plain.
MODES: dict[str, tuple[tuple[Make, Use], tuple[Make, Use]]] = {
    "whole": (
        (Model, lambda m: _captured(m, fullgraph=True)),
        (Model, lambda m: _plain(m, fullgraph=True)),
    ),
    "whole, with gradients": (
        (Model, lambda m: _captured(m, grad=True, fullgraph=True)),
        (Model, lambda m: _plain(m, grad=True, fullgraph=True)),
    ),
    "pieces": (
        (lambda: Model(breaks=True), _captured),
        (lambda: Model(breaks=True), _plain),
    ),
    "regions": (
        (Model, lambda m: _captured(m, regions="blocks.*")),
        (Model, _plain_regions),
    ),
    "selections": ((Model, _selected), (Model, lambda m: _plain(m, fullgraph=True))),
    "declared": (
        (Decorated, lambda m: fxc.compile(m, backend=BACKEND)(*draw_input()) and None),
        (Undecorated, lambda m: torch.compile(m, backend=BACKEND)(*draw_input())),
    ),
    "decorated, compiled": (
        (Decorated, _asked),
        (Undecorated, lambda m: torch.compile(m, backend=BACKEND)(*draw_input())),
    ),
    "exported": (
        (Model, _exported),
        (Model, lambda m: torch.export.export(m, draw_input()).module()(*draw_input())),
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
        model = make()
        with torch.set_grad_enabled("gradients" in mode):
            use(model)
        refs += [weakref.ref(model), weakref.ref(model.blocks[0])]  # type: ignore[index, union-attr]
        del model
        gc.collect()
    found: dict[str, float] = {"alive": sum(ref() is not None for ref in refs)}
    if count:
        found["bytes_per_model"] = (_bytes() - bytes_before) / count
        tracemalloc.stop()
    return found


def _bytes() -> int:
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
