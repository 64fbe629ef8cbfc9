"""``torch.ops.tpuport.attention``: key lengths and frames in place of a mask.

Upstream code often writes "no padding" or "no later frame" as a mask of Lq x Lk. For
a video such a mask takes gigabytes. Patches call this op instead.

Legend: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys), D
head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax.numpy as jnp
import torch
import torch.nn.functional as F

from tpuport.core.arrays import Array, Float, Shaped, Tensor
from tpuport.core.layers.attention import split_attention
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride


def length_attention(
    context: OpContext,
    query: Float[Array, ...],
    key: Float[Array, ...],
    value: Float[Array, ...],
    key_lengths: Shaped[Array, ...] | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h lq dv"]:
    """``torch.ops.tpuport.attention`` on JAX arrays; see :func:`define_attention_op`.

    Frames run one after the other. Memory holds one frame's queries on all keys, and
    no array has Lq x Lk elements.

    Raises:
        AttentionError: the implementation named in the context cannot do this call.
        ValueError: shapes or dtypes do not fit together.
    """
    _check_lengths(query, key, value, key_lengths, frame_tokens)
    lengths = None if key_lengths is None else key_lengths.astype(jnp.int32)
    return split_attention(
        context,
        query,
        key,
        value,
        lengths=lengths,
        frame_tokens=frame_tokens,
        scale=scale,
    )


def _check_lengths(
    query: Any,
    key: Any,
    value: Any,
    key_lengths: Any,
    frame_tokens: int | None,
) -> None:
    """Refuse wrong shapes and dtypes, for the torch and the JAX side of the op."""
    shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape]}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"tpuport::attention takes [B, H, L, D]; got {shapes}")
    if key_lengths is not None:
        wanted = (query.shape[0],)
        # torch and NumPy have "int" in the names of integer dtypes alone.
        integers = "int" in str(key_lengths.dtype)
        if tuple(key_lengths.shape) != wanted or not integers:
            raise ValueError(
                f"key_lengths must be integers of shape {[*wanted]}; got "
                f"{key_lengths.dtype} of shape {[*key_lengths.shape]} with {shapes}"
            )
    if frame_tokens is not None and (
        frame_tokens < 1
        or query.shape[2] != key.shape[2]
        or query.shape[2] % frame_tokens
    ):
        raise ValueError(
            f"frame_tokens={frame_tokens} needs as many queries as keys, in whole "
            f"frames of at least one token; got {shapes}"
        )


def eager_attention(
    query: Float[Tensor, ...],
    key: Float[Tensor, ...],
    value: Float[Tensor, ...],
    key_lengths: Shaped[Tensor, ...] | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h lq dv"]:
    """``torch.ops.tpuport.attention`` in plain torch, by masks; for comparisons.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_lengths(query, key, value, key_lengths, frame_tokens)
    indices = torch.arange(key.shape[2], device=query.device)
    mask = None
    if key_lengths is not None:
        mask = (indices < key_lengths[:, None])[:, None, None, :]
    if frame_tokens is not None:
        frame = indices // frame_tokens
        seen = frame <= frame[:, None]
        mask = seen if mask is None else mask & seen
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# The library object must outlive the op it defines.
_libraries: list[Any] = []
_lock = threading.Lock()


def define_attention_op() -> None:
    """Define ``torch.ops.tpuport.attention``, once; later calls do nothing.

    ``attention(query, key, value, key_lengths=None, frame_tokens=None, scale=None)``
    takes [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv] with Hkv dividing H, and
    gives [B, H, Lq, Dv] in the dtype of ``query``.

    ``key_lengths`` are integers [B]: keys at an index >= length have weight 0, and a
    length of 0 gives 0. With ``frame_tokens=n`` query i sees the keys of the frames
    0..i // n, each of n tokens; with both, a key must pass both. ``scale`` is as in
    ``scaled_dot_product_attention``.

    Plain torch runs :func:`eager_attention`, on every device and with gradients. A
    runtime traces :func:`length_attention`.
    """
    with _lock:
        if _libraries:
            return
        library = torch.library.Library("tpuport", "FRAGMENT")
        library.define(
            "attention(Tensor query, Tensor key, Tensor value, "
            "Tensor? key_lengths=None, int? frame_tokens=None, float? scale=None) "
            "-> Tensor"
        )
        library.impl("attention", eager_attention, "CompositeImplicitAutograd")
        _libraries.append(library)


LENGTH_ATTENTION = OpOverride(
    targets=("torch.ops.tpuport.attention",),
    make=lambda context: functools.partial(length_attention, context),
    owner="tpuport.core.layers.attention_lengths",
    reason="key lengths and frames without a mask of Lq x Lk",
    define=define_attention_op,
)
"""The override for key lengths and frames, in the runtime of every model."""
