"""Rotary tables of HunyuanVideo, by upstream's own module, once per grid."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

#: The default of both upstream classes.
AXES = (16, 56, 56)


def tables(
    config: Mapping[str, Any], latents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) for latents of (frames, rows, columns), float32 [L, D].

    L are the tokens of the transformer's grid, D is the head dim.
    """
    patch = int(config.get("patch_size", 1))
    sides = (int(config.get("patch_size_t", 1)), patch, patch)
    grid = tuple(n // side for n, side in zip(latents, sides, strict=True))
    axes = tuple(config.get("rope_axes_dim", AXES))
    return _tables(grid, axes, float(config.get("rope_theta", 256.0)))


@functools.lru_cache(maxsize=16)
def _tables(
    grid: tuple[int, ...], axes: tuple[int, ...], theta: float
) -> tuple[np.ndarray, np.ndarray]:
    from diffusers.models.transformers.transformer_hunyuan_video15 import (
        HunyuanVideo15RotaryPosEmbed,
    )

    module = HunyuanVideo15RotaryPosEmbed(1, 1, list(axes), theta)
    # Only the shape is read: the positions are the indices of the grid.
    cos, sin = module(torch.empty(1, 1, *grid))
    return cos.float().numpy(), sin.float().numpy()
