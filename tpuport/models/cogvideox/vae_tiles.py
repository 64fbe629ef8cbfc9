"""Decoding in tiles, as upstream's ``AutoencoderKLCogVideoX.tiled_decode`` cuts them.

Upstream decodes a tile chunk by chunk with a convolution cache of its own, joins its
chunks, and then blends tile with tile. The calls here do so too: tile by tile, the
chunks of each in a row. Going chunk by chunk would give frames sooner, but the device
would hold the caches of every tile. Those are as large as the caches of the whole
picture, which tiles are there to avoid. A chunk of the last tile completes its frames.
Until then the host holds the video as bytes and its seams as floats.

Legend: B videos, T/Y/X latent frames, rows, columns, F/H/W frames, rows and columns of
pixels. Source: diffusers ``autoencoder_kl_cogvideox.py``, ``tiled_decode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tpuport.core.layers.tiles import Axis, TilePlan, overlapping_axis, whole_axis

#: Latent frames that upstream decodes at a time.
FRAMES_PER_CHUNK = 2


def frames_of_chunk(ratio: int, latent_frames: int, first: bool) -> int:
    """Frames of a chunk; the odd latent frame of the first one stands for itself."""
    alone = latent_frames % FRAMES_PER_CHUNK if first else 0
    return (latent_frames - alone) * ratio + alone


def decode_axes(vae: Any, rows: int, columns: int) -> tuple[Axis, Axis]:
    """The tiles of rows and of columns of latents; one of each where it does not tile.

    Args:
        vae: the upstream module; of its tile settings ``use_tiling`` is not read.
        rows, columns: of the latents.

    Raises:
        ValueError: tile settings of which nothing is kept.
    """
    pixels = 2 ** (len(vae.config.block_out_channels) - 1)
    tiled = rows > vae.tile_latent_min_height or columns > vae.tile_latent_min_width

    def axis(size: int, side: str) -> Axis:
        if not tiled:
            return whole_axis(size, lambda n: n * pixels)
        return overlapping_axis(
            size,
            lambda n: n * pixels,
            window=getattr(vae, f"tile_latent_min_{side}"),
            sample=getattr(vae, f"tile_sample_min_{side}"),
            overlap=getattr(vae, f"tile_overlap_factor_{side}"),
        )

    return axis(rows, "height"), axis(columns, "width")


def chunk_plans(
    axes: tuple[Axis, Axis], chunks: Sequence[int], made: Callable[..., int]
) -> list[TilePlan]:
    """The tiles of each chunk.

    Args:
        axes: of :func:`decode_axes`.
        chunks: latent frames of each chunk.
        made: ``made(n, first=...)`` frames come of a chunk of n latent frames.
    """
    return [
        TilePlan(axes=(whole_axis(n, partial(made, first=index == 0)), *axes))
        for index, n in enumerate(chunks)
    ]
