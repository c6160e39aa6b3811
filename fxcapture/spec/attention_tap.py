"""The tap that records attention weights."""

from __future__ import annotations

from typing import Any

from fxcapture.spec.attention import Attention
from fxcapture.spec.tap import Tap

__all__ = ["AttentionWeights"]


def AttentionWeights(
    target: Any,
    select: Any = None,
    heads: Any = None,
    queries: Any = None,
    **tap: Any,
) -> Tap:
    """A tap for the weights of a module's fused attention call.

    The model keeps ``scaled_dot_product_attention`` or ``flex_attention``; the weights
    are computed beside it from the same tensors, for the selected positions, heads and
    queries alone.

    Example::

        AttentionWeights("layers.*.self_attn", select=[-1], queries=-1)

    Args:
        target: The attention modules, as in :class:`Tap`: each makes one fused call.
        select: Positions among the ordered hits.
        heads: An int, ints in the wanted order, a slice, or ``None`` for all heads.
            The dimension stays.
        queries: Query positions, in the same way; -1 for the last token.
        **tap: Further keywords of :class:`Tap`: ``layer_name``, ``detach``, ``reduce``,
            ``dtype``, ``device``, ``optional``.

    Returns:
        A tap whose entries have the shape (batch, heads, queries, keys) and the query's
        dtype: new tensors, before dropout.  A query that may read no key has zeros.

    Raises:
        SpecError: a field's value is malformed.
        SpecTypeError: a field is of the wrong type.
    """
    return Tap(target, select=select, attention=Attention(heads, queries), **tap)
