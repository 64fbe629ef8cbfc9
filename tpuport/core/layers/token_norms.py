"""Norms of transformer blocks on a joint sequence.

Letters: B batch, L tokens with padding, E width, H heads, D head dim; M and N are L and
D, or D and L where features come before tokens.

Statistics, modulation and rotation are in float32 and rounded once. On a TPU kernels
read the tokens once (``tpuport/kernels/norms/token_norm.py``), each device its own
tokens. XLA's code runs elsewhere, and if a kernel refuses a size.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Float32
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.tracing.context import HEADS
from tpuport.core.tracing.kernel_options import kernel_options
from tpuport.core.tracing.ported_module import on_devices
from tpuport.kernels.norms.token_norm import head_norm_rotary, modulated_layer_norm

#: Shift and scale of each item, or of each of its tokens, in either order.
Pair = tuple[Float[Array, "b *l e"], Float[Array, "b *l e"]]
#: Tables of a rotation: cos and sin.
Tables = tuple[Float[Array, "m n"], Float[Array, "m n"]]


def normalise(x: Float[Array, "*dims"], eps: float) -> Float32[Array, "*dims"]:
    """``x`` minus its mean over the last dim, over its deviation, in float32.

    Two passes, so that a mean far from 0 costs no digits.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


def layer_norm(
    x: Float[Array, "*lead e"],
    weight: Float[Array, "e"] | None,
    bias: Float[Array, "e"] | None,
    eps: float,
) -> Float32[Array, "*lead e"]:
    """A layer norm over the last dim, in float32; ``weight`` and ``bias`` are [E]."""
    out = normalise(x, eps)
    if weight is not None:
        out = out * weight.astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def modulated_norm(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    *,
    weight: Float[Array, "e"] | None,
    bias: Float[Array, "e"] | None,
    eps: float,
    text: Pair,
    video: Pair,
) -> Float[Array, "b l e"]:
    """A layer norm and ``y * (1 + scale) + shift``, as one scale and one shift.

    Args:
        sequence: which tokens are text.
        weight, bias: of the norm, [E]; ``None`` if the norm has none.
        text, video: (shift, scale), each [B, E], of text tokens and of all others; one
            pair for both may be [B, L, E], with a row for each token.

    Returns:
        of the shape and dtype of ``x``.
    """

    def folded(shift: Array, scale: Array) -> Pair:
        scale = 1 + scale.astype(jnp.float32)
        shift = shift.astype(jnp.float32)
        if bias is not None:
            shift = shift + scale * bias.astype(jnp.float32)
        if weight is not None:
            scale = scale * weight.astype(jnp.float32)
        return shift, scale

    shift, scale = folded(*video)
    text_shift, text_scale = shift, scale
    if any(one is not other for one, other in zip(text, video, strict=True)):
        text_shift, text_scale = folded(*text)
    if has_kernels(sequence) and scale.ndim == 2:
        # Another number of tokens or features than the kernel takes is XLA's.
        with contextlib.suppress(NotImplementedError):
            return _modulated_by_kernel(
                sequence, x, eps, (shift, scale), (text_shift, text_scale)
            )
    out = normalise(x, eps)
    out = out * sequence.choose(text_scale, scale)
    return (out + sequence.choose(text_shift, shift)).astype(x.dtype)


def has_kernels(sequence: JointSequence) -> bool:
    """Whether kernels can run: on a TPU, with tokens last."""
    return sequence.feature_major and sequence.active.context.platform == "tpu"


