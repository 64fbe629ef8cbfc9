"""Rotary tables of CogVideoX, built by upstream's own function.

Legend: T, Y, X token frames, rows and columns; L = T * Y * X; D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuport.core.layers.rotary_tables import RotaryCache, RotaryKey


def rotary_key(
    config: Mapping[str, Any], *, height: int, width: int, latent_frames: int
) -> RotaryKey:
    """The key of the tables for latents of ``height`` x ``width`` (in latent rows).

    CogVideoX 1.0 stretches the grid over a centred crop of the trained grid; 1.5 takes
    the leading part of the trained grid. Source: diffusers
    ``CogVideoXPipeline._prepare_rotary_positional_embeddings``.
    """
    patch, patch_t = int(config["patch_size"]), config.get("patch_size_t")
    base_y = int(config["sample_height"]) // patch
    base_x = int(config["sample_width"]) // patch
    rows, columns = height // patch, width // patch
    head_dim = int(config["attention_head_dim"])
    positions: tuple[Any, ...]
    if patch_t is None:
        from diffusers.pipelines.cogvideo.pipeline_cogvideox import (
            get_resize_crop_region_for_grid,
        )

        crop = get_resize_crop_region_for_grid((rows, columns), base_x, base_y)
        positions = ("linspace", crop)
        frames = latent_frames
    else:
        positions = ("slice", (base_y, base_x))
        frames = (latent_frames + patch_t - 1) // patch_t
    return RotaryKey(
        grid=(frames, rows, columns),
        axes_dim=(head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3),
        theta=10000.0,
        positions=positions,
        interleaved=True,
    )


def build(key: RotaryKey) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of shape [L, D], float32, from upstream's function."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    assert isinstance(key.positions, tuple)
    grid_type, where = key.positions
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=key.head_dim,
        crops_coords=where if grid_type == "linspace" else None,
        grid_size=key.grid[1:],
        temporal_size=key.grid[0],
        theta=int(key.theta),
        grid_type=grid_type,
        max_size=where if grid_type == "slice" else None,
    )
    return cos.float().numpy(), sin.float().numpy()


def tables(
    cache: RotaryCache,
    config: Mapping[str, Any],
    *,
    height: int,
    width: int,
    latent_frames: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The cached (cos, sin) tables for these latents."""
    key = rotary_key(config, height=height, width=width, latent_frames=latent_frames)
    return cache.get(key, build)
