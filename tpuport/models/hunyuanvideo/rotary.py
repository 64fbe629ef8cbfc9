"""Rotary tables of HunyuanVideo, built by upstream's own module, once per grid.

Legend: T, Y, X token frames, rows and columns; L = T * Y * X; D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tpuport.core.layers.rotary_tables import RotaryCache, RotaryKey

#: The default of both upstream classes.
AXES = (16, 56, 56)


def rotary_key(config: Mapping[str, Any], latents: tuple[int, ...]) -> RotaryKey:
    """The key of the tables for latents of (frames, rows, columns)."""
    patch, patch_t = (
        int(config.get("patch_size", 1)),
        int(config.get("patch_size_t", 1)),
    )
    frames, rows, columns = latents
    return RotaryKey(
        grid=(frames // patch_t, rows // patch, columns // patch),
        axes_dim=tuple(config.get("rope_axes_dim", AXES)),
        theta=float(config.get("rope_theta", 256.0)),
        positions="grid",
        interleaved=True,
    )


def build(key: RotaryKey) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of shape [L, D], float32, from upstream's module."""
    from diffusers.models.transformers.transformer_hunyuan_video15 import (
        HunyuanVideo15RotaryPosEmbed,
    )

    module = HunyuanVideo15RotaryPosEmbed(1, 1, list(key.axes_dim), key.theta)
    # Only the shape is read: the positions are the indices of the grid.
    cos, sin = module(torch.empty(1, 1, *key.grid))
    return cos.float().numpy(), sin.float().numpy()


def tables(
    cache: RotaryCache, config: Mapping[str, Any], latents: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The cached (cos, sin) tables for latents of (frames, rows, columns)."""
    return cache.get(rotary_key(config, latents), build)
