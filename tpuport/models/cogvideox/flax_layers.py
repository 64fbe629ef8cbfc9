"""Convolutions and norms of the Flax VAE, channels last.

Flax's classes are bases here, so this file is imported inside functions only. A layer
holds its weights under the names of upstream's module tree. ``STORED`` has upstream's
name of each weight and the order of its dims there.

On a TPU convolutions and norms run in the project's kernels
(:mod:`tpuport.core.layers.video_layers`). XLA runs what the kernels cannot, and the
notes say so.

Legend: N videos, T/Y/X frames, rows, columns, C/I/O channels, Z latent channels,
Tz/Yz/Xz the latents' own frames, rows and columns. Source: diffusers 0.42
``autoencoder_kl_cogvideox.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from tpuport.core.layers import video_layers as video
from tpuport.core.layers.video_layers import (
    PRODUCT,
    enlarged_convolution,
    group_norm,
    modulation_maps,
)
from tpuport.core.tracing.convolution_notes import note, passed_over
from tpuport.kernels.attention.reference import matmul_precision
from tpuport.models.cogvideox.flax_grid import Grid

Stored: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""A weight's name here -> its name in upstream's module, and which of upstream's dims
stands at each of ours."""

#: [O, I, T, Y, X] -> [T, Y, X, I, O], and the same without time.
_SPATIOTEMPORAL = (2, 3, 4, 1, 0)
_SPATIAL = (2, 3, 1, 0)

#: Frames that a convolution of three looks back at.
KEPT = 2

Frames: TypeAlias = "jax.Array"
"""[N, 2, Y, X, C]: the last frames of a causal convolution's input."""

Moments: TypeAlias = "tuple[jax.Array, jax.Array] | None"
"""Mean and variance of an activation by groups of channels, see ``Grid.moments``;
``None`` where a kernel takes them."""


def _weight(*shape: int) -> nnx.Param[Any]:
    return nnx.Param(jnp.zeros(shape))


def moments_of(x: jax.Array, groups: int, grid: Grid) -> Moments:
    """What a norm of ``x`` [N, T, Y, X, C] has to be given."""
    return None if grid.normalises(x.shape[-1]) else grid.moments(x, groups)


def convolve(
    x: jax.Array,
    earlier: jax.Array | None,
    kernel: jax.Array,
    bias: jax.Array,
    grid: Grid,
    residual: jax.Array | None = None,
    shortcut: tuple[jax.Array, Pointwise] | None = None,
) -> jax.Array:
    """A convolution that keeps rows and columns, with zeros around the picture.

    Args:
        x: [N, T, Y, X, I].
        earlier: [N, K - 1, Y, X, I], the frames before; ``None`` with K = 1.
        kernel: [K, 3, 3, I, O].
        bias: [O].
        residual: [N, T, Y, X, O], added to the result.
        shortcut: what to make it of: [N, T, Y, X, J], and what takes J channels to O.

    Returns:
        [N, T, Y, X, O] in the dtype of ``x``.
    """
    context = grid.kernels
    if context is not None:
        known = len(context.convolutions)
        # As upstream has it; it is turned back inside.
        weight = kernel.transpose(4, 3, 0, 1, 2)
        short = None if shortcut is None else (shortcut[0], *shortcut[1].as_stored())
        try:
            return video.convolve(context, x, earlier, weight, bias, residual, short)
        except NotImplementedError as error:
            passed_over(context, known, "convolution", "XLA", error)
    if shortcut is not None:
        # Written out, so that the sum is part of the convolution below.
        made = shortcut[1](shortcut[0], grid).astype(x.dtype)
        residual = jax.lax.optimization_barrier(made)
    joined = x if earlier is None else jnp.concatenate([earlier, x], axis=1)
    return plain_convolution(
        joined, kernel, bias, grid, before=1, after=1, residual=residual
    )


def enlarged(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, grid: Grid, copies: int
) -> jax.Array | None:
    """Twice the rows and columns and a convolution of frames, in one kernel.

    Args:
        x: [N, T, Y, X, I].
        kernel: [3, 3, I, O].
        bias: [O].
        copies: how often to give each frame, one after the other.

    Returns:
        [N, copies T, 2Y, 2X, O]; ``None`` where no kernel can.
    """
    context = grid.kernels
    if context is None:
        return None
    known = len(context.convolutions)
    weight = kernel.transpose(3, 2, 0, 1)
    try:
        return enlarged_convolution(context, x, weight, bias, copies)
    except NotImplementedError as error:
        passed_over(context, known, "upsampler", "layers of its own", error)
        return None


