"""CogVideoX's VAE in Flax (NNX), channels last: encoder and decoder.

Both run a chunk of frames at a time and hand on what the causal convolutions need, as
in upstream. Sizes are anything that the strides divide.

Legend: B videos, T/Y/X latent frames, rows, columns, F frames, C latent channels.
Source: diffusers 0.42 ``AutoencoderKLCogVideoX``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx

from tpuport.models.cogvideox.flax_blocks import (
    Downsample,
    ResnetBlock,
    Upsample,
    run_blocks,
)
from tpuport.models.cogvideox.flax_grid import Grid
from tpuport.models.cogvideox.flax_layers import (
    CausalConv,
    GroupNorm,
    Pointwise,
    SpatialNorm,
)

Cache = dict[str, Any]
"""The last two frames of every causal convolution's input: a tree of arrays
[B, 2, Y, X, C]."""

#: Residual blocks of the middle.
_MIDDLE = 2


def vae_config(config: Mapping[str, Any]) -> Any:
    """Upstream's config; what it leaves out has upstream's defaults.

    Its ``temporal_levels`` are the levels of the pyramid at which frames are halved.

    Raises:
        NotImplementedError: an option that the Flax VAE does not have.
    """
    from diffusers import AutoencoderKLCogVideoX

    parameters = inspect.signature(AutoencoderKLCogVideoX).parameters
    known = SimpleNamespace(**{n: p.default for n, p in parameters.items()})
    vars(known).update(config)
    blocks = len(known.block_out_channels)
    only: dict[str, tuple[Any, ...]] = {
        "act_fn": ("silu", "swish"),
        "down_block_types": (["CogVideoXDownBlock3D"] * blocks,),
        "up_block_types": (["CogVideoXUpBlock3D"] * blocks,),
    }
    for name, values in only.items():
        found = config.get(name, values[0])
        found = found if isinstance(found, str) else list(found)
        if found not in values:
            raise NotImplementedError(
                f"the Flax VAE has no {name}={found!r}; it knows {values[0]!r}. "
                "Use the torchax VAE"
            )
    ratio = int(known.temporal_compression_ratio)
    known.temporal_levels = ratio.bit_length() - 1
    if 2**known.temporal_levels != ratio:
        raise NotImplementedError(
            f"the Flax VAE halves frames: temporal_compression_ratio of {ratio} is no "
            "power of two; use the torchax VAE"
        )
    for name in ("use_quant_conv", "use_post_quant_conv"):
        # Upstream gives these as many channels as pixels have.
        if getattr(known, name) and known.latent_channels != known.out_channels:
            raise NotImplementedError(
                f"{name} needs as many latent channels as pixels have, as upstream "
                f"builds it; there are {known.latent_channels} and "
                f"{known.out_channels}"
            )
    return known


class Level(nnx.Module):
    """The blocks of one resolution, and what changes it, under upstream's names."""

    def __init__(self, blocks: list[ResnetBlock], **samplers: nnx.Module) -> None:
        self.resnets = nnx.List(blocks)
        for name, sampler in samplers.items():
            setattr(self, name, nnx.List([sampler]))


