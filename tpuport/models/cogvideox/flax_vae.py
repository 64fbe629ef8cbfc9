"""CogVideoX's VAE in Flax (NNX), channels last: encoder and decoder.

They run a chunk of frames at a time and hand on what the causal convolutions need of
it, as upstream's do. Sizes are anything that the strides divide.

Legend: B videos, T/Y/X latent frames, rows, columns, F frames, C latent channels.
Source: diffusers 0.42 ``AutoencoderKLCogVideoX``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeConfig:
    """What decides the shapes and the numbers.

    Attributes: as upstream's config has them.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 16
    block_out_channels: tuple[int, ...] = (128, 256, 256, 512)
    layers_per_block: int = 3
    norm_num_groups: int = 32
    norm_eps: float = 1e-6
    temporal_compression_ratio: int = 4
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False

    def __post_init__(self) -> None:
        levels = self.temporal_compression_ratio.bit_length() - 1
        if 2**levels != self.temporal_compression_ratio:
            raise NotImplementedError(
                "the Flax VAE halves frames: temporal_compression_ratio of "
                f"{self.temporal_compression_ratio} is no power of two; use the "
                "torchax VAE"
            )
        for name, used in (
            ("use_quant_conv", self.use_quant_conv),
            ("use_post_quant_conv", self.use_post_quant_conv),
        ):
            # Upstream gives these as many channels as pixels have.
            if used and self.latent_channels != self.out_channels:
                raise NotImplementedError(
                    f"{name} needs as many latent channels as pixels have, as upstream "
                    f"builds it; there are {self.latent_channels} and "
                    f"{self.out_channels}"
                )

    @property
    def temporal_levels(self) -> int:
        """Levels of the pyramid at which frames are halved."""
        return self.temporal_compression_ratio.bit_length() - 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> VaeConfig:
        """From upstream's config; what it leaves out has upstream's defaults.

        Raises:
            NotImplementedError: an option that the Flax VAE does not have.
        """
        blocks = tuple(config.get("block_out_channels", cls().block_out_channels))
        known: dict[str, Any] = {
            "act_fn": ("silu", "swish"),
            "down_block_types": (["CogVideoXDownBlock3D"] * len(blocks),),
            "up_block_types": (["CogVideoXUpBlock3D"] * len(blocks),),
        }
        for name, values in known.items():
            found = config.get(name, values[0])
            found = found if isinstance(found, str) else list(found)
            if found not in values:
                raise NotImplementedError(
                    f"the Flax VAE has no {name}={found!r}; it knows {values[0]!r}. "
                    "Use the torchax VAE"
                )
        fields = {
            name: config[name] for name in cls.__dataclass_fields__ if name in config
        }
        fields["block_out_channels"] = blocks
        if "temporal_compression_ratio" in fields:
            ratio = fields["temporal_compression_ratio"]
            fields["temporal_compression_ratio"] = int(ratio)
        return cls(**fields)


class Level(nnx.Module):
    """The blocks of one resolution, and what changes it, under upstream's names."""

    def __init__(
        self,
        blocks: list[ResnetBlock],
        down: Downsample | None = None,
        up: Upsample | None = None,
    ) -> None:
        self.resnets = nnx.List(blocks)
        if down is not None:
            self.downsamplers = nnx.List([down])
        if up is not None:
            self.upsamplers = nnx.List([up])