def plain_convolution(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    grid: Grid,
    *,
    before: int,
    after: int,
    stride: int = 1,
    residual: jax.Array | None = None,
) -> jax.Array:
    """XLA's convolution, of the frames there are; it pads rows and columns.

    The convolution covers two axes, with the frames of its taps side by side in the
    channels: XLA's CPU compiler wants that.

    Args:
        x: [N, T, Y, X, I].
        kernel: [K, Ky, Kx, I, O].
        bias: [O].
        before, after: rows and columns of zeros around the picture.
        stride: of rows and columns.
        residual: added to the result.

    Returns:
        [N, T - K + 1, Y', X', O] in the dtype of ``x``, rounded once at the end.
    """
    dtype = x.dtype
    x, pads = grid.padded(x, before, after)
    taps = kernel.shape[0]
    count, length, *_ = x.shape
    frames = length - taps + 1
    x = jnp.concatenate([x[:, t : t + frames] for t in range(taps)], axis=-1)
    x = x.reshape(count * frames, *x.shape[2:])
    flat = kernel.transpose(1, 2, 0, 3, 4)
    flat = flat.reshape(*flat.shape[:2], -1, flat.shape[-1])
    out = jax.lax.conv_general_dilated(
        x,
        flat,
        (stride,) * 2,
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=matmul_precision(dtype),
        preferred_element_type=jnp.float32,
    )
    out = out.reshape(count, frames, *out.shape[1:])
    out = out + bias.astype(jnp.float32)
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)


class CausalConv(nnx.Module):
    """Taps in time reach back only: to the chunk before, or its first frame again.

    Source: ``CogVideoXCausalConv3d`` with ``pad_mode="first"``, 3x3x3.
    """

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIOTEMPORAL),
        "bias": ("conv.bias", (0,)),
    }

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel = _weight(3, 3, 3, inputs, outputs)
        self.bias = _weight(outputs)

    def __call__(
        self,
        x: jax.Array,
        cache: Frames | None,
        grid: Grid,
        last: Frames | None = None,
        **added: Any,
    ) -> tuple[jax.Array, Frames]:
        """[N, T, Y, X, I] -> [N, T, Y, X, O], and the frames for the next chunk.

        ``last`` has the last frames of ``x``, where there is an array of them already;
        ``added`` is the ``residual`` or the ``shortcut`` of :func:`convolve`.
        """
        if cache is None:
            cache = jnp.concatenate([x[:, :1]] * KEPT, axis=1)
        out = convolve(x, cache, self.kernel[...], self.bias[...], grid, **added)
        if last is None:
            # Cut from the chunk's own frames where there are enough: less to wait for.
            whole = x.shape[1] >= KEPT
            last = x if whole else jnp.concatenate([cache, x], axis=1)
            last = last[:, -KEPT:]
        return out, last


class FrameConv(nnx.Module):
    """3x3 on every frame by itself. Source: the ``Conv2d`` of the samplers."""

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIAL),
        "bias": ("conv.bias", (0,)),
    }

    def __init__(self, channels: int) -> None:
        self.kernel = _weight(3, 3, channels, channels)
        self.bias = _weight(channels)


class Pointwise(nnx.Module):
    """A 1x1x1 convolution."""

    STORED: ClassVar[Stored] = {
        "kernel": ("weight", _SPATIOTEMPORAL),
        "bias": ("bias", (0,)),
    }

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel = _weight(1, 1, 1, inputs, outputs)
        self.bias = _weight(outputs)

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        """[..., I] -> [..., O] in float32."""
        if grid.kernels is not None:
            note(grid.kernels, PRODUCT)
        kernel = self.kernel[...][0, 0, 0]
        out = jax.lax.dot_general(
            x,
            kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return out + self.bias[...].astype(jnp.float32)

    def as_stored(self) -> tuple[jax.Array, jax.Array]:
        """Kernel and bias as upstream has them: [O, I, 1, 1, 1] and [O]."""
        return self.kernel[...].transpose(4, 3, 0, 1, 2), self.bias[...]


class CausalPointwise(Pointwise):
    """A :class:`Pointwise` that upstream wraps as a causal convolution of one tap."""

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIOTEMPORAL),
        "bias": ("conv.bias", (0,)),
    }


