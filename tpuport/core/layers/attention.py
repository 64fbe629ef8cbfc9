"""``scaled_dot_product_attention``, and how it is split over a mesh.

Legend: B batch, H heads (Hk of keys), L tokens (Lq queries, Lk keys), D head dim (Dv
of values). Sizes with letters of their own, such as Lv and Dk, may not fit together
yet: the kernels refuse sizes that do not fit.

The contract is all of torch's: boolean and additive masks that broadcast, ``is_causal``
aligned to the top left, ``scale``, grouped heads, any number of leading dims, and a row
without an allowed key gives 0. What cannot be honoured (dropout) is refused.
Source: torch/nn/functional.py, ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Int, Shaped
from tpuport.core.tracing.context import (
    BATCH,
    HEADS,
    TOKENS,
    AttentionRecord,
    OpContext,
)
from tpuport.core.tracing.ported_module import on_devices
from tpuport.errors import AttentionError
from tpuport.kernels.attention.attention import attention
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.kernels.attention.selection import Selection


def _four_dims(
    query: Float[Array, ...],
    key: Float[Array, ...],
    value: Float[Array, ...],
    mask: Shaped[Array, ...] | None,
) -> tuple[
    Float[Array, "b h lq d"],
    Float[Array, "b hk lk dk"],
    Float[Array, "b hv lv dv"],
    Shaped[Array, "bm hm m n"] | None,
    tuple[int, ...],
]:
    """q, k, v and the mask as four dims, and the leading dims of the result.

    The dims before the last three broadcast, as in torch, and are made one. The third
    last dim is the heads, also in an input of three dims: torch counts the groups of
    ``enable_gqa`` there too. Heads are left as they are.
    """
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(
            "scaled_dot_product_attention needs at least [L, D]; got "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    rank = max(query.ndim, key.ndim, value.ndim)
    if mask is not None and mask.ndim > rank:
        raise ValueError(
            f"attn_mask of shape {mask.shape} does not broadcast to the scores of "
            f"query {query.shape} and key {key.shape}: it has more dims"
        )
    leading = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    batch = leading or (1,)

    def lift(x: Array) -> Array:
        return x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)

    def flatten(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape((math.prod(batch), *x.shape[-3:]))

    if mask is not None:
        mask = lift(mask)
        if all(size == 1 for size in mask.shape[:-3]):
            mask = mask.reshape((1, *mask.shape[-3:]))
        else:
            mask = flatten(mask)
    q, k, v = (flatten(lift(x)) for x in (query, key, value))
    return q, k, v, mask, leading


def _match_heads(
    q: Float[Array, "b _ lq d"],
    k: Float[Array, "b _ lk dk"],
    v: Float[Array, "b _ lv dv"],
    *,
    enable_gqa: bool,
) -> tuple[
    Float[Array, "b h lq d"], Float[Array, "b hk lk dk"], Float[Array, "b hk lv dv"]
]:
    """q, k and v with as many value heads as key heads, which divide the query's."""
    heads, key_heads, value_heads = (x.shape[1] for x in (q, k, v))
    found = f"{heads} query heads on {key_heads} key and {value_heads} value heads"
    if enable_gqa:
        if 0 in (key_heads, value_heads) or heads % key_heads or heads % value_heads:
            raise ValueError(f"{found}: with enable_gqa=True both must divide")
    else:
        wanted = max(heads, key_heads, value_heads)
        if any(n not in (1, wanted) for n in (heads, key_heads, value_heads)):
            raise ValueError(f"{found}: pass enable_gqa=True for grouped heads")
        q = jnp.broadcast_to(q, (q.shape[0], wanted, *q.shape[2:]))
    if key_heads != value_heads:
        count = math.lcm(key_heads, value_heads)
        k, v = (jnp.repeat(x, count // x.shape[1], axis=1) for x in (k, v))
    return q, k, v


def _check(
    query: Float[Array, ...],
    mask: Shaped[Array, ...] | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    if dropout_p:
        raise AttentionError(
            f"scaled_dot_product_attention with dropout_p={dropout_p}: dropout draws "
            "random numbers that no port reproduces; call the module in eval mode"
        )
    if mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask and is_causal exclude each other, "
            "as in torch"
        )
    if mask is not None and not (
        mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)
    ):
        raise TypeError(
            f"attn_mask of dtype {mask.dtype}: expected bool or floating point, as in "
            f"torch (query is {query.dtype})"
        )


def scaled_dot_product_attention(
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
    """Attention of [..., H, Lq, D] queries on [..., Hkv, Lk, D] keys.

    Returns [..., H, Lq, Dv] in the dtype of ``query``.

    Raises:
        AttentionError: dropout was asked for, or the implementation named in the
            context cannot do this call.
        RuntimeError: ``attn_mask`` together with ``is_causal``, as torch does.
        TypeError: a mask that is neither bool nor floating point.
        ValueError: shapes or head counts do not fit together.
    """
    _check(query, attn_mask, dropout_p, is_causal)
    q, k, v, mask, leading = _four_dims(query, key, value, attn_mask)
    q, k, v = _match_heads(q, k, v, enable_gqa=enable_gqa)
    out = split_attention(context, q, k, v, mask, is_causal=is_causal, scale=scale)
    rank = max(query.ndim, key.ndim, value.ndim)
    if rank == 2:
        return out[0, 0]
    return out.reshape(*leading, *out.shape[1:])


def split_attention(
    context: OpContext,
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hk lk dk"],
    v: Float[Array, "b hk lv dv"],
    mask: Shaped[Array, "bm hm m n"] | None = None,
    *,
    is_causal: bool = False,
    scale: float | None,
    lengths: Int[Array, "b"] | None = None,
    frame_tokens: int | None = None,
) -> Float[Array, "b h lq dv"]:
    """Run the kernel on each device's part of q.

    Args:
        q, k, v: [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv]; Hkv divides H.
        mask, is_causal, scale: as kernels take them.
        lengths: number of keys of each item, int32 [B].
        frame_tokens: tokens per frame of frame-causal attention; divides Lq = Lk.

    Returns:
        [B, H, Lq, Dv].
    """
    choice = context.implementation
    if q.shape[2] != k.shape[2] or frame_tokens is not None or is_causal:
        # A window holds neighbours within one sequence.
        choice = replace(choice, window=None)
    # Frames of one token are rows of the causal triangle, which kernels do at once.
    is_causal = is_causal or frame_tokens == 1
    batch, heads, length = q.shape[:3]
    placed = is_causal or choice.window is not None
    q_split, k_split = _split(context, q, k, placed=placed)
    kernel = functools.partial(
        attention,
        is_causal=is_causal,
        scale=scale,
        platform=context.platform,
        implementation=choice,
        chip=context.chip,
        told=functools.partial(
            note_attention,
            context,
            choice,
            query=tuple(q.shape),
            key=tuple(k.shape),
            split=q_split,
            key_lengths=lengths is not None,
            frame_tokens=frame_tokens,
            causal=is_causal,
            dtype=str(q.dtype),
        ),
    )
    run: Callable[..., Array] = functools.partial(_whole, kernel)
    frames = None
    if frame_tokens is not None and not is_causal:
        frames = length // frame_tokens
        q = q.reshape(batch, heads, frames, frame_tokens, q.shape[3])
        q = jnp.moveaxis(q, 2, 0)
        run = functools.partial(_by_frames, kernel, frame_tokens)
    each = q.shape[-2]
    if q_split[2]:
        padding = ((0, -each % context.axis_size(q_split[2])), (0, 0))
        q = jnp.pad(q, (*((0, 0),) * (q.ndim - 2), *padding))
        if mask is not None and mask.shape[2] > 1:
            mask = jnp.pad(mask, ((0, 0), (0, 0), *padding))
    q_axes = (*(None,) * (q.ndim - 4), *q_split)
    sizes = zip(q_split, () if mask is None else mask.shape, strict=False)
    mask_axes = tuple(axis if n > 1 else None for axis, n in sizes)
    # Even if nothing is split: the compiler cannot partition a TPU kernel.
    out = on_devices(
        context.mesh,
        run,
        (q, k, v, mask, lengths),
        (q_axes, k_split, k_split, mask_axes, q_split[:1]),
        q_axes,
    )[..., :each, :]
    if frames is None:
        return out
    return jnp.moveaxis(out, 0, 2).reshape(batch, heads, length, out.shape[-1])


def _whole(
    kernel: Callable[..., Array],
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hk lk dk"],
    v: Float[Array, "b hk lv dv"],
    mask: Shaped[Array, "bm hm m n"] | None = None,
    lengths: Int[Array, "b"] | None = None,
) -> Float[Array, "b h lq dv"]:
    """``kernel`` on all queries at once."""
    return kernel(q, k, v, mask=mask, kv_lengths=lengths)


def _by_frames(
    kernel: Callable[..., Array],
    frame_tokens: int,
    q: Float[Array, "f b h n d"],
    k: Float[Array, "b hk lk dk"],
    v: Float[Array, "b hk lv dv"],
    mask: Shaped[Array, "bm hm _ m"] | None = None,
    lengths: Int[Array, "b"] | None = None,
) -> Float[Array, "f b h n dv"]:
    """``kernel`` on F frames of N queries, each on the keys of all frames so far."""

    def one_frame(frame: tuple[Array, Array]) -> Array:
        q, end = frame
        seen = jnp.broadcast_to(end, q.shape[:1])
        if lengths is not None:
            seen = jnp.minimum(seen, lengths)
        return kernel(q, k, v, mask=mask, kv_lengths=seen)

    ends = (jnp.arange(len(q), dtype=jnp.int32) + 1) * frame_tokens
    return jax.lax.map(one_frame, (q, ends))


#: The axes of the mesh that split items, heads, tokens and features.
_Axes = tuple[str | None, str | None, str | None, None]


def _split(
    context: OpContext,
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hk lk dk"],
    *,
    placed: bool,
) -> tuple[_Axes, _Axes]:
    """How queries are split, and keys and values.

    ``placed`` says whether a query needs its position.
    """
    axis = context.axis
    batch, heads = q.shape[:2]
    batch_axis = axis(BATCH, batch)
    head_axis = axis(HEADS, heads)
    # One key head serves all queries and is handed whole to every device.
    kv_head_axis = axis(HEADS, k.shape[1]) if k.shape[1] > 1 else None
    if k.shape[1] > 1 and kv_head_axis is None:
        head_axis = None
    # A causal row, or a row with a window, needs its position, and a slice of the
    # queries has none. A slice of each frame needs no position: every device gets a
    # part of all frames.
    sequence_axis = None if placed else axis(TOKENS)
    queries = (batch_axis, head_axis, sequence_axis, None)
    return queries, (batch_axis, kv_head_axis, None, None)


def note_attention(
    context: OpContext,
    choice: AttentionChoice,
    selection: Selection,
    more: str = "",
    **fields: Any,
) -> AttentionRecord:
    """Note what a call runs as, once per distinct call.

    Args:
        more: a further reason.
        fields: of the record, those that choice and selection do not have.
    """
    passed_over = (f"not {name}: {why}" for name, why in selection.passed_over)
    reasons = (selection.reason, *passed_over, more)
    record = AttentionRecord(
        implementation=selection.implementation,
        reason="; ".join(filter(None, reasons)),
        blocks=dict(selection.blocks),
        window=choice.window,
        k_smooth=choice.k_smooth,
        notice=selection.notice,
        **fields,
    )
    if record not in context.records:
        context.records.append(record)
    return record
