"""Draw the pictures that the documentation shows: ``python scripts/make_images.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxcapture as fxc
from fxcapture.inspect.drawing.draw import draw, draw_timeline
from fxcapture.inspect.estimate import estimate

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"


def draw_readme() -> str:
    """The capture of the README's own example."""
    text = (ROOT / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    made: dict[str, Any] = {"__name__": "readme"}
    exec(code.replace("fullgraph=True", 'fullgraph=True, backend="eager"'), made)
    return str(draw(made["captured"], "svg"))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
        num_attention_heads=8, vocab_size=8000, use_cache=False,
    )  # fmt: skip
    hidden = fxc.Tap("model.layers.*", output=0, select=[0, -2], initial=True)
    maps = fxc.Tap("model.layers.*.self_attn", output=1, select=[4])
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    ids = torch.empty(1, 1024, dtype=torch.int64, device="meta")
    cost = estimate(large, {"hidden": hidden}, (ids,))
    (IMAGES / "timeline.svg").write_text(draw_timeline(cost))

    sizes = {"hidden_size": 64, "vocab_size": 100, "attn_implementation": "eager"}
    small = LlamaForCausalLM(LlamaConfig(**(config.to_dict() | sizes))).eval()
    spec = {"hidden": hidden, "maps": maps}
    captured = fxc.compile(small, spec, backend="eager", fullgraph=True)
    with torch.no_grad():
        captured(torch.zeros(2, 32, dtype=torch.int64))
    (IMAGES / "picture.svg").write_text(draw(captured, "svg"))
    (IMAGES / "readme.svg").write_text(draw_readme())
    for plot in (ROOT / "benchmarks" / "results").glob("*.svg"):
        shutil.copy(plot, IMAGES / plot.name)


if __name__ == "__main__":
    main()
