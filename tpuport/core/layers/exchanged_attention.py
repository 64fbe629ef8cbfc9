"""Attention on tokens that the compiler splits over the mesh.

A self-attention exchanges tokens for heads around the kernel, so no device needs all
keys of all heads (``sequence_parallel.py``). Other calls gather their keys, which are
few: text, or an image. A mask that is alike for all queries becomes lanes of the keys.

Legend: B batch, H heads, L tokens, D head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Shaped
from tpuport.core.layers.attention import scaled_dot_product_attention
from tpuport.core.layers.sequence_parallel import sequence_attention
from tpuport.core.tracing.context import TOKENS, Active, OpContext
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.kernels.attention.mask_lanes import masks_keys, with_mask_lanes
from tpuport.kernels.attention.problem import resolve_scale


def exchanged_attention(
    context: OpContext,
    query: Float[Array, ...],
    key: Float[Array, ...],
    value: Float[Array, ...],
    attn_mask: Shaped[Array, ...] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Array, ...]:
    """``torch.nn.functional.scaled_dot_product_attention`` on [..., H, L, D].

    Under ``jax.vmap`` the calls become items of one batch.

    Raises:
        AttentionError, RuntimeError, TypeError, ValueError: as
        :func:`~tpuport.core.layers.attention.scaled_dot_product_attention`.
    """
    run = functools.partial(
        _exchanged,
        context,
        scale=scale,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    mask = attn_mask
    if mask is not None and query.ndim == 4 and mask.ndim <= 4:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
    if query.ndim != 4 or (mask is not None and mask.ndim != 4):
        return run(query, key, value, mask)

    @jax.custom_batching.custom_vmap
    def call(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        return run(q, k, v, mask)

    @call.def_vmap
    def _(size: int, batched: Any, *arrays: Any) -> tuple[Array, bool]:
        items = functools.partial(_items, size)
        out = call(*jax.tree.map(items, arrays, tuple(batched)))
        return out.reshape(size, -1, *out.shape[1:]), True

    return call(query, key, value, mask)


def _items(size: int, x: Shaped[Array, "..."], batched: bool) -> Shaped[Array, "..."]:
    """``size`` calls as items of one batch."""
    x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(-1, *x.shape[2:])


def _exchanged(
    context: OpContext,
    query: Float[Array, ...],
    key: Float[Array, ...],
    value: Float[Array, ...],
    attn_mask: Shaped[Array, ...] | None,
    scale: float | None,
    **options: Any,
) -> Float[Array, ...]:
    ways = context.axis_size(TOKENS)
    alike = query.ndim == 4 and query.shape == key.shape == value.shape
    special = options["dropout_p"] or options["is_causal"]
    exchanged = alike and ways > 1 and not special
    exchanged = exchanged and context.implementation.window is None
    if attn_mask is not None and (exchanged or context.platform == "tpu"):
        factor = resolve_scale(scale, query.shape[-1])
        if masks_keys(query, key, value, attn_mask, factor) and not (
            context.implementation.k_smooth  # the mean of a mask would be in each key
        ):
            query, key, value = with_mask_lanes(query, key, value, attn_mask, factor)
            attn_mask, scale = None, factor
    if not exchanged or attn_mask is not None:
        return scaled_dot_product_attention(
            context, query, key, value, attn_mask, scale=scale, **options
        )
    length = query.shape[2]
    padding = ((0, 0), (0, 0), (0, -length % ways), (0, 0))
    q, k, v = (jnp.pad(x, padding) for x in (query, key, value))
    active = Active(None, context)
    options = {"kv_len": length, "scale": scale, "feature_major": False}
    return sequence_attention(active, q, k, v, **options)[:, :, :length]


EXCHANGED_ATTENTION = OpOverride(
    targets=(
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.ops.aten.scaled_dot_product_attention",
    ),
    make=lambda context: functools.partial(exchanged_attention, context),
    owner="tpuport.core.layers.exchanged_attention",
    reason="masks and splits honoured exactly; no Lq x Lk array",
)
"""For any model."""
