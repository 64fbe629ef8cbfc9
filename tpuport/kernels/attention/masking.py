"""Scores with everything that may not be attended set to minus infinity.

Letters: B batch, Hkv key/value heads, G query heads per key/value head, L tokens
(Lq queries, Lk keys).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from tpuport.kernels.attention.problem import Problem

# The running maximum starts here and not at -inf, so that a row without any allowed
# key gives exp(-inf - LOWEST) = 0 instead of exp(-inf + inf) = NaN. It is the lowest
# finite float32: a float mask full of it, as transformers and diffusers write masks,
# still gives the same weight to every key, as in torch.
LOWEST = float(np.finfo(np.float32).min)


#: Lanes that a mask of keys takes.
MASK_LANES = 2
#: In place of minus infinity, whose products with the parts of a float32 are NaN. Any
#: score is nothing beside it.
_NEVER = -(2.0**100)


def masks_keys(shape: tuple[int, ...] | None, kv_heads: int, scale: float) -> bool:
    """Whether a mask [B|1, H|1, Lq|1, Lk|1] is alike for all queries.

    Args:
        shape: of the mask, ``None`` without one.
        kv_heads: a mask for each query head needs as many key heads.
        scale: of the scores; 0 would lose the mask.
    """
    return bool(shape and shape[2] == 1 and shape[1] in (1, kv_heads) and scale != 0)


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


def group_mask(
    mask: Shaped[Array, "b h lq lk"], kv_heads: int
) -> Shaped[Array, "b hkv g lq lk"]:
    """A mask of shape [B|1, H|1, Lq|1, Lk|1] as [B|1, Hkv|1, G|1, Lq|1, Lk|1]."""
    batch, heads, q_len, kv_len = mask.shape
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return mask.reshape(batch, *split, q_len, kv_len)


def mask_scores(
    scores: Float32[Array, "b hkv g lq lk"],
    *,
    mask: Shaped[Array, "#b #hkv #g #lq #lk"] | None = None,
    allowed: Bool[Array, "#b #hkv #g #lq #lk"] | None = None,
) -> Float32[Array, "b hkv g lq lk"]:
    """The scores with a mask applied; nothing is materialised beyond the scores.

    Args:
        mask: bool (True = may attend) or float (added).
        allowed: False wins over any mask.
    """
    if mask is not None and mask.dtype != jnp.bool_:
        scores = scores + mask.astype(jnp.float32)
    elif mask is not None:
        allowed = mask if allowed is None else allowed & mask
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


def allowed_pairs(
    q_ids: Int[Array, " lq"],
    k_ids: Int[Array, " lk"],
    problem: Problem,
    kv_lengths: Int[Array, " b"] | None,
) -> Bool[Array, "_ 1 1 _ lk"] | None:
    """Which pairs causality, lengths and window allow; None where they allow all.

    Args:
        q_ids, k_ids: positions of the queries and of the keys.
        problem: causal or not, and with which window.
        kv_lengths: integers [B]; keys from there on are not allowed.
    """
    allowed = None
    if problem.is_causal:
        allowed = (k_ids <= q_ids[:, None])[None, None, None]
    if problem.window is not None:
        left, right = problem.window
        ahead = k_ids - q_ids[:, None]
        near = ((ahead >= -left) & (ahead <= right))[None, None, None]
        allowed = near if allowed is None else allowed & near
    if kv_lengths is not None:
        valid = (k_ids < kv_lengths[:, None])[:, None, None, None]
        allowed = valid if allowed is None else allowed & valid
    return allowed
