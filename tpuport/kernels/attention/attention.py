"""One door to attention: runs the implementation that ``selection`` picks.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Unpack, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpuport.kernels.attention.blockwise import blockwise_attention
from tpuport.kernels.attention.choice import AUTO, AttentionChoice
from tpuport.kernels.attention.problem import (
    KeyOptions,
    Options,
    describe,
    describe_feature_major,
)
from tpuport.kernels.attention.reference import reference_attention
from tpuport.kernels.attention.selection import (
    DEFAULT_CHIP,
    Selection,
    as_choice,
    select,
    splash_tiles,
)
from tpuport.kernels.attention.splash import splash_attention, splash_feature_major


def attention(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "_ hkv lk dk"],
    v: Float[Array, "_ _ lv dv"],
    *,
    platform: str,
    implementation: str | AttentionChoice = AUTO,
    chip: str | None = None,
    interpret: bool = False,
    told: Callable[[Selection], Any] | None = None,
    **options: Unpack[Options],
) -> Float[Array, "b h lq dv"]:
    """softmax(scale q k^T + mask) v, exactly; see ``reference_attention``.

    Args:
        q, k, v: [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv]; Hkv divides H.
        platform: "tpu", "cpu", ...: where the program will run. Not looked up, because
            a program may be compiled for a device that is not attached.
        implementation: an :class:`AttentionChoice` or a name, such as "auto".
        chip: such as "v6e", for the choice of blocks.
        interpret: run Pallas kernels interpreted; others ignore it.
        told: is called with what runs.

    Returns:
        [B, H, Lq, Dv], in the dtype of ``q``; 0 where no key is allowed.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        AttentionError: as ``select`` says (also a NotImplementedError).
        UsageError: no implementation has that name.
    """
    choice = as_choice(implementation)
    window = choice.window
    problem = describe(
        q, k, v, platform=platform, interpret=interpret, window=window, **options
    )
    selection = select(problem, choice, chip=chip)
    if told is not None:
        told(selection)
    if choice.k_smooth:
        k = smooth_keys(k, options.get("kv_lengths"))
    if selection.implementation == "splash":
        return splash_attention(
            q,
            k,
            v,
            blocks=splash_tiles(selection.blocks),
            chip=chip or DEFAULT_CHIP,
            platform=platform,
            interpret=interpret,
            window=window,
            **options,
        )
    if selection.implementation == "reference":
        return reference_attention(q, k, v, window=window, **options)
    tiling = selection.tiling
    return blockwise_attention(q, k, v, tiling=tiling, window=window, **options)


def attention_feature_major(
    q: Float[Array, "b h d lq"],
    k: Float[Array, "b hkv d lk"],
    v: Float[Array, "b hkv dv lk"],
    *,
    platform: str,
    implementation: str | AttentionChoice = AUTO,
    chip: str | None = None,
    interpret: bool = False,
    told: Callable[[Selection], Any] | None = None,
    **options: Unpack[KeyOptions],
) -> Float[Array, "b h dv lq"]:
    """``attention`` on arrays with the head dim before the tokens.

    A product of weights and tokens gives this order, and our kernel takes it; any other
    implementation gets transposed arrays. Key lengths are at most ``kv_len``.

    Returns:
        [B, H, Dv, Lq], in the dtype of ``q``; 0 where no key is allowed.
    """
    choice = as_choice(implementation)
    problem = describe_feature_major(
        q,
        k,
        v,
        platform=platform,
        interpret=interpret,
        window=choice.window,
        **options,
    )
    selection = select(problem, choice, chip=chip)
    if told is not None:
        told(selection)
    if choice.k_smooth:
        k = smooth_keys(k, _counted(k.shape[3], options), axis=3)
        choice = replace(choice, k_smooth=False)
    if selection.implementation == "splash":
        return splash_feature_major(
            q,
            k,
            v,
            blocks=splash_tiles(selection.blocks),
            chip=chip or DEFAULT_CHIP,
            platform=platform,
            interpret=interpret,
            window=choice.window,
            **options,
        )
    kv_len = options.pop("kv_len", None)
    options.pop("hidden", None)
    out = attention(
        q.swapaxes(2, 3),
        k[..., :kv_len].swapaxes(2, 3),
        v[..., :kv_len].swapaxes(2, 3),
        platform=platform,
        implementation=choice,
        chip=chip,
        interpret=interpret,
        **cast(Options, options),
    )
    return out.swapaxes(2, 3)


def _counted(size: int, options: KeyOptions) -> jax.Array | None:
    """How many of ``size`` keys count, integers that broadcast to [B]; None for all."""
    kv_lengths, kv_len = options.get("kv_lengths"), options.get("kv_len")
    if kv_len is None or kv_len == size:
        return kv_lengths
    if kv_lengths is None:
        return jnp.full((1,), kv_len)
    return jnp.minimum(kv_lengths, kv_len)


def smooth_keys(
    k: Float[Array, "b hkv _ _"],
    kv_lengths: Int[Array, " _"] | None,
    axis: Literal[2, 3] = 2,
) -> Float[Array, "b hkv _ _"]:
    """``k`` less the mean of the keys that count, per batch item and head.

    Every score of a query changes by the same number, so the softmax does not change;
    scores that are nearer 0 are rounded less in low precision.

    Args:
        k: [B, Hkv, Lk, D], or [B, Hkv, D, Lk] with ``axis=3``.
        kv_lengths: integers [B] or [1]; the keys before them count.

    Source: Zhang et al. 2024 (arXiv:2410.02367), section 4.2.
    """
    wide = k.astype(jnp.float32)
    if kv_lengths is None:
        mean = jnp.mean(wide, axis=axis, keepdims=True)
    else:
        size = k.shape[axis]
        number = jnp.clip(kv_lengths, 0, size)[:, None, None, None]
        index = jax.lax.broadcasted_iota(jnp.int32, k.shape, axis)
        total = jnp.sum(jnp.where(index < number, wide, 0.0), axis=axis, keepdims=True)
        mean = total / jnp.maximum(number, 1)
    return (wide - mean).astype(k.dtype)