def _modulated_by_kernel(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    eps: float,
    video: Pair,
    text: Pair,
) -> Float[Array, "b l e"]:
    """:func:`modulated_norm` by the kernel; shifts and scales are float32 [B, E]."""
    marked = (0, 0) if text[1] is video[1] else sequence.text_places
    run = functools.partial(
        modulated_layer_norm,
        eps=eps,
        marked=marked,
        **kernel_options(sequence.active.context),
    )

    shift, scale = (jnp.stack(pair, 1) for pair in zip(video, text, strict=True))
    # A transpose on paper only: tokens are last in memory.
    turned = x.swapaxes(1, 2)
    batch, tokens = sequence.axes(x.shape[0])
    each = x.shape[1] // sequence.active.axis_size(tokens)
    firsts = jnp.arange(0, x.shape[1], each, dtype=jnp.int32)
    out = on_devices(
        sequence.active.context.mesh,
        run,
        (turned, scale, shift, firsts),
        ((batch, None, tokens), (batch,), (batch,), (tokens,)),
        (batch, None, tokens),
    )
    return out.swapaxes(1, 2)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A layer norm, or an RMS norm, over the head dim.

    Attributes:
        weight, bias: of shape [D], or [H D] with ``across``; ``None`` if the norm has
            none.
        eps: of the norm.
        centre: subtract the mean; ``False`` makes an RMS norm.
        across: the norm is over all heads of a token.
    """

    weight: Float[Array, "hd"] | None
    bias: Float[Array, "hd"] | None
    eps: float
    centre: bool = True
    across: bool = False


def turned(
    sequence: JointSequence,
    x: Float[Array, "b h m n"],
    norm: HeadNorm | None,
    tables: Tables | None,
    dtype: Any,
) -> Float[Array, "b h m n"]:
    """Queries or keys: normed and rotated in float32, rounded once to ``dtype``.

    The two halves of the head dim are computed apart up to the end, so that no float32
    array of all heads is held.

    Args:
        x: as :func:`to_heads` gives it, from weights in the order of halves.
        norm: norm over the head dim, or over all heads, or ``None``. Its input is ``x``
            rounded to ``dtype``, because upstream rounds its projection before it.
        tables: as :func:`rotary_tables` gives them; ``None`` for no rotation.
    """
    axis = 2 if sequence.feature_major else 3
    mean: Any = 0.0
    inverse: Any = 1.0
    if norm is not None:
        x = x.astype(dtype)
        if has_kernels(sequence):
            with contextlib.suppress(NotImplementedError):  # as above
                return _turned_by_kernel(sequence, x, norm, tables)
        wide = x.astype(jnp.float32)
        over = (1, axis) if norm.across else axis
        if norm.centre:
            mean = jnp.mean(wide, over, keepdims=True)
        power = jnp.mean(jnp.square(wide - mean), over, keepdims=True)
        inverse = jax.lax.rsqrt(power + norm.eps)

    def along(vector: Array, half: int) -> Array:
        heads = vector.astype(jnp.float32).reshape(-1, x.shape[axis])
        part = jnp.split(heads, 2, 1)[half]
        return jnp.expand_dims(part, 2 if sequence.feature_major else 1)

    def normed(part: Array, half: int) -> Array:
        out = (part.astype(jnp.float32) - mean) * inverse
        if norm is not None and norm.weight is not None:
            out = out * along(norm.weight, half)
        if norm is not None and norm.bias is not None:
            out = out + along(norm.bias, half)
        return out

    if norm is None and tables is None:
        return x.astype(dtype)
    first, second = (
        normed(part, half) for half, part in enumerate(jnp.split(x, 2, axis))
    )
    if tables is not None:
        (cos, cos_2), (sin, sin_2) = (jnp.split(t, 2, axis - 2) for t in tables)
        first, second = first * cos - second * sin, second * cos_2 + first * sin_2
    return jnp.concatenate([first.astype(dtype), second.astype(dtype)], axis)


def _turned_by_kernel(
    sequence: JointSequence,
    x: Float[Array, "b h d l"],
    norm: HeadNorm,
    tables: tuple[Float[Array, "d l"], Float[Array, "d l"]] | None,
) -> Float[Array, "b h d l"]:
    """:func:`turned` by the kernel, for ``x`` [B, H, D, L] in the result's dtype."""
    context = sequence.active.context
    heads = context.axis(HEADS, x.shape[1])
    if norm.across and heads is not None:
        raise NotImplementedError("devices hold different heads of a token")
    run = functools.partial(
        head_norm_rotary,
        eps=norm.eps,
        centre=norm.centre,
        across=norm.across,
        **kernel_options(context),
    )
    shape = (x.shape[1] if norm.across else 1, x.shape[2])
    weight, bias = (
        jnp.full(shape, rest, jnp.float32)
        if vector is None
        else vector.astype(jnp.float32).reshape(shape)
        for vector, rest in ((norm.weight, 1), (norm.bias, 0))
    )
    if tables is None:
        # Positions are learned, or the tokens are text: no rotation.
        still = jnp.ones(x.shape[2:], jnp.float32)
        tables = still, jnp.zeros_like(still)
    batch, tokens = sequence.axes(x.shape[0])
    split = (batch, heads, None, tokens)
    return on_devices(
        context.mesh,
        run,
        (x, jnp.stack([weight, bias], 1), *tables),
        (split, (), (None, tokens), (None, tokens)),
        split,
    )
