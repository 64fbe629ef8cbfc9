"""Attention by its formula: the definition the other implementations answer to.

Letters: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L tokens (Lq
queries, Lk keys), D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from tpuport.kernels.attention.masking import (
    LOWEST,
    allowed_pairs,
    group_mask,
    mask_scores,
)
from tpuport.kernels.attention.problem import Options, describe

# (running maximum [B, H, Lq, 1], sum of weights [B, H, Lq, 1], weighted sum of values
# [B, H, Lq, Dv]), all float32. The maximum is ``LOWEST`` where no key is allowed.
Sums = tuple[
    Float32[Array, "b h lq 1"], Float32[Array, "b h lq 1"], Float32[Array, "b h lq dv"]
]


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision of the two products for inputs of ``dtype``.

    A TPU multiplies float32 in one bfloat16 pass unless told otherwise. Whoever asks
    with float32 gets float32; narrower inputs take the fast default. On a CPU this
    changes nothing.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def reference_attention(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    *,
    window: tuple[int, int] | None = None,
    **options: Unpack[Options],
) -> Float[Array, "b h lq dv"]:
    """softmax(scale q k^T + mask) v, the contract of torch's SDPA kept whole.

    Scores, softmax and sums are float32. A query that may attend to no key gives 0.
    Query head h uses key/value head h // (H / Hkv). The whole score matrix is built:
    4 B H Lq Lk bytes.

    Args:
        q, k, v: [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv].
        window: (left, right): query i sees keys i - left .. i + right; combines with
            the options.

    Returns:
        [B, H, Lq, Dv], in the dtype of ``q``.

    Raises:
        ValueError: shapes or dtypes that do not fit together.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; the options are those
    of ``torch.nn.functional.scaled_dot_product_attention``.
    """
    _, total, summed = reference_sums(q, k, v, window=window, **options)
    return normalised(summed, total).astype(q.dtype)


def reference_sums(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    *,
    window: tuple[int, int] | None = None,
    **options: Unpack[Options],
) -> Sums:
    """What ``reference_attention`` divides; same arguments and errors."""
    problem = describe(q, k, v, window=window, **options)
    mask = options.get("mask")
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(
        problem.batch, problem.kv_heads, problem.groups, problem.q_len, problem.head_dim
    )
    scores = jnp.einsum(
        "bhgqd,bhkd->bhgqk",
        grouped,
        k,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores = mask_scores(
        scores * problem.scale,
        mask=None if mask is None else group_mask(mask, problem.kv_heads),
        allowed=allowed_pairs(
            jnp.arange(problem.q_len),
            jnp.arange(problem.kv_len),
            problem,
            options.get("kv_lengths"),
        ),
    )
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=LOWEST)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    summed = jnp.einsum(
        "bhgqk,bhkd->bhgqd", weights, v.astype(jnp.float32), precision=precision
    )
    highest, total = (x.reshape(*q.shape[:3], 1) for x in (highest, total))
    return highest, total, summed.reshape(*q.shape[:3], problem.v_dim)


def combined(one: Sums, other: Sums) -> Sums:
    """The sums over the keys of both.

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1.
    """
    highest = jnp.maximum(one[0], other[0])
    shrink, other_shrink = (jnp.exp(sums[0] - highest) for sums in (one, other))
    total, summed = (
        a * shrink + b * other_shrink for a, b in zip(one[1:], other[1:], strict=True)
    )
    return highest, total, summed


def normalised(
    summed: Float32[Array, "*n dv"], total: Float32[Array, "*n 1"]
) -> Float32[Array, "*n dv"]:
    """``summed / total``, and 0 where no key was allowed, that is ``total`` is 0."""
    empty = total == 0
    return jnp.where(empty, 0.0, summed / jnp.where(empty, 1.0, total))
