"""The programs of the VAE in Flax: what :mod:`stages` and :mod:`conditioning` run.

Inputs and outputs are upstream's, planes and channels before frames, so nothing between
the stages changes. The carry is the Flax cache.

Legend: B videos of a batch, T/Y/X latent frames, rows, columns, C latent channels, F
frames, H/W rows and columns of pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from tpuport.core.spec.component import Implementation
from tpuport.core.spec.stage import Program
from tpuport.core.weights.jax_module import BoundJaxModule
from tpuport.models.cogvideox import conditioning, stages
from tpuport.models.cogvideox.flax_grid import Grid, grid_of
from tpuport.models.cogvideox.flax_weights import FlaxWeights

#: Of what goes from chunk to chunk.
_CACHE = "BTYXC"


def _grid(model: BoundJaxModule) -> Grid:
    return grid_of(model.ported.runtime.op_context())


def encode_chunk(
    model: BoundJaxModule, carry: Any, constants: None, inputs: Mapping[str, Any]
) -> tuple[Any, jax.Array]:
    """Frames [B, 3, F, H, W] of a chunk -> moments [B, 2C, T, Y, X].

    As :func:`tpuport.models.cogvideox.conditioning.encode_chunk`.
    """
    x = inputs["pixels"].astype(model.dtype).transpose(0, 2, 3, 4, 1)
    moments, cache = model.module().encode(x, carry, _grid(model))
    return cache, moments.transpose(0, 4, 1, 2, 3)


def decode(
    model: BoundJaxModule, carry: Any, constants: None, inputs: Mapping[str, Any]
) -> tuple[Any, jax.Array]:
    """Latents [B, C, T, Y, X] of a chunk -> video [B, 3, F, H, W] of about [-1, 1]."""
    z = inputs["latents"].astype(model.dtype).transpose(0, 2, 3, 4, 1)
    video, cache = model.module().decode(z, carry, _grid(model))
    return cache, video.transpose(0, 4, 1, 2, 3)


_ENCODE = Program(
    component="vae",
    fn=encode_chunk,
    space=replace(conditioning.ENCODE_SPACE, carry=_CACHE),
)

FLAX = Implementation(
    weights=FlaxWeights,
    programs={
        "encode": {"first": _ENCODE, "next": _ENCODE},
        "decode": stages.decode_programs(decode, _CACHE),
    },
    packages=("flax",),
)
"""The VAE in Flax, for ``--vae flax``."""
