"""Rotary tables of CogVideoX, by upstream's own function, once per grid."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

#: What upstream's function reads of the transformer's config.
_READ = (
    "attention_head_dim",
    "patch_size",
    "patch_size_t",
    "sample_height",
    "sample_width",
)


def tables(
    config: Mapping[str, Any], rows: int, columns: int, frames: int
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) for latents of ``frames`` x ``rows`` x ``columns``, float32 [L, D].

    L are the tokens of the transformer's grid, D is the head dim.
    """
    return _tables(rows, columns, frames, tuple((n, config.get(n)) for n in _READ))


@functools.lru_cache(maxsize=16)
def _tables(
    rows: int, columns: int, frames: int, config: tuple[tuple[str, Any], ...]
) -> tuple[np.ndarray, np.ndarray]:
    from diffusers import CogVideoXPipeline

    transformer = SimpleNamespace(config=SimpleNamespace(**dict(config)))
    # Sizes are those of latents already: nothing is to be divided.
    pipe = SimpleNamespace(transformer=transformer, vae_scale_factor_spatial=1)
    cos, sin = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        pipe, rows, columns, frames, torch.device("cpu")
    )
    return cos.float().numpy(), sin.float().numpy()
