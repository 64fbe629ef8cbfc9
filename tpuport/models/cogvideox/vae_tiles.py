"""Decoding in tiles, as upstream's ``AutoencoderKLCogVideoX.tiled_decode`` cuts them.

Upstream decodes a tile chunk by chunk with a convolution cache of its own, joins its
chunks, and then blends tile with tile. So do the calls here: tile by tile, the chunks
of each in a row. All chunks of a video in a row would give frames sooner, but the
device would hold the caches of every tile, which together are as large as those of the
whole picture: what tiles are there to avoid. A chunk of the last tile completes its
frames; until then the host holds the bytes of the video, and of its floats the seams.

Legend: B videos, T/Y/X latent frames, rows, columns, F/H/W frames, rows and columns of
pixels. Source: diffusers ``autoencoder_kl_cogvideox.py``, ``tiled_decode``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tpuport.core.layers.tiled_frames import JoinedFrames
from tpuport.core.layers.tiles import Axis, TilePlan, tiled_axis, whole_axis
from tpuport.core.spec.stage_work import Call, Work

#: Latent frames that upstream decodes at a time.
FRAMES_PER_CHUNK = 2


def chunk_lengths(latent_frames: int) -> list[int]:
    """Latent frames per chunk: twos, and an odd one in the first chunk, as upstream."""
    if latent_frames < FRAMES_PER_CHUNK:
        return [latent_frames]
    chunks = latent_frames // FRAMES_PER_CHUNK
    first = FRAMES_PER_CHUNK + latent_frames % FRAMES_PER_CHUNK
    return [first] + [FRAMES_PER_CHUNK] * (chunks - 1)


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

    def made(n: int) -> int:
        return n * pixels

    if rows <= vae.tile_latent_min_height and columns <= vae.tile_latent_min_width:
        return whole_axis(rows, made), whole_axis(columns, made)

    def axis(side: int, window: int, sample: int, overlap: float) -> Axis:
        blend = int(sample * overlap)
        return tiled_axis(
            side,
            made,
            window=window,
            stride=int(window * (1 - overlap)),
            blend=blend,
            keep=sample - blend,
        )

    return (
        axis(
            rows,
            vae.tile_latent_min_height,
            vae.tile_sample_min_height,
            vae.tile_overlap_factor_height,
        ),
        axis(
            columns,
            vae.tile_latent_min_width,
            vae.tile_sample_min_width,
            vae.tile_overlap_factor_width,
        ),
    )


def tiled_work(
    z: torch.Tensor,
    axes: tuple[Axis, Axis],
    chunks: Sequence[int],
    made: Callable[[int, bool], int],
    pixels: str,
) -> Work:
    """The calls of a decode in tiles, and the frames that come of them.

    The programs are ``first tile`` and ``next tile``: latents of a tile's chunk in,
    ``video`` [B, 3, F, H, W] out, about [-1, 1].

    Args:
        z: latents [B, C, T, Y, X].
        axes: of :func:`decode_axes`.
        chunks: latent frames of each chunk.
        made: ``made(n, first)`` frames come of a chunk of n latent frames.
        pixels: of the frames, ``"float32"`` or ``"uint8"``.
    """
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    plans = [
        TilePlan(axes=(_chunk_axis(n, made(n, index == 0)), *axes))
        for index, n in enumerate(chunks)
    ]
    joined = [JoinedFrames(plan, pixels) for plan in plans]
    tiles = plans[0].tiles

    def calls() -> Iterator[Call]:
        for tile in tiles:
            _, rows, columns = tile.slices
            for index, (start, n) in enumerate(zip(starts, chunks, strict=True)):
                chunk = z[:, :, start : start + n, rows, columns].contiguous()
                place = "next" if index else "first"
                yield Call(f"{place} tile", {"latents": chunk}, fresh=index == 0)

    def frames(index: int, output: dict[str, np.ndarray]) -> Any:
        tile, chunk = divmod(index, len(chunks))
        rows, columns = (
            axis.spans[place].made
            for axis, place in zip(axes, tiles[tile].index[1:], strict=True)
        )
        # Split in space, a tile comes with phantom rows and columns.
        return joined[chunk].add(output["video"][..., :rows, :columns])

    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=len(tiles) * len(chunks),
        frames=frames,
    )


def _chunk_axis(latents: int, frames: int) -> Axis:
    return whole_axis(latents, lambda n: frames)
