"""One door to attention: runs the implementation that ``selection`` picks.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from tpuport.kernels.attention.blockwise import blockwise_attention, default_tiling
from tpuport.kernels.attention.choice import AUTO, AttentionChoice
from tpuport.kernels.attention.jax_splash import jax_splash_attention
from tpuport.kernels.attention.problem import describe, describe_feature_major
from tpuport.kernels.attention.reference import reference_attention
from tpuport.kernels.attention.selection import (
    DEFAULT_CHIP,
    as_choice,
    jax_tiles,
    select,
    splash_tiles,
)
from tpuport.kernels.attention.splash import splash_attention, splash_feature_major


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kv_lengths: jax.Array | None = None,
    platform: str,
    implementation: str | AttentionChoice = AUTO,
    chip: str | None = None,
    fall_back: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scale q k^T + mask) v, exactly; see ``reference_attention``.

    Args:
        q: of shape [B, H, Lq, D].
        k: of shape [B, Hkv, Lk, D]; Hkv divides H.
        v: of shape [B, Hkv, Lk, Dv].
        mask: bool (True = may attend) or float (added to the scores), of four dims,
            each 1 or that of [B, H, Lq, Lk].
        is_causal: query i sees keys 0..i (aligned top left); combines with ``mask``.
        scale: factor of the scores; None means 1/sqrt(D).
        kv_lengths: integers of shape [B]; keys at an index >= length have weight 0.
        platform: "tpu", "cpu", ...: where the program will run. It is not looked up,
            because a program may be compiled for a device that is not attached.
        implementation: an :class:`AttentionChoice` or its text, such as "auto" or
            "splash:window=256,256".
        chip: such as "v6e", for the choice of blocks.
        fall_back: see ``select``.
        interpret: run Pallas kernels interpreted; others ignore it.

    Returns:
        of shape [B, H, Lq, Dv], in the dtype of ``q``; 0 where no key is allowed.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        AttentionError: the named implementation cannot do it exactly (also a
            NotImplementedError).
        UsageError: no implementation has that name.
    """
    choice = as_choice(implementation)
    problem = describe(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        kv_lengths=kv_lengths,
        window=choice.window,
        platform=platform,
        interpret=interpret,
    )
    selection = select(problem, choice, chip=chip, fall_back=fall_back)
    blocks = selection.blocks
    if choice.k_smooth:
        k = smooth_keys(k, kv_lengths)
    if selection.implementation == "splash":
        return splash_attention(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            kv_lengths=kv_lengths,
            window=choice.window,
            blocks=splash_tiles(blocks),
            chip=chip or DEFAULT_CHIP,
            platform=platform,
            interpret=interpret,
        )
    if selection.implementation == "jax":
        return jax_splash_attention(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            kv_lengths=kv_lengths,
            blocks=jax_tiles(blocks),
            platform=platform,
            interpret=interpret,
        )
    if selection.implementation == "reference":
        return reference_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            kv_lengths=kv_lengths,
            window=choice.window,
        )
    tiling = None
    if choice.blocks:
        tiling = replace(default_tiling(problem), **blocks)
    return blockwise_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        scale=scale,
        kv_lengths=kv_lengths,
        window=choice.window,
        tiling=tiling,
    )


def attention_feature_major(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_len: int | None = None,
    kv_lengths: jax.Array | None = None,
    hidden: bool = False,
    scale: float | None = None,
    platform: str,
    implementation: str | AttentionChoice = AUTO,
    chip: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``attention`` on arrays with the head dim before the tokens.

    That is how a product of weights and tokens gives them and how our kernel takes
    them; any other implementation gets them turned. Where the one named refuses the
    call, another does it, as ``select`` says with ``fall_back``.

    Args:
        q: of shape [B, H, D, Lq].
        k: of shape [B, Hkv, D, Lk].
        v: of shape [B, Hkv, Dv, Lk].
        kv_len: only keys before this index count; None for all.
        kv_lengths: integers of shape [B], at most ``kv_len``; see ``attention``.
        hidden: the caller has made ``v`` zero at the keys that do not count.

    The other arguments and the errors are those of ``attention``.

    Returns:
        of shape [B, H, Dv, Lq], in the dtype of ``q``; 0 where no key is allowed.
    """
    choice = as_choice(implementation)
    problem = describe_feature_major(
        q,
        k,
        v,
        kv_lengths=kv_lengths,
        window=choice.window,
        platform=platform,
        interpret=interpret,
    )
    selection = select(problem, choice, chip=chip, fall_back=True)
    if selection.implementation == "splash":
        return splash_feature_major(
            q,
            k,
            v,
            scale=scale,
            window=choice.window,
            kv_len=kv_len,
            kv_lengths=kv_lengths,
            hidden=hidden,
            k_smooth=choice.k_smooth,
            blocks=splash_tiles(selection.blocks),
            chip=chip or DEFAULT_CHIP,
            platform=platform,
            interpret=interpret,
        )
    out = attention(
        q.swapaxes(2, 3),
        k[..., :kv_len].swapaxes(2, 3),
        v[..., :kv_len].swapaxes(2, 3),
        scale=scale,
        kv_lengths=kv_lengths,
        platform=platform,
        implementation=choice,
        chip=chip,
        fall_back=True,
        interpret=interpret,
    )
    return out.swapaxes(2, 3)


def smooth_keys(k: jax.Array, kv_lengths: jax.Array | None) -> jax.Array:
    """``k`` less the mean of the keys that count, per batch item and head.

    Every score of a query changes by the same number, so the softmax does not change;
    scores that are nearer 0 are rounded less in low precision.

    Args:
        k: of shape [B, Hkv, Lk, D].
        kv_lengths: integers of shape [B]; the keys that count are those before.

    Source: Zhang et al. 2024 (arXiv:2410.02367), section 4.2.
    """
    wide = k.astype(jnp.float32)
    if kv_lengths is None:
        mean = jnp.mean(wide, axis=2, keepdims=True)
    else:
        counts = jnp.arange(k.shape[2]) < kv_lengths[:, None]
        weights = counts[:, None, :, None]
        number = jnp.maximum(jnp.minimum(kv_lengths, k.shape[2]), 1)
        total = jnp.sum(jnp.where(weights, wide, 0.0), axis=2, keepdims=True)
        mean = total / number[:, None, None, None]
    return (wide - mean).astype(k.dtype)
