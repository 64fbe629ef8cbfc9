"""Small HunyuanVideo autoencoders with random weights."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

#: The fewest blocks that have every part.
CONFIGS: dict[str, dict[str, Any]] = {
    "15 small": {
        "block_out_channels": (8, 8, 8),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
    },
    "15 wider": {
        "block_out_channels": (16, 32, 32, 64),
        "layers_per_block": 2,
        "spatial_compression_ratio": 8,
        "upsample_match_channel": False,
    },
    "13b small": {
        # A shortcut where channels change.
        "block_out_channels": (8, 8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "spatial_compression_ratio": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 3,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
    },
    "13b without attention": {
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "spatial_compression_ratio": 4,
        "mid_block_add_attention": False,
    },
}


def make_vae(name: str) -> Any:
    """A small autoencoder."""
    is_15 = name.startswith("15")
    cls = "AutoencoderKLHunyuanVideo15" if is_15 else "AutoencoderKLHunyuanVideo"
    torch.manual_seed(0)
    vae = getattr(diffusers, cls)(latent_channels=4, **CONFIGS[name]).eval()
    vae.requires_grad_(False)
    if not is_15:
        # A trained decoder ends in [-1, 1]; this one ends in [-3, 3], where the
        # rounding of upstream's own float32 run is over half the tolerance.
        vae.decoder.conv_out.conv.weight.mul_(0.3)
        vae.decoder.conv_out.conv.bias.mul_(0.3)
    return vae


def latents(vae: Any, batch: int, frames: int, rows: int, columns: int) -> torch.Tensor:
    shape = batch, vae.config.latent_channels, frames, rows, columns
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
