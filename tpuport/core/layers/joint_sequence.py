"""Transformer blocks on one joint sequence, in the layouts that a TPU wants.

Letters: B batch, L tokens with padding, E width, H heads, D head dim, F another width;
M and N are L and D, or D and L where features come before tokens.

Upstream keeps text and video tokens apart, joins and parts them in every block, holds
pairs of rotary elements next to each other, and transposes arrays around every
attention. Here one array holds all tokens and is split over the sequence axis of the
mesh. Differences between text and video are chosen per token. Queries, keys and values
have their tokens last on a TPU. The functions take and give JAX arrays; statistics,
rotation and modulation are in float32 and rounded once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tpuport.core.arrays import Array, Bool, Float, Float32, Int, Shaped
from tpuport.core.layers.attention import note_attention, split_attention
from tpuport.core.layers.sequence_parallel import (
    degrees_of,
    padded_length,
    sequence_attention,
)
from tpuport.core.tracing.context import BATCH, HEADS, TOKENS, Active
from tpuport.core.tracing.ported_module import constrain, on_devices
from tpuport.kernels.attention.attention import attention_feature_major
from tpuport.kernels.padding import pad_dim


@dataclass(frozen=True, eq=False)
class JointSequence:
    """Where the tokens of a joint sequence are.

    Attributes:
        active: what is being traced.
        text: number of text tokens.
        length: number of tokens without padding; padding comes last.
        padded: tokens with padding, a multiple of the sequence axis.
        text_first: whether text comes before video.
        divided: whether the tokens are split over the sequence axis.
    """

    active: Active
    text: int
    length: int
    padded: int
    text_first: bool = True
    divided: bool = True

    @classmethod
    def of(
        cls,
        active: Active,
        *,
        text: int,
        length: int,
        batch: int,
        heads: int,
        head_dim: int,
        text_first: bool = True,
    ) -> JointSequence:
        """A sequence padded for the mesh and the chip that is being traced for.

        ``batch``, ``heads`` and ``head_dim`` are those of the attention.
        """
        context = active.context
        padded = padded_length(
            length,
            active.axis_size(TOKENS),
            platform=context.platform,
            head_dim=head_dim,
            chip=context.chip,
            ring=degrees_of(active, batch, heads).ring,
        )
        return cls(active, text, length, padded, text_first)

    @property
    def feature_major(self) -> bool:
        """Whether queries, keys and values have their tokens last."""
        return self.active.context.platform == "tpu"

    @property
    def sums_partial_products(self) -> bool:
        """Whether weights with split columns give partial products.

        The network sums partial products over the devices of the head axis, in the
        weights' dtype as in any other linear layer, not in float32.
        """
        return self.active.axis_size(HEADS) > 1

    def split(self, x: Shaped[Array, "b l *rest"]) -> Shaped[Array, "b l *rest"]:
        """``x`` [B, L, ...] with its tokens split over the sequence axis."""
        if not self.divided:
            return self.whole(x)
        return self._constrain(x, TOKENS)

    def whole(self, x: Shaped[Array, "b l *rest"]) -> Shaped[Array, "b l *rest"]:
        """``x`` [B, L, ...] with all its tokens on every device of the axis."""
        return self._constrain(x, None)

    def pad(self, x: Shaped[Array, "b _ e"]) -> Shaped[Array, "b l e"]:
        """[B, tokens, E] with zeros for padding, split.

        Every device computes all of ``x``: a partitioner that joins tokens of uneven
        parts moves more than it saves, and takes minutes to compile.
        """
        return self.split(pad_dim(self.whole(x), 1, self.padded))

    @property
    def text_places(self) -> tuple[int, int]:
        """Where text begins, and where it ends."""
        if self.text_first:
            return 0, self.text
        return self.length - self.text, self.length

    def axes(self, batch: int) -> tuple[str | None, str | None]:
        """The mesh axes that split ``batch`` items and the tokens, or ``None``."""
        context = self.active.context
        sequence = TOKENS if self.divided else None
        return context.axis(BATCH, batch), context.axis(sequence)

    def is_text(self) -> Bool[Array, "l"]:
        """Which tokens are text, bool [L]."""
        index = jnp.arange(self.padded)
        first, end = self.text_places
        return (index >= first) & (index < end)

    def choose(
        self, text: Float[Array, "b *l e"], video: Float[Array, "b *l e"]
    ) -> Float[Array, "b _ e"]:
        """[B, L, E] with one row [B, E] for all text tokens and one for all others.

        If ``text`` is ``video``, the result is [B, 1, E]; it may then have a row for
        each token, [B, L, E], and stays as it is.
        """
        if text is video:
            return video[:, None] if video.ndim == 2 else video
        return jnp.where(self.is_text()[:, None], text[:, None], video[:, None])

    def _constrain(
        self, x: Shaped[Array, "b l *rest"], axis: str | None
    ) -> Shaped[Array, "b l *rest"]:
        context = self.active.context
        batch = context.axis(BATCH, x.shape[0])
        return constrain(context.mesh, x, batch, context.axis(axis))


def patches(
    x: Float[Array, "b c t y x"], patch: tuple[int, ...]
) -> Float[Array, "b l e"]:
    """Latents [B, C, T, Y, X] as tokens [B, N, C p p p], as a convolution sees them.

    Whole patches only: what remains of a dim is cut.
    """
    batch, channels, *sizes = x.shape
    counts = [size // p for size, p in zip(sizes, patch, strict=True)]
    frames, rows, columns = (n * p for n, p in zip(counts, patch, strict=True))
    x = x[:, :, :frames, :rows, :columns]
    parted = [n for pair in zip(counts, patch, strict=True) for n in pair]
    x = x.reshape(batch, channels, *parted).transpose(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(batch, -1, channels * math.prod(patch))


def gated(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    update: Float[Array, "b l e"],
    *,
    text: Float[Array, "b *l e"],
    video: Float[Array, "b *l e"],
) -> Float[Array, "b l e"]:
    """``x + gate * update`` with a gate [B, E] for text and one for video tokens.

    One gate for both may be [B, L, E], with a row for each token.
    """
    wide = update.astype(jnp.float32)
    gate = sequence.choose(text, video).astype(jnp.float32)
    return sequence.split((x.astype(jnp.float32) + gate * wide).astype(x.dtype))


def to_heads(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    weight: Float[Array, "hd e"],
    bias: Float[Array, "hd"] | None,
    head_dim: int,
) -> Float32[Array, "b h m n"]:
    """A projection of [B, L, E] to heads, in float32.

    Args:
        weight: [H D, E]; ``bias`` [H D], or ``None``.
        head_dim: D.

    Returns:
        [B, H, D, L] if ``sequence.feature_major``, else [B, H, L, D].
    """
    heads = weight.shape[0] // head_dim
    split = weight.reshape(heads, head_dim, weight.shape[1])
    equation = "ble,hde->bhdl" if sequence.feature_major else "ble,hde->bhld"
    out = jnp.einsum(equation, x, split, preferred_element_type=jnp.float32)
    if bias is None:
        return out
    wide = bias.astype(jnp.float32).reshape(heads, head_dim)
    return out + (wide[:, :, None] if sequence.feature_major else wide[:, None])


def dense(
    sequence: JointSequence,
    x: Float[Array, "*lead e"],
    weight: Float[Array, "f e"],
    bias: Float[Array, "f"] | None,
    *,
    row_parallel: bool = False,
) -> Float32[Array, "*lead f"]:
    """A linear layer that is not rounded, in front of float32 arithmetic.

    Args:
        sequence: tells the dtype in which partial products are summed.
        weight: [F, E]; ``bias`` [F], or ``None``.
        row_parallel: columns of the weight may be split between devices.

    Returns:
        float32 [..., F].
    """
    narrow = row_parallel and sequence.sums_partial_products
    out = jnp.einsum(
        "...e,fe->...f",
        x,
        weight,
        preferred_element_type=x.dtype if narrow else jnp.float32,
    ).astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def from_heads(
    sequence: JointSequence,
    x: Float[Array, "b h m n"],
    weight: Float[Array, "e hd"],
    bias: Float[Array, "e"] | None,
) -> Float[Array, "b l e"]:
    """The projection [B, L, E] of the result of attention.

    Args:
        x: as :func:`to_heads` gives it.
        weight: [E, H D]; ``bias`` [E], or ``None``.

    Returns:
        [B, L, E]: float32, or the dtype of ``x`` if partial products of several devices
        are summed.
    """
    batch, heads = x.shape[:2]
    kept = x.dtype if sequence.sums_partial_products else jnp.float32
    if sequence.feature_major:
        split = weight.reshape(weight.shape[0], heads, -1)
        out = jnp.einsum("bhdl,ehd->ble", x, split, preferred_element_type=kept)
    else:
        # XLA's CPU compiler is slow at a product over two dims that lie apart.
        joined = x.swapaxes(1, 2).reshape(batch, x.shape[2], -1)
        out = jnp.einsum("blx,ex->ble", joined, weight, preferred_element_type=kept)
    if bias is None:
        return out
    return out.astype(jnp.float32) + bias.astype(jnp.float32)


def rotary_tables(
    sequence: JointSequence,
    cos: Float[Array, "tokens d"],
    sin: Float[Array, "tokens d"],
) -> tuple[Float32[Array, "m n"], Float32[Array, "m n"]]:
    """Tables for all tokens, in the order of halves; text and padding do not turn.

    Args:
        sequence: where the video tokens are.
        cos, sin: tables of the video tokens, [tokens, D] with neighbours as pairs.

    Returns:
        cos and sin, float32 [D, L] if ``sequence.feature_major``, else [L, D].
    """

    def table(x: Float[Array, "tokens d"], rest: float) -> Float32[Array, "m n"]:
        x = constrain(sequence.active.context.mesh, x.astype(jnp.float32), None, None)
        halves = x.reshape(x.shape[0], -1, 2).swapaxes(1, 2).reshape(x.shape)
        before = sequence.text if sequence.text_first else 0
        after = sequence.padded - before - halves.shape[0]
        full = jnp.pad(halves, ((before, after), (0, 0)), constant_values=rest)
        full = constrain(sequence.active.context.mesh, full, None, None)
        return full.T if sequence.feature_major else full

    return table(cos, 1.0), table(sin, 0.0)


def attend(
    sequence: JointSequence,
    q: Float[Array, "b h m n"],
    k: Float[Array, "b h m n"],
    v: Float[Array, "b h m n"],
    dtype: Any,
    *,
    kv_lengths: Int[Array, "b"] | None = None,
) -> Float[Array, "b h m n"]:
    """Attention of all tokens on the tokens without padding.

    Args:
        q, k, v: as :func:`to_heads` gives them; they are rounded to ``dtype``.
        kv_lengths: number of leading tokens of each item that count, integers [B].

    Returns:
        of the shape of ``q``, in ``dtype``.
    """
    if sequence.padded > sequence.length or kv_lengths is not None:
        index = jnp.arange(sequence.padded)
        counts = (index < sequence.length)[None]
        if kv_lengths is not None:
            counts = counts & (index < kv_lengths[:, None])
        shape = (-1, 1, 1, sequence.padded)
        if not sequence.feature_major:
            shape = (-1, 1, sequence.padded, 1)
        v = jnp.where(counts.reshape(shape), v, 0)
    return sequence_attention(
        sequence.active,
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        kv_len=sequence.length,
        kv_lengths=kv_lengths,
        feature_major=sequence.feature_major,
    )


def attend_others(
    sequence: JointSequence,
    q: Float[Array, "b h m n"],
    k: Float[Array, "b h _ _"],
    v: Float[Array, "b h _ _"],
    dtype: Any,
) -> Float[Array, "b h m n"]:
    """Attention of all tokens on others, such as text, that are whole everywhere.

    Args:
        q, k, v: as :func:`to_heads` gives them; they are rounded to ``dtype``.

    Returns:
        of the shape of ``q``, in ``dtype``.
    """
    context = sequence.active.context
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    if not sequence.feature_major:
        return split_attention(context, q, k, v, scale=None)
    # A window holds neighbours within one sequence.
    choice = replace(context.implementation, window=None)
    batch, tokens = sequence.axes(q.shape[0])
    heads = context.axis(HEADS, q.shape[1])
    run = functools.partial(
        attention_feature_major,
        platform=context.platform,
        implementation=choice,
        chip=context.chip,
        told=functools.partial(
            note_attention,
            context,
            choice,
            query=(*q.shape[:2], q.shape[3], q.shape[2]),
            key=(*k.shape[:2], k.shape[3], k.shape[2]),
            split=(batch, heads, tokens, None),
            dtype=str(q.dtype),
        ),
    )
    others = (batch, heads, None, None)
    queries = (batch, heads, None, tokens)
    return on_devices(context.mesh, run, (q, k, v), (queries, others, others), queries)
