"""Peak of memory with capture: live bytes from allocation events, and resident size.

Each variant runs in a process of its own, compiled with Inductor.  The peak of live
bytes is the largest sum of allocations minus frees during one call, the call's own
results included, parameters not.  Run it::

    python -m benchmarks.bench_memory [--quick]
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch

import fxcapture as fxc
from benchmarks.harness import Report, child, main
from benchmarks.models import llama, quiet, token_ids
from fxcapture.spec.attention_tap import AttentionWeights

LAYERS = "layers.*"
MiB = 2**20

#: Variant to the spec, or to a way of its own to capture.
SPECS: dict[str, Callable[[], dict[str, fxc.Tap]]] = {
    "one state": lambda: {"h": fxc.Tap(LAYERS, select=[3])},
    "one state, mask not shared": lambda: {"h": fxc.Tap(LAYERS, select=[3])},
    "two states": lambda: {"h": fxc.Tap(LAYERS, select=[1, 5])},
    "all states": lambda: {"h": fxc.Tap(LAYERS)},
    "all states, mask not shared": lambda: {"h": fxc.Tap(LAYERS)},
    "one state, last token": lambda: {"h": fxc.Tap(LAYERS, select=[3], reduce="last")},
    "all states, last token": lambda: {"h": fxc.Tap(LAYERS, reduce="last")},
    "one layer's weights": lambda: {
        "a": AttentionWeights("layers.*.self_attn", select=[3])
    },
    "two layers' weights": lambda: {
        "a": AttentionWeights("layers.*.self_attn", select=[1, 5])
    },
    "one layer's weights, last query": lambda: {
        "a": AttentionWeights("layers.*.self_attn", select=[3], queries=-1)
    },
}
OTHERS = ("plain", "plain, all states by transformers", "plain, hooks on all layers")
QUICK = (
    "plain", "one state", "two states", "all states", "one state, last token",
    "one layer's weights",
)  # fmt: skip
#: Title to (sizes, variants); the first is the quick one too.
BASE = {"hidden_size": 256, "num_hidden_layers": 8, "batch": 4, "length": 1024}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "batch 4 x 1024, padded": (BASE, (*OTHERS, *SPECS)),
    "batch 4 x 2048, padded": (BASE | {"length": 2048}, QUICK),
    "batch 4 x 1024, no mask": (BASE | {"padded": False}, QUICK),
}


def measure(variant: str, **sizes: int) -> dict[str, float]:
    """Peak and kept bytes of one call of one variant; runs in a child."""
    quiet()
    batch, length = sizes.pop("batch"), sizes.pop("length")
    padded = sizes.pop("padded", True)
    model = llama(**sizes).model
    ids = token_ids(batch, length)
    mask = None
    if padded:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, -length // 10 :] = 0
    call = _call(variant, model)
    with torch.no_grad():
        for _ in range(2):
            call(ids, mask)
        peak, kept = _live_bytes(lambda: call(ids, mask))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak, "kept": kept, "resident": resident}


def _call(variant: str, model: Any) -> Callable[..., Any]:
    if variant in SPECS:
        captured = fxc.compile(model, SPECS[variant](), fullgraph=True)
        if "not shared" in variant:
            captured._fxc_parts()[2].share_masks = False
        return lambda ids, mask: captured(ids, attention_mask=mask, use_cache=False)
    extra = {"output_hidden_states": True} if "transformers" in variant else {}
    if "hooks" in variant:
        seen: list[torch.Tensor] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda m, a, out: seen.append(out))

        def run(ids: torch.Tensor, mask: torch.Tensor) -> Any:
            seen.clear()
            return compiled(ids, attention_mask=mask, use_cache=False), list(seen)

        compiled = torch.compile(model)
        return run
    if extra:  # its hook installer cannot be traced on the first call
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long), use_cache=False, **extra)
    compiled = torch.compile(model)
    return lambda ids, mask: compiled(
        ids, attention_mask=mask, use_cache=False, **extra
    )


def _live_bytes(call: Callable[[], Any]) -> tuple[int, int]:
    """(largest, last) sum of what the call has allocated and not freed."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [
        e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak, live


def selected_bytes(variant: str, sizes: dict[str, Any]) -> int:
    """Bytes of the records of a variant, by arithmetic."""
    batch, length, layers = sizes["batch"], sizes["length"], sizes["num_hidden_layers"]
    count = {"one": 1, "two": 2, "all": layers}[variant.split()[0]]
    if "weights" in variant:
        queries = 1 if "last query" in variant else length
        return count * batch * _HEADS * queries * length * 4
    tokens = 1 if "last token" in variant else length
    return count * batch * tokens * sizes["hidden_size"] * 4


_HEADS = 8


def run(quick: bool) -> Report:
    """Every variant in every setting."""
    report = Report(
        "memory",
        "Peak memory with capture",
        "Llama of 8 layers, hidden 256, 8 heads, compiled with Inductor for the CPU; "
        "each variant in a process of its own. *Added* is the peak of live bytes of a "
        "call over that of the plain model; *selected* the bytes of the records.",
    )
    for title, (sizes, variants) in list(SETTINGS.items())[: 1 if quick else None]:
        found = {
            v: child("benchmarks.bench_memory", "measure", variant=v, **sizes)
            for v in (QUICK if quick else variants)
        }
        plain = found["plain"]
        rows = []
        for name, values in found.items():
            added = (values["peak"] - plain["peak"]) / MiB
            mine = name in SPECS
            selected = selected_bytes(name, sizes) / MiB if mine else None
            rows.append(
                {
                    "variant": name,
                    "peak_MiB": values["peak"] / MiB,
                    "added_MiB": added,
                    "selected_MiB": selected,
                    "kept_MiB": values["kept"] / MiB,
                    "process_peak_MiB": values["resident"] / MiB,
                }
            )
            if mine and "not shared" not in name:
                what = f"added_over_selected, {name}, {title}"
                # Beside hundreds of MiB, of a record of kilobytes only the sign counts.
                limit = "<= 1.05" if selected > 1 else ""
                report.figure(what, added / selected, limit)
                if not limit:
                    share = values["peak"] / plain["peak"]
                    report.figure(f"peak_over_plain, {name}, {title}", share, "<= 1.01")
        report.table(title, rows)
    report.note(
        "process peaks hold Python, torch and the compiler too; they are no measure of "
        "the model"
    )
    return report


if __name__ == "__main__":
    main(run)
