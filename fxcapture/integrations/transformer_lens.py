"""Taps for people who know TransformerLens's names.

Example::

    from fxcapture.integrations import transformer_lens

    spec = {
        name: transformer_lens.tap(model, name)
        for name in ("blocks.*.hook_resid_mid", "blocks.3.attn.hook_pattern")
    }
    captured = fxcapture.compile(model, spec)

The values are those of the transformers model as it is: shapes are its own (heads stand
before positions, projections are not split into heads), and weights are not folded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxcapture.errors import SpecError, nearest
from fxcapture.integrations.transformer_lens_names import (
    ATTENTION,
    FAMILIES,
    KERNELS,
    Place,
)
from fxcapture.spec.attention_tap import AttentionScores, AttentionWeights
from fxcapture.spec.tap import Tap

__all__ = ["names", "tap"]

_BLOCK = re.compile(r"blocks\.(\d+|\*)\.")
_SCORES = "blocks.{}.attn.hook_attn_scores"
_PATTERN = "blocks.{}.attn.hook_pattern"


def names(model: nn.Module) -> tuple[str, ...]:
    """The names that there are for a model; ``{}`` stands for a block's number.

    Raises:
        SpecError: the model is of no family that the table covers.
    """
    family, kernel = _family_of(model), _kernel_of(model)
    return tuple(dict.fromkeys((*FAMILIES[family], *kernel, _SCORES, _PATTERN)))


def tap(model: nn.Module, name: str, **options: Any) -> Tap:
    """The tap for a name of TransformerLens.

    Args:
        model: A model of transformers, with or without a head.
        name: The name; ``blocks.*`` means every block.
        **options: Further keywords of :class:`~fxcapture.Tap`, such as ``select`` and
            ``reduce``; for scores and patterns also ``heads`` and ``queries``.

    Raises:
        SpecError: the table has no such name for the model.
    """
    family, kernel = _family_of(model), _kernel_of(model)
    found = _BLOCK.match(name)
    block = "" if found is None else found[1]
    key = name if found is None else _BLOCK.sub("blocks.{}.", name, count=1)
    base = _base_of(model)

    def written(target: str) -> str:
        return target.replace("{base}", base).replace("{}", block)

    attention = written(ATTENTION[family])
    if key in (_SCORES, _PATTERN):
        return _of_attention(attention, key, kernel is KERNELS["eager"], options)
    if key in kernel:
        function, which = kernel[key]
        return _tap(f"{attention}::{function}", which, options)
    if key not in FAMILIES[family]:
        known = names(model)
        raise SpecError(
            f"{name!r} is not a name that there is for {type(model).__name__}",
            nearest=nearest(key, known),
            remedy="use one of transformer_lens.names(model), or look for the value "
            "with fxcapture.sites(model, args, inside=...)",
        )
    target, which = FAMILIES[family][key]
    return _tap(written(target), which, options)


def _of_attention(
    target: str, key: str, eager: bool, options: Mapping[str, Any]
) -> Tap:
    if not eager:
        made = AttentionScores if key == _SCORES else AttentionWeights
        return made(target, **options)
    return _tap(f"{target}::softmax", 0 if key == _SCORES else "output", options)


def _tap(target: str, which: int | str, options: Mapping[str, Any]) -> Tap:
    if isinstance(which, int):
        return Tap(target, point="input", output=which, **options)
    if which == "input":
        return Tap(target, point="input", **options)
    # A layer or an attention module may return a tuple, whose first element is meant.
    output = None if "::" in target else 0
    return Tap(target, output=output, **options)


def _family_of(model: nn.Module) -> str:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES:
        raise SpecError(
            f"there are no names of TransformerLens for {type(model).__name__}",
            why=f"its config's model_type is {family!r}; the table covers "
            + ", ".join(FAMILIES),
            remedy="name the values by path, fxcapture.sites(model, args, inside=...) "
            "lists them",
        )
    return str(family)


def _kernel_of(model: nn.Module) -> dict[str, Place]:
    chosen = getattr(model.config, "_attn_implementation", None)
    return KERNELS["eager" if chosen == "eager" else "sdpa"]


def _base_of(model: nn.Module) -> str:
    """The path, with its dot, of the model without its head."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""
