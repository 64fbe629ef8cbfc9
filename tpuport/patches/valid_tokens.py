"""Attention for patches on upstream code: padding as lengths, causality as frames.

Once valid tokens stand first, a mask that hides padding only says how many tokens are
valid. If the order of the keys carries no position (a text without rotary embedding),
moving valid tokens to the front changes no result. One integer per batch item then
replaces the mask of Lq x Lk, gigabytes at the sizes of a video:

    text, lengths = valid_first(text, mask)
    ...  # keys and values of [video, text]
    out = attend(query, key, value, key_lengths=video_tokens + lengths)

No shape and no branch depends on data. Attention runs in a traced program alone.

Legend: B batch, H heads (Hkv of keys), L tokens (Lq queries, Lk keys), D head dim (Dv
of values), C channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from tpuport.core.layers.attention import split_attention
from tpuport.core.tracing.context import OpContext, current


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """:func:`length_attention` of tensors.

    Raises:
        RuntimeError: no program is being traced.
    """
    active = current()
    q, k, v, lengths = active.arrays((query, key, value, key_lengths))
    out: torch.Tensor = active.tensors(
        length_attention(active.context, q, k, v, lengths, frame_tokens, scale)
    )
    return out


def length_attention(
    context: OpContext,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_lengths: jax.Array | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attention of [B, H, Lq, D] queries on [B, Hkv, Lk, D] keys, Hkv dividing H.

    Frames run one after the other. Memory holds one frame's queries on all keys, and
    no array has Lq x Lk elements.

    Args:
        key_lengths: integers [B]: keys at an index >= length have weight 0, and a
            length of 0 gives 0.
        frame_tokens: query i sees the keys of the frames 0..i // n, each of n tokens;
            a key must pass this and its length. Needs Lq = Lk, in whole frames.
        scale: factor of the scores; ``None`` means 1/sqrt(D).

    Returns:
        [B, H, Lq, Dv] in the dtype of ``query``.

    Raises:
        AttentionError: the implementation named in the context cannot do this call.
        ValueError: shapes or dtypes do not fit together.
    """
    shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape]}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"attention takes [B, H, L, D]; got {shapes}")
    if key_lengths is not None:
        wanted = (query.shape[0],)
        integers = jnp.issubdtype(key_lengths.dtype, jnp.integer)
        if tuple(key_lengths.shape) != wanted or not integers:
            raise ValueError(
                f"key_lengths must be integers of shape {[*wanted]}; got "
                f"{key_lengths.dtype} of shape {[*key_lengths.shape]} with {shapes}"
            )
        key_lengths = key_lengths.astype(jnp.int32)
    if frame_tokens is not None and (
        frame_tokens < 1
        or query.shape[2] != key.shape[2]
        or query.shape[2] % frame_tokens
    ):
        raise ValueError(
            f"frame_tokens={frame_tokens} needs as many queries as keys, in whole "
            f"frames of at least one token; got {shapes}"
        )
    return split_attention(
        context,
        query,
        key,
        value,
        lengths=key_lengths,
        frame_tokens=frame_tokens,
        scale=scale,
    )


def valid_first(
    tokens: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L, C] with the valid ones first, bit for bit; both keep their order.

    Args:
        mask: of shape [B, L] and any dtype; what is not 0 is valid. L may be 0.

    Returns:
        The tokens, and the number of valid ones, integers [B].

    Raises:
        ValueError: the shapes do not fit together.
    """
    if tokens.ndim != 3 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"valid_first takes tokens [B, L, C] with a mask [B, L]; got "
            f"{[*tokens.shape]} with {[*mask.shape]}"
        )
    valid = mask.bool()
    order = torch.argsort(valid.logical_not().int(), dim=1, stable=True)
    # Whole rows: torch.gather would index every element by itself. By the operator and
    # not in brackets, where torchax 0.0.13 fails on a tensor that is a slice of one.
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    taken = torch.ops.aten.index(tokens, [rows, order])
    # Counting in the dtype of the mask, bfloat16 say, would make 256 + 1 = 256.
    return taken, valid.int().sum(dim=1)
