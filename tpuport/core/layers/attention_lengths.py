"""Attention by key lengths and frames in place of a mask.

Upstream code often writes "no padding" or "no later frame" as a mask of Lq x Lk. For
a video such a mask takes gigabytes. Patches call this function instead.

Legend: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys), D
head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Shaped
from tpuport.core.layers.attention import split_attention
from tpuport.core.tracing.context import OpContext


def length_attention(
    context: OpContext,
    query: Float[Array, ...],
    key: Float[Array, ...],
    value: Float[Array, ...],
    key_lengths: Shaped[Array, ...] | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h lq dv"]:
    """Attention of [B, H, Lq, D] queries on [B, Hkv, Lk, D] keys, Hkv dividing H.

    Frames run one after the other. Memory holds one frame's queries on all keys, and
    no array has Lq x Lk elements.

    Args:
        key_lengths: integers [B]: keys at an index >= length have weight 0, and a
            length of 0 gives 0.
        frame_tokens: query i sees the keys of the frames 0..i // n, each of n tokens;
            a key must pass this and its length.
        scale: as in ``scaled_dot_product_attention``.

    Returns:
        [B, H, Lq, Dv] in the dtype of ``query``.

    Raises:
        AttentionError: the implementation named in the context cannot do this call.
        ValueError: shapes or dtypes do not fit together.
    """
    shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape]}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"attention takes [B, H, L, D]; got {shapes}")
    if key_lengths is not None:
        wanted = (query.shape[0],)
        integers = jnp.issubdtype(key_lengths.dtype, jnp.integer)
        if tuple(key_lengths.shape) != wanted or not integers:
            raise ValueError(
                f"key_lengths must be integers of shape {[*wanted]}; got "
                f"{key_lengths.dtype} of shape {[*key_lengths.shape]} with {shapes}"
            )
        key_lengths = key_lengths.astype(jnp.int32)
    if frame_tokens is not None and (
        frame_tokens < 1
        or query.shape[2] != key.shape[2]
        or query.shape[2] % frame_tokens
    ):
        raise ValueError(
            f"frame_tokens={frame_tokens} needs as many queries as keys, in whole "
            f"frames of at least one token; got {shapes}"
        )
    return split_attention(
        context,
        query,
        key,
        value,
        lengths=key_lengths,
        frame_tokens=frame_tokens,
        scale=scale,
    )
