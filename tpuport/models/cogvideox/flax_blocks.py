"""The residual blocks of the Flax VAE, and what changes the resolution between them.

Imported inside functions only, as the layers are.

Legend: N videos, T/Y/X frames, rows, columns, C/I/O channels.
Source: diffusers 0.42 ``autoencoder_kl_cogvideox.py``, ``upsampling.py``,
``downsampling.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpuport.core.tracing.convolution_notes import note
from tpuport.models.cogvideox.flax_grid import Grid
from tpuport.models.cogvideox.flax_layers import (
    CausalConv,
    FrameConv,
    Frames,
    GroupNorm,
    Moments,
    Pointwise,
    SpatialNorm,
    convolve,
    enlarged,
    moments_of,
    plain_convolution,
    repeat_frames,
    written_out,
)


class ResnetBlock(nnx.Module):
    """Norm, silu, convolution, twice, added to the input.

    Source: ``CogVideoXResnetBlock3D`` without dropout and time embedding.

    Args:
        latents: their channels, for spatial norms; ``None`` for group norms.
        epsilon: of group norms; spatial norms have their own.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        groups: int,
        epsilon: float,
        latents: int | None,
    ) -> None:
        def norm(channels: int) -> nnx.Module:
            if latents is None:
                return GroupNorm(channels, groups, epsilon)
            return SpatialNorm(channels, latents, groups)

        self.norm1 = norm(inputs)
        self.conv1 = CausalConv(inputs, outputs)
        self.norm2 = norm(outputs)
        self.conv2 = CausalConv(outputs, outputs)
        if inputs != outputs:
            self.conv_shortcut = Pointwise(inputs, outputs)

        self.groups = groups

    def __call__(
        self,
        x: jax.Array,
        moments: Moments,
        z: jax.Array | None,
        cache: Mapping[str, Frames] | None,
        grid: Grid,
    ) -> tuple[jax.Array, dict[str, Frames]]:
        """[N, T, Y, X, I] -> [N, T, Y, X, O]; z are the latents of a spatial norm."""
        cache = cache or {}
        given = () if z is None else (z,)
        kept: dict[str, Frames] = {}
        norm1: Any = self.norm1
        norm2: Any = self.norm2
        h, last = norm1(x, moments, grid, *given)
        h, kept["conv1"] = self.conv1(h, cache.get("conv1"), grid, last=last)
        h, last = norm2(h, moments_of(h, self.groups, grid), grid, *given)
        added: dict[str, Any] = {"residual": x}
        if hasattr(self, "conv_shortcut"):
            added = {"shortcut": (x, self.conv_shortcut)}
        h, kept["conv2"] = self.conv2(h, cache.get("conv2"), grid, last, **added)
        return h, kept


def run_blocks(
    blocks: Sequence[ResnetBlock],
    x: jax.Array,
    z: jax.Array | None,
    cache: Sequence[Mapping[str, Frames]] | None,
    grid: Grid,
) -> tuple[jax.Array, Moments, list[dict[str, Frames]]]:
    """Residual blocks one after the other.

    Not a loop over those that are alike: on TPUs equal kernels are compiled once all
    the same, and a loop copies its slices of weights and caches.

    Args:
        blocks: at one resolution.
        cache: of each block.

    Returns:
        the activation, its moments, and the cache of the next chunk.
    """
    groups = blocks[0].groups
    moments = moments_of(x, groups, grid)
    kept: list[dict[str, Frames]] = []
    for index, block in enumerate(blocks):
        x, frames = block(x, moments, z, cache[index] if cache else None, grid)
        # Here they are taken as the convolution writes its result.
        moments = moments_of(x, groups, grid)
        kept.append(frames)
    return x, moments, kept


class Upsample(FrameConv):
    """Twice the rows and columns, and the frames where ``in_time``; then 3x3.

    Source: ``CogVideoXUpsample3D``. The convolution is of single frames, so it runs
    before they are repeated.
    """

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__(channels)
        self.in_time = in_time

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        """[N, T, Y, X, C] -> [N, T', 2Y, 2X, C]."""
        frames = x.shape[1]
        again = self.in_time and frames > 1
        kernel, bias = self.kernel[...], self.bias[...]
        made = enlarged(x, kernel, bias, grid, 2 if again else 1)
        if made is not None:
            # Of an odd number the first stands for itself.
            return made[:, 1:] if again and frames % 2 else made
        out = convolve(_doubled(x), None, kernel[None], bias, grid)
        return repeat_frames(out, 2 * frames - frames % 2) if again else out


def _doubled(x: jax.Array) -> jax.Array:
    """Every row and column of [N, T, Y, X, C] twice."""
    count, frames, rows, columns, channels = x.shape
    wide = written_out(
        jnp.broadcast_to(
            x[:, :, :, None, :, None], (count, frames, rows, 2, columns, 2, channels)
        )
    )
    return wide.reshape(count, frames, 2 * rows, 2 * columns, channels)


class Downsample(FrameConv):
    """Half the rows and columns by 3x3, after means of two frames where ``in_time``.

    Source: ``CogVideoXDownsample3D``.
    """

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__(channels)
        self.in_time = in_time

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        """[N, T, Y, X, C] -> [N, T', Y / 2, X / 2, C]."""
        if self.in_time:
            x = _halved(x)
        if grid.kernels is not None:
            note(grid.kernels, "XLA", "a stride of (2, 2)")
        return plain_convolution(
            x, self.kernel[...][None], self.bias[...], grid, before=0, after=1, stride=2
        )


def _halved(x: jax.Array) -> jax.Array:
    """Means of two frames; of an odd number the first one stays as it is."""
    single = x.shape[1] % 2
    rest = x[:, single:].astype(jnp.float32)
    rest = rest.reshape(x.shape[0], -1, 2, *x.shape[2:]).mean(2).astype(x.dtype)
    return jnp.concatenate([x[:, :1], rest], axis=1) if single else rest