class Encoder(nnx.Module):
    """Pixels to moments. Source: ``CogVideoXEncoder3D``."""

    def __init__(self, config: VaeConfig) -> None:
        widths = config.block_out_channels
        options: dict[str, Any] = {
            "groups": config.norm_num_groups,
            "epsilon": config.norm_eps,
            "latents": None,
        }
        self.conv_in = CausalConv(config.in_channels, widths[0])
        blocks: list[Level] = []
        width = widths[0]
        for level, outputs in enumerate(widths):
            resnets = []
            for _ in range(config.layers_per_block):
                resnets.append(ResnetBlock(width, outputs, **options))
                width = outputs
            down = None
            if level < len(widths) - 1:
                down = Downsample(width, in_time=level < config.temporal_levels)
            blocks.append(Level(resnets, down=down))
        self.down_blocks = nnx.List(blocks)
        self.mid_block = Level(
            [ResnetBlock(width, width, **options) for _ in range(_MIDDLE)]
        )
        self.norm_out = GroupNorm(width, config.norm_num_groups, 1e-6)
        self.conv_out = CausalConv(width, 2 * config.latent_channels)

    def __call__(
        self, x: jax.Array, cache: Cache | None, grid: Grid
    ) -> tuple[jax.Array, Cache]:
        """[B, F, 8Y, 8X, 3] -> moments [B, T, Y, X, 2C], and the next chunk's cache."""
        old: Mapping[str, Any] = cache or {}
        kept: Cache = {}
        h, kept["conv_in"] = self.conv_in(x, old.get("conv_in"), grid)
        kept["blocks"] = []
        levels = list(self.down_blocks)
        for index, level in enumerate(levels):
            blocks = list(level.resnets)
            if level is levels[-1]:
                # The same resolution: one run of blocks.
                blocks += self.mid_block.resnets
            frames = old["blocks"][index] if old else None
            h, moments, frames = run_blocks(blocks, h, None, frames, grid)
            kept["blocks"].append(frames)
            if hasattr(level, "downsamplers"):
                h = level.downsamplers[0](h, grid)
        h, last = self.norm_out(h, moments, grid)
        h, kept["conv_out"] = self.conv_out(h, old.get("conv_out"), grid, last)
        return h, kept


class Decoder(nnx.Module):
    """Latents to pixels. Source: ``CogVideoXDecoder3D``."""

    def __init__(self, config: VaeConfig) -> None:
        widths = config.block_out_channels[::-1]
        options: dict[str, Any] = {
            "groups": config.norm_num_groups,
            "epsilon": config.norm_eps,
            "latents": config.latent_channels,
        }
        self.conv_in = CausalConv(config.latent_channels, widths[0])
        self.mid_block = Level(
            [ResnetBlock(widths[0], widths[0], **options) for _ in range(_MIDDLE)]
        )
        blocks: list[Level] = []
        width = widths[0]
        for level, outputs in enumerate(widths):
            resnets = []
            for _ in range(config.layers_per_block + 1):
                resnets.append(ResnetBlock(width, outputs, **options))
                width = outputs
            up = None
            if level < len(widths) - 1:
                up = Upsample(width, in_time=level < config.temporal_levels)
            blocks.append(Level(resnets, up=up))
        self.up_blocks = nnx.List(blocks)
        self.norm_out = SpatialNorm(
            width, config.latent_channels, config.norm_num_groups
        )
        self.conv_out = CausalConv(width, config.out_channels)

    def __call__(
        self, z: jax.Array, cache: Cache | None, grid: Grid
    ) -> tuple[jax.Array, Cache]:
        """[B, T, Y, X, C] -> frames [B, F, 8Y, 8X, 3], and the next chunk's cache."""
        old: Mapping[str, Any] = cache or {}
        kept: Cache = {}
        h, kept["conv_in"] = self.conv_in(z, old.get("conv_in"), grid)
        kept["blocks"] = []
        levels = list(self.up_blocks)
        for index, level in enumerate(levels):
            blocks = list(level.resnets)
            if level is levels[0]:
                # The same resolution: one run of blocks.
                blocks = [*self.mid_block.resnets, *blocks]
            frames = old["blocks"][index] if old else None
            h, moments, frames = run_blocks(blocks, h, z, frames, grid)
            kept["blocks"].append(frames)
            if hasattr(level, "upsamplers"):
                h = level.upsamplers[0](h, grid)
        h, last = self.norm_out(h, moments, grid, z)
        h, kept["conv_out"] = self.conv_out(h, old.get("conv_out"), grid, last)
        return h, kept


class FlaxVae(nnx.Module):
    """Encoder and decoder of one checkpoint."""

    def __init__(self, config: VaeConfig) -> None:
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
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
        h, kept = self.encoder(x, cache, grid)
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
        return self.decoder(z, cache, grid)
