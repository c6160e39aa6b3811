"""The taps that record attention weights and scores."""

from __future__ import annotations

from typing import Any

from fxcapture.spec.attention import Attention
from fxcapture.spec.tap import Tap

__all__ = ["AttentionScores", "AttentionWeights"]


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


def AttentionScores(
    target: Any,
    select: Any = None,
    heads: Any = None,
    queries: Any = None,
    **tap: Any,
) -> Tap:
    """A tap for the scores of a module's fused attention call, before the softmax.

    Scaled, with the mask applied: a key that a query may not read has minus infinity
    under a boolean mask, and what the model adds under an additive one.  Of
    ``flex_attention``, after its ``score_mod``.  All else is as for
    :func:`AttentionWeights`, which are the softmax of these.

    Example::

        AttentionScores("layers.*.self_attn", heads=[3], queries=-1)

    Args:
        target: The attention modules, as in :class:`Tap`: each makes one fused call.
        select: Positions among the ordered hits.
        heads: An int, ints in the wanted order, a slice, or ``None`` for all heads.
            The dimension stays.
        queries: Query positions, in the same way; -1 for the last token.
        **tap: Further keywords of :class:`Tap`, as for :func:`AttentionWeights`.

    Returns:
        A tap whose entries have the shape (batch, heads, queries, keys) and the query's
        dtype: new tensors.

    Raises:
        SpecError: a field's value is malformed.
        SpecTypeError: a field is of the wrong type.
    """
    attention = Attention(heads, queries, scores=True)
    return Tap(target, select=select, attention=attention, **tap)
