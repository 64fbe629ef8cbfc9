"""Overlapping tiles in time, blended on the device: frames leave tile by tile.

Upstream decodes a long video of 13b in tiles that overlap in time, and blends each tile
with the blended tile before. Here the blended end of a tile, the seam, stays on the
device as the carry of the program. The next call blends there, and gives the finished
frames.

The first tile and all others of its length run one program. The first tile has one more
frame that counts, and nothing before it. It runs with weights that leave it as it is,
on a seam of zeros that a small program makes. A shorter last tile has a program of its
own: with the seam's that makes three programs for 129 frames. The frame that the other
tiles drop is fetched with them, and let go on the host.

Legend: B videos, C latent channels, T/Y/X latent frames, rows, columns, F/H/W frames,
rows and columns of pixels, E frames of the seam. Source: diffusers
``autoencoder_kl_hunyuan_video.py``, ``_temporal_tiled_decode`` and ``blend_t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.core.files.frames import as_frames, encode_pixels
from tpuport.core.layers.tiles import TilePlan, fading
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.run.model_stages import FRAMES
from tpuport.core.spec.stage_work import Call, Work
from tpuport.core.tracing.ported_module import BoundModule

#: Of a tile that is not the first: frames at its front that are thrown away.
DROPPED = 1

SEAM = SpatialLayout(inputs={"latents": "BCTYX", "seam": "E"}, carry="BCEYX", output={})
"""Of the program that makes a seam of zeros; see
:mod:`tpuport.core.mesh.spatial_split`."""
TILE = SpatialLayout(
    inputs={"latents": "BCTYX", "rising": "E", "falling": "E", "counts": "F"},
    carry="BCEYX",
    output=FRAMES,
)
"""Of the program that decodes a tile."""


def is_in_time(plan: TilePlan) -> bool:
    """Whether a video is in several tiles, each of which has the whole picture."""
    time, rows, columns = plan.axes
    pictures = len(rows.spans) * len(columns.spans)
    return len(time.spans) > 1 and pictures == 1 and time.blend > 0


# ---------------------------------------------------------------------- programs


def first_seam(
    model: BoundModule, carry: None, constants: None, given: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Zeros [B, 3, E, H, W] in the weights' dtype, in front of the first tile.

    Args:
        given: ``latents`` [B, C, T, Y, X] of any T, and ``seam``, of length E.
    """
    module: Any = model.ported.module
    ratio = module.spatial_compression_ratio
    videos, _, _, rows, columns = given["latents"].shape
    shape = (videos, 3, given["seam"].shape[0], rows * ratio, columns * ratio)
    return jnp.zeros(shape, model.weights["post_quant_conv.weight"].dtype), {}


def tile_frames(
    decode_tile: Callable[[BoundModule, jax.Array], jax.Array],
    pixels: str,
    model: BoundModule,
    seam: jax.Array,
    constants: None,
    given: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One tile: decoded, blended with the tile before, and made frames.

    Args:
        decode_tile: of :mod:`tpuport.models.hunyuanvideo.vae`.
        pixels: of the frames, ``"float32"`` or ``"uint8"``.
        seam: [B, 3, E, H, W], the end of the tile before.
        given: ``latents`` [B, C, T, Y, X]; ``rising`` and ``falling``, float32, the
            shares of the tile and of the seam in each frame where both meet, from frame
            :data:`DROPPED` of the tile on; ``counts``, booleans [F], which of the
            tile's first F frames are finished frames of the video.

    Returns:
        the end of this tile, and what :func:`tpuport.core.files.frames.encode_pixels`
        gives of its first F frames.
    """
    video = decode_tile(model, given["latents"])
    video = blended(seam, video, given["rising"], given["falling"])
    # If a tile has fewer frames than the seam, later calls look at these alone: tiles
    # become no longer towards the end.
    length = seam.shape[2]
    seam = jnp.concatenate([seam, video], axis=2)[:, :, -length:]
    finished = video[:, :, : given["counts"].shape[0]].astype(jnp.float32)
    made = encode_pixels(finished * 0.5 + 0.5, pixels, model.space, given["counts"])
    return seam, made


def blended(
    seam: jax.Array, video: jax.Array, rising: jax.Array, falling: jax.Array
) -> jax.Array:
    """``video`` after fading from the end of ``seam`` into its frames.

    Upstream blends in the dtype of the tiles: products and sum are each rounded to it,
    the shares are not. XLA would leave such roundings out.

    Args:
        seam, video: [B, 3, E, H, W] and [B, 3, F, H, W] of one dtype.
        rising, falling: float32, shares of ``video`` and ``seam``, of each frame that
            is blended.
    """
    kind = jnp.finfo(video.dtype)

    def rounded(x: jax.Array) -> jax.Array:
        if kind.dtype == jnp.float32:
            return x
        return jax.lax.reduce_precision(x, int(kind.nexp), int(kind.nmant))

    def shared(x: jax.Array, share: jax.Array) -> jax.Array:
        return rounded(x.astype(jnp.float32) * share[:, None, None])

    extent = rising.shape[0]
    stop = DROPPED + extent
    met = rounded(
        shared(seam[:, :, seam.shape[2] - extent :], falling)
        + shared(video[:, :, DROPPED:stop], rising)
    )
    parts = [video[:, :, :DROPPED], met.astype(video.dtype), video[:, :, stop:]]
    return jnp.concatenate(parts, axis=2)


# -------------------------------------------------------------------------- work


def in_time_work(z: torch.Tensor, plan: TilePlan, pixels: str) -> Work:
    """The calls of a decode in such tiles, and the frames that come of them.

    The programs are ``seam``, once, and ``tile uint8`` or ``tile float32``.

    Args:
        z: latents [B, C, T, Y, X].
        plan: for which :func:`is_in_time` holds.
        pixels: of the frames, ``"float32"`` or ``"uint8"``.
    """
    time, rows, columns = plan.axes

    def calls() -> Iterator[Call]:
        seam = np.zeros(time.blend, np.int32)
        yield Call("seam", {"latents": z[:, :, :1].contiguous(), "seam": seam})
        for tile, span in zip(plan.tiles, time.spans, strict=True):
            assert span.drop in (0, DROPPED)
            extent = min(time.blend, span.made - DROPPED)
            rising, falling = fading(extent)
            if not span.drop:
                rising, falling = np.ones_like(rising), np.zeros_like(falling)
            given = {
                "latents": tile.cut(z).contiguous(),
                "rising": rising,
                "falling": falling,
                "counts": np.arange(span.drop + span.keep) >= span.drop,
            }
            yield Call(f"tile {pixels}", given)

    def to_frames(
        index: int, output: Mapping[str, Any]
    ) -> dict[str, np.ndarray] | None:
        if not index:
            return None
        drop = time.spans[index - 1].drop
        planes = output["frames"][:, :, drop:]
        return {
            **output,
            "frames": as_frames(planes, rows.size, columns.size),
            "finite": output["finite"][:, drop:],
        }

    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=1 + len(plan.tiles),
        to_frames=to_frames,
    )
