"""The programs of the VAE in Flax: what :mod:`stages` and :mod:`conditioning` run.

They take and give what upstream's class takes and gives, planes and channels before
frames, so that everything between the stages is the same. The carry is the Flax cache.

Legend: B videos of a batch, T/Y/X latent frames, rows, columns, C latent channels, F
frames, H/W rows and columns of pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.files.frames import PIXELS, encode_pixels
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.spec.component import Implementation
from tpuport.core.spec.stage import Program
from tpuport.core.weights.jax_module import BoundJaxModule
from tpuport.models.cogvideox.flax_grid import Grid, grid_of
from tpuport.models.cogvideox.flax_weights import FlaxWeights

#: Rows and columns of pixels to one of latents, in every published checkpoint.
GRANULE = 8

#: Of what goes from chunk to chunk.
_CACHE = "BTYXC"


def _weights(config: Mapping[str, Any]) -> FlaxWeights:

    return FlaxWeights(config)


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


def _video(
    model: BoundJaxModule, carry: Any, inputs: Mapping[str, Any]
) -> tuple[Any, jax.Array]:
    """Latents [B, C, T, Y, X] of a chunk -> the cache, and [B, 3, F, H, W]."""
    z = inputs["latents"].astype(model.dtype).transpose(0, 2, 3, 4, 1)
    video, cache = model.module().decode(z, carry, _grid(model))
    return cache, video.transpose(0, 4, 1, 2, 3)


def decode_chunk(
    model: BoundJaxModule,
    carry: Any,
    constants: None,
    inputs: Mapping[str, Any],
    *,
    pixels: str,
) -> tuple[Any, dict[str, jax.Array]]:
    """Latents [B, C, T, Y, X] of a chunk -> frames, as ``encode_pixels`` gives them."""
    cache, video = _video(model, carry, inputs)
    frames = video.astype(jnp.float32) * 0.5 + 0.5
    return cache, encode_pixels(frames, pixels, model.space)


def decode_tile(
    model: BoundJaxModule, carry: Any, constants: None, inputs: Mapping[str, Any]
) -> tuple[Any, dict[str, jax.Array]]:
    """Latents [B, C, T, Y, X] of a tile's chunk -> ``video`` [B, 3, F, H, W].

    About [-1, 1], unclipped, in the weights' dtype: tiles are blended as floats.
    """
    cache, video = _video(model, carry, inputs)
    return cache, {"video": video}


def _encode_programs() -> dict[str, Program]:
    space = SpatialLayout(
        inputs={"pixels": "BCFYX"}, carry=_CACHE, output="BCTYX", granule=GRANULE
    )
    return {
        place: Program(component="vae", fn=encode_chunk, space=space)
        for place in ("first", "next")
    }


def _decode_programs() -> dict[str, Program]:
    frames = {"frames": "BCFYX", "finite": "BF", "low": "BC", "high": "BC"}
    forms: dict[str, tuple[Any, Mapping[str, str]]] = {
        pixels: (functools.partial(decode_chunk, pixels=pixels), frames)
        for pixels in PIXELS
    }
    forms["tile"] = (decode_tile, {"video": "BCFYX"})
    return {
        f"{place} {form}": Program(
            component="vae",
            fn=fn,
            space=SpatialLayout(
                inputs={"latents": "BCTYX"}, carry=_CACHE, output=output
            ),
        )
        for place in ("first", "next")
        for form, (fn, output) in forms.items()
    }


FLAX = Implementation(
    weights=_weights,
    programs={"encode": _encode_programs(), "decode": _decode_programs()},
    packages=("flax",),
)
"""The VAE in Flax, for ``--vae flax``."""
