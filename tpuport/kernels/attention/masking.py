"""Scores with everything that may not be attended set to minus infinity.

Letters: B batch, Hkv key/value heads, G query heads per key/value head, L tokens
(Lq queries, Lk keys).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Shaped

from tpuport.kernels.attention.problem import Problem

# The running maximum starts here and not at -inf, so that a row without any allowed
# key gives exp(-inf - LOWEST) = 0 instead of exp(-inf + inf) = NaN. It is the lowest
# finite float32: a float mask full of it, as transformers and diffusers write masks,
# still gives the same weight to every key, as in torch.
LOWEST = float(np.finfo(np.float32).min)


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