class GroupNorm(nnx.Module):
    """A group norm over a chunk's frames and the whole picture, and silu after it."""

    STORED: ClassVar[Stored] = {"scale": ("weight", (0,)), "bias": ("bias", (0,))}

    def __init__(self, channels: int, groups: int, epsilon: float) -> None:
        self.scale = _weight(channels)
        self.bias = _weight(channels)
        self.groups = groups
        self.epsilon = epsilon

    def __call__(
        self, x: jax.Array, moments: Moments, grid: Grid
    ) -> tuple[jax.Array, Frames | None]:
        """[N, T, Y, X, C] -> the same through the norm and silu, and its last frames.

        ``moments`` are :func:`moments_of` x; the frames are ``None`` where they are no
        array of their own.
        """
        if moments is None:
            return self.by_kernel(x, None, grid)
        centred = x.astype(jnp.float32) - moments[0]
        out = centred * self.factor(moments) + self.bias[...].astype(jnp.float32)
        return silu(out, x.dtype), None

    def by_kernel(
        self, x: jax.Array, modulation: jax.Array | None, grid: Grid
    ) -> tuple[jax.Array, Frames | None]:
        """The norm, its modulation and silu in one pass.

        Args:
            x: [N, T, Y, X, C].
            modulation: as :func:`tpuport.core.layers.video_layers.group_norm` takes it.
        """
        assert grid.kernels is not None
        return group_norm(
            grid.kernels,
            x,
            self.groups,
            self.scale[...],
            self.bias[...],
            self.epsilon,
            modulation,
            silu=True,
            kept=KEPT if x.shape[1] >= KEPT else 0,
        )

    def factor(self, moments: tuple[jax.Array, jax.Array]) -> jax.Array:
        """What a centred activation is multiplied by: [N, 1, 1, 1, C]."""
        scale = self.scale[...].astype(jnp.float32)
        return scale / jnp.sqrt(moments[1] + self.epsilon)


class SpatialNorm(nnx.Module):
    """A group norm whose result the latents scale and shift by pixel, then silu.

    Source: ``CogVideoXSpatialNorm3D``. Upstream enlarges the latents by nearest
    neighbours and convolves them with 1x1x1; here the other way round, which is the
    same and far less work.
    """

    def __init__(self, channels: int, latents: int, groups: int) -> None:
        self.norm_layer = GroupNorm(channels, groups, 1e-6)
        self.conv_y = CausalPointwise(latents, channels)
        self.conv_b = CausalPointwise(latents, channels)

    def __call__(
        self, x: jax.Array, moments: Moments, grid: Grid, z: jax.Array
    ) -> tuple[jax.Array, Frames | None]:
        """x [N, T, Y, X, C] and z [N, Tz, Yz, Xz, Z]: as :class:`GroupNorm`."""
        if moments is None:
            maps = self._maps(z, x.shape[3], grid)
            return self.norm_layer.by_kernel(x, maps, grid)
        count, frames, rows, columns, channels = x.shape
        y, w = z.shape[2:4]
        factor = repeat_frames(self.conv_y(z, grid), frames)
        shift = repeat_frames(self.conv_b(z, grid), frames)
        mean, scale = moments[0], self.norm_layer.factor(moments)
        # Pixels by latent and place in it: a latent's factor and shift are broadcast
        # to its pixels as they are read. Without the barrier XLA moves the reshape
        # behind the arithmetic, and writes both out at the size of the picture.
        pixels = jax.lax.optimization_barrier(
            x.reshape(count, frames, y, rows // y, w, columns // w, channels)
        )
        out = pixels.astype(jnp.float32) - mean[:, :, :, None, :, None]
        out = out * scale[:, :, :, None, :, None]
        out = out + self.norm_layer.bias[...].astype(jnp.float32)
        out = out * factor[:, :, :, None, :, None] + shift[:, :, :, None, :, None]
        # Rounded before the reshape, lest it is written out in float32.
        return silu(out, x.dtype).reshape(x.shape), None

    def _maps(self, z: jax.Array, columns: int, grid: Grid) -> jax.Array:
        """The modulation as the kernel of the norm takes it."""
        assert grid.kernels is not None
        for _ in range(2):
            note(grid.kernels, PRODUCT)
        factors, summands = self.conv_y.as_stored(), self.conv_b.as_stored()
        weights, biases = zip(factors, summands, strict=True)
        return modulation_maps(z, columns, weights, biases)


def silu(x: jax.Array, dtype: Any) -> jax.Array:
    """x * sigmoid(x) in float32, rounded to ``dtype``."""
    return (x * jax.nn.sigmoid(x)).astype(dtype)


def written_out(x: jax.Array) -> jax.Array:
    """A broadcast [..., C] that is to be an array, at the speed of memory.

    A TPU writes a bare broadcast at less than half the speed of arithmetic that
    broadcasts; the barriers keep XLA from seeing that this is a product with one.
    """
    one = jax.lax.optimization_barrier(jnp.ones(x.shape[-1:], x.dtype))
    return jax.lax.optimization_barrier(x * one)


def repeat_frames(x: jax.Array, frames: int) -> jax.Array:
    """[N, T, ...] with every frame repeated to make ``frames``.

    If T is odd and above one, the first frame stays single: it is the first of the
    video, as in upstream.
    """
    length = x.shape[1]
    if frames == length:
        return x
    single = frames % 2
    times = (frames - single) // (length - single)
    rest = x[:, single:]
    wide = (x.shape[0], length - single, times, *x.shape[2:])
    rest = written_out(jnp.broadcast_to(rest[:, :, None], wide))
    rest = rest.reshape(x.shape[0], frames - single, *x.shape[2:])
    return jnp.concatenate([x[:, :1], rest], axis=1) if single else rest
