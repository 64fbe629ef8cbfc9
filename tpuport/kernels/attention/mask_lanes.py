"""A mask that is alike for all queries, as lanes of the keys.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

#: Lanes that a mask of keys takes.
MASK_LANES = 2
#: In place of minus infinity, whose products with the parts of a float32 are NaN. Any
#: score is nothing beside it.
_NEVER = -(2.0**100)


def masks_keys(
    q: Shaped[Array, ...],
    k: Shaped[Array, ...],
    v: Shaped[Array, ...],
    mask: Shaped[Array, ...],
    scale: float,
) -> bool:
    """Whether a mask is alike for all queries of [B, H, L, D], and lanes can hold it.

    A scale of 0 would lose the mask, and a mask of each query head needs as many key
    heads.
    """
    if not q.ndim == k.ndim == v.ndim == mask.ndim == 4 or k.shape[:3] != v.shape[:3]:
        return False
    batch, heads, queries, keys = mask.shape
    return (
        scale != 0
        and queries == 1
        and q.shape[0] == k.shape[0]
        and batch in (1, k.shape[0])
        and heads in (1, k.shape[1])
        and keys in (1, k.shape[2])
        and (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating))
    )


def with_mask_lanes(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    mask: Shaped[Array, "#b #hkv 1 #lk"],
    scale: float,
) -> tuple[
    Float[Array, "b h lq dl"], Float[Array, "b hkv lk dl"], Float[Array, "b hkv lk dv"]
]:
    """q, k and v whose attention without a mask is attention with the mask.

    A mask that is alike for all queries is a summand of each key. So is a lane of keys
    that holds the summand and meets 1 in every query: the product of queries and keys
    adds the mask, and nothing else changes. Exact for every value of a mask, a cut of
    any pattern, a row that is cut as a whole and finite biases; in bfloat16 two lanes
    hold a bias to 17 bits. A head dim that is no whole tile is padded anyway, so lanes
    cost next to nothing.

    Args:
        mask: bool (True = may attend) or float (added to the scaled scores).
        scale: of the scores, not 0.

    Returns:
        q and k with ``MASK_LANES`` more lanes, and v, which is 0 at keys that may not
        be seen: a row without an allowed key gives 0.
    """
    batch, kv_heads, kv_len = k.shape[:3]
    as_bool = mask.dtype == jnp.bool_
    seen = mask if as_bool else mask > -jnp.inf
    bias = jnp.where(mask, 0.0, _NEVER) if as_bool else mask.astype(jnp.float32)
    bias, seen = (
        jnp.broadcast_to(x, (batch, kv_heads, 1, kv_len))[:, :, 0]
        for x in (jnp.maximum(bias, _NEVER) / scale, seen)
    )
    v = jnp.where(seen[..., None], v, 0)
    info = jnp.finfo(k.dtype)
    # A compiler takes a cast and the cast back for nothing.
    high = jax.lax.reduce_precision(bias, info.nexp, info.nmant)
    lanes = jnp.stack([high, bias - high], -1).astype(k.dtype)
    k = jnp.concatenate([k, lanes], -1)
    return jnp.concatenate([q, jnp.ones_like(q[..., :MASK_LANES])], -1), k, v
