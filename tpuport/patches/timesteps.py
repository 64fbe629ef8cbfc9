"""Timestep embeddings whose frequencies are torch's, bit for bit.

XLA rounds an exponential otherwise in its last bit. Multiplied by a timestep of 1000 or
a guidance of 6000, that is 2e-5 or 2e-4 of a sine's argument.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tpuport.core.tracing.patching import Patch
from tpuport.patches.diffusers import diffusers_patch


def timestep_embedding(
    timesteps: torch.Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: int = 10000,
) -> torch.Tensor:
    """In place of ``get_timestep_embedding``, see there.

    The frequencies are torch's own, whatever a program is compiled for: a guidance of
    6000 multiplies the last bit of an exponential, which XLA rounds otherwise, to 2e-4.
    """
    half = embedding_dim // 2
    exponents = np.float32(-math.log(max_period)) * np.arange(half, dtype=np.float32)
    exponents /= np.float32(half - downscale_freq_shift)
    # On tensors that come from outside of a trace torch runs as it is.
    frequencies = torch.exp(torch.from_numpy(exponents)).tolist()
    angles = timesteps[:, None].float() * torch.tensor(
        frequencies, dtype=torch.float32, device=timesteps.device
    )
    angles = scale * angles
    parts = [torch.sin(angles), torch.cos(angles)]
    if flip_sin_to_cos:
        parts.reverse()
    out = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(out, (0, embedding_dim % 2))


TIMESTEP_EMBEDDING: tuple[Patch, ...] = (
    diffusers_patch(
        "diffusers-timestep-embedding",
        "models.embeddings:get_timestep_embedding",
        timestep_embedding,
        "the last bit of an exponential depends on the compiler: a timestep of "
        "1000 makes 2e-5 of it, and an embedded guidance of 6000 2e-4",
    ),
)
"""For any model that embeds timesteps with diffusers' function."""
