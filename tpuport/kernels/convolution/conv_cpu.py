"""Convolutions in the forms that XLA's CPU compiler is fast at.

The compiler is slow at convolutions over three axes, along one axis, and of channels
by themselves. The products here are equal, summed in another order. Over three axes,
frames are made one by one: what a kernel sees of frames and rows lies side by side, and
each column of the kernel is a product of matrices. Channels by themselves are sums of
shifted pictures.
``docs/performance.md`` has what that is worth.

Legend: N batch, C input channels, O output channels, T frames, Y rows, X columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

#: Bytes that one product of matrices reads, about.
CACHE = 1 << 21


def convolution_by_taps(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """[N, C, T, Y, X] convolved with [O, C, Kt, Ky, Kx] -> [N, O, T', Y', X'].

    ``stride`` and ``dilation`` must be 1 in the first place. Source of the contract:
    ``torch.nn.functional.conv3d``.
    """
    count, channels = input.shape[:2]
    outputs, _, frames, *kernel = weight.shape
    x = jnp.transpose(input, (0, 2, 3, 4, 1))
    sizes = [n + 2 * p for n, p in zip(x.shape[1:4], padding, strict=True)]
    reach = [dilation[axis] * (weight.shape[axis + 2] - 1) + 1 for axis in range(3)]
    made = [(sizes[i] - reach[i]) // stride[i] + 1 for i in range(3)]
    # So many rows at a time that what a kernel sees of them stays in a core's cache.
    row = made[2] * frames * kernel[0] * channels * input.dtype.itemsize
    blocks = max(1, min(made[1], made[1] * row // CACHE))
    height = -(-made[1] // blocks)
    blocks = -(-made[1] // height)
    seen_rows = (height - 1) * stride[1] + reach[1]
    below = (blocks * height - 1) * stride[1] + reach[1] - sizes[1]
    sides = [(p, p) for p in padding]
    sides[1] = (padding[1], padding[1] + max(below, 0))
    x = jnp.pad(x, [(0, 0), *sides, (0, 0)])
    rows = _seen(seen_rows, kernel[0], stride[1], dilation[1])
    columns = _seen(sizes[2], kernel[1], stride[2], dilation[2])
    # [columns, taps of frames and rows and channels, O]
    factors = jnp.transpose(weight, (4, 2, 3, 1, 0)).reshape(kernel[1], -1, outputs)

    def block(number: jax.Array) -> jax.Array:
        picture, part = number // blocks, number % blocks
        first = part * height * stride[1]
        start = (picture // made[0], picture % made[0], first, 0, 0)
        size = (1, frames, seen_rows, sizes[2], channels)
        found = jax.lax.dynamic_slice(x, start, size)[0]
        seen = [found[tap, row] for tap in range(frames) for row in rows]
        side_by_side = jnp.concatenate(seen, -1)
        out = jnp.zeros((), jnp.float32)
        for column, factor in zip(columns, factors, strict=True):
            near = side_by_side[:, column]
            out = out + jnp.matmul(near, factor, preferred_element_type=jnp.float32)
        # Rounded once, after the bias, as torch does: in bfloat16 it shows.
        out = out if bias is None else out + bias.astype(jnp.float32)
        return out.astype(input.dtype)

    out = jax.lax.map(block, jnp.arange(count * made[0] * blocks))
    out = out.reshape(count, made[0], blocks * height, made[2], outputs)
    return jnp.transpose(out[:, :, : made[1]], (0, 4, 1, 2, 3))


def with_bias(out: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
    """[N, O, ...] in float32 and a bias [O], rounded once, as torch does."""
    if bias is not None:
        shape = (1, -1) + (1,) * (out.ndim - 2)
        out = out + bias.astype(jnp.float32).reshape(shape)
    return out.astype(dtype)


def _seen(size: int, taps: int, stride: int, dilation: int) -> list[slice]:
    """What each tap of a kernel sees along an axis of that size."""
    last = size - dilation * (taps - 1)
    starts = range(0, dilation * taps, dilation)
    return [slice(start, start + last, stride) for start in starts]


def along_first_axis(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    padding: int,
    dilation: int,
) -> jax.Array:
    """[N, C, S, ...] by a kernel [O, C, K, 1, ...]: the sum of K products."""
    rest = [(0, 0)] * (input.ndim - 3)
    x = jnp.pad(input, [(0, 0), (0, 0), (padding, padding), *rest])
    taps = weight.shape[2]
    last = x.shape[2] - dilation * (taps - 1)
    flat = weight.reshape(weight.shape[:3])
    out = jnp.zeros((), jnp.float32)
    for tap in range(taps):
        part = x[:, :, tap * dilation :][:, :, :last]
        out = out + jnp.einsum(
            "nc...,oc->no...", part, flat[:, :, tap], preferred_element_type=jnp.float32
        )
    return with_bias(out, bias, input.dtype)


def channel_by_channel(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """[N, C, *sizes] by a kernel [C, 1, *kernel], a kernel for each channel."""
    x = jnp.pad(input, [(0, 0), (0, 0), *((p, p) for p in padding)])
    kernel, axes = weight.shape[2:], range(weight.ndim - 2)
    seen = [_seen(x.shape[2 + i], kernel[i], stride[i], dilation[i]) for i in axes]
    out = jnp.zeros((), jnp.float32)
    for tap in itertools.product(*map(range, kernel)):
        part = x[(..., *(seen[i][tap[i]] for i in axes))]
        factor = weight[(slice(None), 0, *tap)].reshape(-1, *(1 for _ in axes))
        out = out + part.astype(jnp.float32) * factor.astype(jnp.float32)
    return with_bias(out, bias, input.dtype)


def for_cpu(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array | None:
    """What XLA's CPU compiler is slow at, in another form; ``None`` for the rest."""
    kernel = weight.shape[2:]
    if groups > 1:
        if groups == input.shape[1] == weight.shape[0]:
            return channel_by_channel(input, weight, bias, stride, padding, dilation)
        return None
    if {*kernel[1:], *stride, 1} == {1} and not any(padding[1:]):
        return along_first_axis(input, weight, bias, padding[0], dilation[0])
    if len(kernel) == 3 and stride[0] == dilation[0] == 1:
        return convolution_by_taps(input, weight, bias, stride, padding, dilation)
    if len(kernel) == 2 and [*kernel] != [*stride]:
        video = input[:, :, None], weight[:, :, None]
        more = (1, *stride), (0, *padding), (1, *dilation)
        return convolution_by_taps(*video, bias, *more)[:, :, 0]
    return None
