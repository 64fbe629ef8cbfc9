"""Convolutions in the forms that XLA's CPU compiler is fast at.

The compiler is slow at convolutions over three axes, of many pictures at once, and of
each channel by itself. The products here are equal, summed in another order: the taps
of the first axis lie side by side in the channels of a convolution over the other two,
pictures are taken one by one, and channels by themselves are sums of shifted pictures.
``docs/performance.md`` has what that is worth.

Legend: N batch, C input channels, O output channels, T frames, Y rows, X columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


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
    count, channels, _, rows, columns = input.shape
    outputs, _, taps, *kernel = weight.shape
    pad_t, *pad = padding
    x = jnp.transpose(input, (0, 2, 3, 4, 1))
    x = jnp.pad(x, ((0, 0), (pad_t, pad_t), (0, 0), (0, 0), (0, 0)))
    frames = x.shape[1] - taps + 1

    def side_by_side(number: jax.Array) -> jax.Array:
        start = (number // frames, number % frames, 0, 0, 0)
        found = jax.lax.dynamic_slice(x, start, (1, taps, rows, columns, channels))
        return jnp.moveaxis(found[0], 0, 2).reshape(rows, columns, taps * channels)

    out = _picture_by_picture(
        side_by_side,
        count * frames,
        jnp.transpose(weight, (3, 4, 2, 1, 0)).reshape(
            *kernel, taps * channels, outputs
        ),
        bias,
        stride[1:],
        pad,
        dilation[1:],
    )
    out = out.reshape(count, frames, *out.shape[1:])
    return jnp.transpose(out, (0, 4, 1, 2, 3)).astype(input.dtype)


def _picture_by_picture(
    picture: Callable[[jax.Array], jax.Array],
    count: int,
    kernel: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """``count`` pictures [Y, X, C] by number, convolved with [Ky, Kx, C, O].

    Returns:
        [count, Y', X', O] in float32.
    """

    def one(number: jax.Array) -> jax.Array:
        out: jax.Array = jax.lax.conv_general_dilated(
            picture(number)[None],
            kernel,
            tuple(stride),
            [(p, p) for p in padding],
            rhs_dilation=tuple(dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            # Rounded once, after the bias, as torch does: in bfloat16 it shows.
            preferred_element_type=jnp.float32,
        )[0]
        return out if bias is None else out + bias.astype(jnp.float32)

    if count == 1:
        return one(jnp.int32(0))[None]
    return jax.lax.map(one, jnp.arange(count))


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
    if bias is not None:
        shape = (1, -1) + (1,) * (input.ndim - 2)
        out = out + bias.astype(jnp.float32).reshape(shape)
    return out.astype(input.dtype)


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
    reach = [dilation[i] * (kernel[i] - 1) for i in axes]
    out = jnp.zeros((), jnp.float32)
    for tap in itertools.product(*map(range, kernel)):
        starts = [dilation[i] * tap[i] for i in axes]
        ends = [x.shape[2 + i] - reach[i] + starts[i] for i in axes]
        cut = (..., *map(slice, starts, ends, stride))
        factor = weight[(slice(None), 0, *tap)].reshape(-1, *(1 for _ in axes))
        out = out + x[cut].astype(jnp.float32) * factor.astype(jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32).reshape(-1, *(1 for _ in axes))
    return out.astype(input.dtype)


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
    if len(kernel) == 3 and kernel[0] > 1 and stride[0] == dilation[0] == 1:
        return convolution_by_taps(input, weight, bias, stride, padding, dilation)
    if len(kernel) == 2 and [*kernel] != [*stride]:
        x = jnp.transpose(input, (0, 2, 3, 1))
        out = _picture_by_picture(
            lambda number: jax.lax.dynamic_index_in_dim(x, number, keepdims=False),
            len(x),
            jnp.transpose(weight, (2, 3, 1, 0)),
            bias,
            stride,
            padding,
            dilation,
        )
        return jnp.transpose(out, (0, 3, 1, 2)).astype(input.dtype)
    return None
