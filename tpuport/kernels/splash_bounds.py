"""Whether scores are small enough for weights without a maximum.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.

softmax is the same whatever is subtracted from the scores of a query, and float32 and
bfloat16 are as precise at 2^60 as at 1. So nothing needs to be subtracted as long as
nothing overflows or underflows. By Cauchy and Schwarz no score of a query block exceeds
the largest norm of its queries times the largest norm of a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.kernels.padding import ceil_div, pad_dim

# Largest exponent of 2 without a maximum. With weights from 2^-64 to 2^64, values up
# to 2^40 and at most 2^22 keys, sums stay below 2^126; what is lost to underflow of a
# weighted value is below 2^-62 of a sum of weights.
MOST_EXPONENT = 64.0
MOST_VALUE = 2.0**40
# Largest exponent that a caller may vouch for: sums then stay below 2^126 for values up
# to 2^74, which are not looked at. Beyond that the result is infinite, not wrong.
MOST_GIVEN = 30.0


def needs_maximum(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    factor: float,
    q_block: int,
    feature_axis: int = 3,
    most: jax.Array | None = None,
    largest: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Whether query blocks need a maximum to be subtracted from their scores.

    A NaN or an infinity anywhere needs one: what it makes of the result is then the
    same as in the reference.

    Args:
        q: of shape [B, H, Lq, D].
        k: of shape [B, Hkv, Lk, D]; zeros where a key does not count.
        v: of shape [B, Hkv, Lk, Dv]; zeros where a key does not count.
        factor: what a product of q and k is multiplied by.
        q_block: queries per block; the last one may be short.
        feature_axis: where the head dim is; 2 with the tokens last.
        most: an exponent that none exceeds, if one is known. Up to ``MOST_GIVEN`` the
            arrays are not read.
        largest: takes the maximum of an array over all devices whose keys the queries
            will meet, where ``k`` and ``v`` are only some of these.

    Returns:
        bool of shape [B, H, ceil(Lq / q_block)].
    """
    if most is not None:

        def nowhere(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            count = ceil_div(q.shape[5 - feature_axis], q_block)
            return jnp.zeros((*q.shape[:2], count), bool)

        measured = functools.partial(
            needs_maximum,
            factor=factor,
            q_block=q_block,
            feature_axis=feature_axis,
            largest=largest,
        )
        return lax.cond(most <= MOST_GIVEN, nowhere, measured, q, k, v)
    batch, heads = q.shape[:2]
    q_len = q.shape[5 - feature_axis]
    kv_heads = k.shape[1]
    count = ceil_div(q_len, q_block)
    norms = pad_dim(_norms(q, feature_axis), 2, count * q_block)
    q_norm = norms.reshape(batch, heads, count, q_block).max(-1)
    k_norm = _norms(k, feature_axis).max(-1)
    v_large = ~(jnp.abs(v) <= MOST_VALUE).all((2, 3))
    if largest is not None:
        k_norm, wide = largest(jnp.stack([k_norm, v_large.astype(jnp.float32)]))
        v_large = wide > 0
    k_norm = jnp.repeat(k_norm, heads // kv_heads, 1)
    v_large = jnp.repeat(v_large, heads // kv_heads, 1)
    exponent = q_norm * k_norm[..., None] * abs(factor)
    return ~(exponent <= MOST_EXPONENT) | v_large[..., None]


def _norms(x: jax.Array, axis: int) -> jax.Array:
    """Lengths of the vectors along an axis, in float32; infinite for a NaN.

    A maximum may pass over a NaN (jax 0.10.2 on a CPU does).
    """
    norms = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis))
    return jnp.where(norms >= 0, norms, jnp.inf)