class Half(nnx.Module):
    """The encoder or the decoder: levels of blocks between two convolutions.

    Sources: ``CogVideoXEncoder3D``, ``CogVideoXDecoder3D``.

    Args:
        way: ``"down"`` to moments or ``"up"`` to pixels.
        config: of :func:`vae_config`.
        channels: of the input and of the output.
        latents: channels of the latents that norms depend on; ``None`` for plain ones.
    """

    def __init__(
        self, way: str, config: Any, channels: tuple[int, int], latents: int | None
    ) -> None:
        self.way, up = way, way == "up"
        groups = config.norm_num_groups
        widths = config.block_out_channels[:: -1 if up else 1]

        def blocks(*sizes: int) -> list[ResnetBlock]:
            options = {"groups": groups, "epsilon": config.norm_eps}
            return [
                ResnetBlock(*pair, **options, latents=latents)
                for pair in itertools.pairwise(sizes)
            ]

        self.conv_in = CausalConv(channels[0], widths[0])
        levels: list[Level] = []
        for index, width in enumerate(widths):
            samplers = {}
            if index < len(widths) - 1:
                sampler: Any = Upsample if up else Downsample
                in_time = index < config.temporal_levels
                samplers = {f"{way}samplers": sampler(width, in_time=in_time)}
            before = widths[max(index - 1, 0)]
            depth = config.layers_per_block + up
            levels.append(Level(blocks(before, *[width] * depth), **samplers))
        setattr(self, f"{way}_blocks", nnx.List(levels))
        self.mid_block = Level(blocks(*[widths[0 if up else -1]] * (_MIDDLE + 1)))
        self.norm_out = (
            GroupNorm(widths[-1], groups, 1e-6)
            if latents is None
            else SpatialNorm(widths[-1], latents, groups)
        )
        self.conv_out = CausalConv(widths[-1], channels[1])

    def __call__(
        self, x: jax.Array, z: jax.Array | None, cache: Cache | None, grid: Grid
    ) -> tuple[jax.Array, Cache]:
        """A chunk [B, T, Y, X, C] through all levels, and the next chunk's cache.

        ``z`` are the latents, for norms that depend on them.
        """
        old: Mapping[str, Any] = cache or {}
        kept: Cache = {}
        h, kept["conv_in"] = self.conv_in(x, old.get("conv_in"), grid)
        kept["blocks"] = []
        levels = list(getattr(self, f"{self.way}_blocks"))
        middle = list(self.mid_block.resnets)
        for index, level in enumerate(levels):
            # Those of the middle have the resolution next to them: one run of blocks.
            blocks = middle if self.way == "up" and not index else []
            blocks = [*blocks, *level.resnets]
            if self.way == "down" and level is levels[-1]:
                blocks += middle
            frames = old["blocks"][index] if old else None
            h, moments, frames = run_blocks(blocks, h, z, frames, grid)
            kept["blocks"].append(frames)
            for sampler in getattr(level, f"{self.way}samplers", ()):
                h = sampler(h, grid)
        norm: Any = self.norm_out
        h, last = norm(h, moments, grid, *(() if z is None else (z,)))
        h, kept["conv_out"] = self.conv_out(h, old.get("conv_out"), grid, last)
        return h, kept


class FlaxVae(nnx.Module):
    """Encoder and decoder of one checkpoint."""

    def __init__(self, config: Any) -> None:
        latents = config.latent_channels
        self.encoder = Half("down", config, (config.in_channels, 2 * latents), None)
        self.decoder = Half("up", config, (latents, config.out_channels), latents)
        if config.use_quant_conv:
            self.quant_conv = Pointwise(*[2 * config.out_channels] * 2)
        if config.use_post_quant_conv:
            self.post_quant_conv = Pointwise(*[config.out_channels] * 2)

    def encode(
        self, x: jax.Array, cache: Cache | None, grid: Grid
    ) -> tuple[jax.Array, Cache]:
        """A chunk of pixels to moments.

        Args:
            x: [B, F, 8Y, 8X, 3] in [-1, 1]; of a device's part where split.
            cache: what the call before gave; ``None`` for the first chunk.

        Returns:
            [B, T, Y, X, 2C], mean and logarithm of the variance, in the dtype of
            ``x``, and the cache.
        """
        h, kept = self.encoder(x, None, cache, grid)
        if hasattr(self, "quant_conv"):
            h = self.quant_conv(h, grid).astype(h.dtype)
        return h, kept

    def decode(
        self, z: jax.Array, cache: Cache | None, grid: Grid
    ) -> tuple[jax.Array, Cache]:
        """A chunk of latents to pixels.

        Args:
            z: [B, T, Y, X, C]; of a device's part where split.
            cache: what the call before gave; ``None`` for the first chunk.

        Returns:
            [B, F, 8Y, 8X, 3] around [-1, 1], in the dtype of ``z``, and the cache.
        """
        if hasattr(self, "post_quant_conv"):
            z = self.post_quant_conv(z, grid).astype(z.dtype)
        return self.decoder(z, z, cache, grid)
