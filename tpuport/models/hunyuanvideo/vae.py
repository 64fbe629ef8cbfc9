"""Decoding by tiles and chunks, and encoding, for both HunyuanVideo autoencoders.

A plan follows upstream's tile settings, read from the module; a tile goes through one
of the small programs below; :mod:`tpuport.core.layers.tiles` joins the results on the
host, or :mod:`tpuport.models.hunyuanvideo.tiles_in_time` on the device. A 1.5 video
that is no more than one tile is decoded by chunks of latent frames.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W frames,
rows and columns of pixels. Videos are [B, 3, F, H, W], latents [B, C, T, Y, X].
Sources: diffusers ``autoencoder_kl_hunyuanvideo15.py`` (1.5) and
``autoencoder_kl_hunyuan_video.py`` (13b), ``tiled_*``, ``_temporal_tiled_*``,
``_encode`` and ``_decode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.layers.tiles import (
    Axis,
    TilePlan,
    overlapping_axis,
    tiled_axis,
    whole_axis,
)
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.run.model_stages import FRAMES
from tpuport.core.tracing.chunk_state import run_chunk
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.errors import UsageError


def plan_decode(vae: Any, latent_shape: Sequence[int], tiling: bool) -> TilePlan:
    """The tiles of latents as upstream's ``decode`` cuts them; one when it does not.

    Args:
        vae: the upstream module; only its tile settings are read.
        latent_shape: [B, C, T, Y, X].
        tiling: whether rows and columns may be tiled, in place of ``use_tiling``. The
            13b autoencoder tiles long latents in time in any case.

    Raises:
        UsageError: ``vae`` is of another class.
    """
    frames, rows, columns = latent_shape[2:]
    plan = _plan_15 if _is_15(vae) else _plan_13b
    return plan(vae, frames, rows, columns, tiling)


def _is_15(vae: Any) -> bool:
    """Whether this is the autoencoder of 1.5, and not that of 13b."""
    from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLHunyuanVideo15

    if isinstance(vae, AutoencoderKLHunyuanVideo15):
        return True
    if isinstance(vae, AutoencoderKLHunyuanVideo):
        return False
    raise UsageError(
        f"no tile plan for {type(vae).__name__}; there is one for "
        "AutoencoderKLHunyuanVideo15 and AutoencoderKLHunyuanVideo"
    )


def _lengths(vae: Any) -> tuple[Callable[[int], int], ...]:
    """How many frames, and rows or columns, come of n latent ones."""
    frames, pixels = vae.temporal_compression_ratio, vae.spatial_compression_ratio
    return lambda n: (n - 1) * frames + 1, lambda n: n * pixels


def _plan_15(vae: Any, frames: int, rows: int, columns: int, tiling: bool) -> TilePlan:
    in_time, in_space = _lengths(vae)
    tiled = tiling and (
        rows > vae.tile_latent_min_height or columns > vae.tile_latent_min_width
    )

    def axis(size: int, side: str) -> Axis:
        if not tiled:
            return whole_axis(size, in_space)
        return overlapping_axis(
            size,
            in_space,
            window=getattr(vae, f"tile_latent_min_{side}"),
            sample=getattr(vae, f"tile_sample_min_{side}"),
            overlap=vae.tile_overlap_factor,
        )

    time = whole_axis(frames, in_time)
    return TilePlan(axes=(time, axis(rows, "height"), axis(columns, "width")))


def _plan_13b(vae: Any, frames: int, rows: int, columns: int, tiling: bool) -> TilePlan:
    in_time, in_space = _lengths(vae)

    def steps(minimum: int, stride: int, ratio: int) -> dict[str, int]:
        window, step = minimum // ratio, stride // ratio
        blended = minimum - stride
        return {"window": window, "stride": step, "blend": blended, "keep": stride}

    ratio = vae.spatial_compression_ratio
    tall = steps(vae.tile_sample_min_height, vae.tile_sample_stride_height, ratio)
    wide = steps(vae.tile_sample_min_width, vae.tile_sample_stride_width, ratio)
    if tiling and (rows > tall["window"] or columns > wide["window"]):
        height, width = (
            tiled_axis(side, in_space, limit=side * ratio, **settings)
            for side, settings in ((rows, tall), (columns, wide))
        )
    else:
        height, width = whole_axis(rows, in_space), whole_axis(columns, in_space)
    long = steps(
        vae.tile_sample_min_num_frames,
        vae.tile_sample_stride_num_frames,
        vae.temporal_compression_ratio,
    )
    if vae.use_framewise_decoding and frames > long["window"]:
        # A tile in time reads one frame more: its first frame stands for itself.
        long["window"] += 1
        time = tiled_axis(frames, in_time, limit=in_time(frames), lead=1, **long)
    else:
        time = whole_axis(frames, in_time)
    return TilePlan(axes=(time, height, width))


# -------------------------------------------------------------------- programs

#: What becomes of the arrays where the picture is split over devices; see
#: :mod:`tpuport.core.mesh.spatial_split`. All of the carry are pictures of some latent
#: frames.
TILE = SpatialLayout(inputs={"latents": "BCTYX"}, carry="B", output="BCFYX")
WHOLE = SpatialLayout(inputs={"latents": "BCTYX"}, carry="B", output=FRAMES)
CHUNK = SpatialLayout(
    inputs={"latents": "BCTYX", "start": ""}, carry="BCTYX", output=FRAMES
)
ENCODE_15 = SpatialLayout(
    inputs={"pixels": "BCFYX"}, carry="B", output="BCTYX", granule=16
)
"""For ``spatial_compression_ratio=16``, as published."""


def decode_tile_15(model: BoundModule, z: jax.Array) -> jax.Array:
    """Latents [B, C, T, Y, X] of a tile -> video, about [-1, 1], unclipped.

    ``z`` is divided by the scaling factor already, and cast to the weights' dtype here.
    The video has the weights' dtype.
    """
    video: jax.Array = model(_cast(model, z, "decoder.conv_in"), method="decoder")
    return video


def decode_chunk_15(
    model: BoundModule, carry: Any, z: jax.Array, start: jax.Array, total: int
) -> tuple[dict[str, jax.Array], jax.Array]:
    """:func:`decode_tile_15` of some latent frames of a video, chunk after chunk.

    Exact: each convolution goes on from the last two frames of its earlier input, and
    the attention from the keys and values of all frames so far. The state is kept by
    module path, in the weights' dtype: for a convolution [B, C', 2, Y', X'] at its own
    size, for the attention twice [B, C', total, Y, X].

    Args:
        carry: what the chunk before left; ``None`` for the first.
        z: [B, C, T, Y, X].
        start: index of its first latent frame, int32.
        total: latent frames of the video.

    Returns:
        what is left for the next chunk, and the video: 4T frames, three less in the
        first chunk.
    """
    z = _cast(model, z, "decoder.conv_in")
    return run_chunk(model, carry, z, start=start, total=total, method="decoder")


def decode_tile_13b(model: BoundModule, z: jax.Array) -> jax.Array:
    """As :func:`decode_tile_15`, for the 13b autoencoder.

    Its group norms cover all frames of their input, so every cut in time changes the
    video. Upstream cuts a long video into tiles in time that overlap and are blended;
    these tiles are the chunks, see :mod:`tpuport.models.hunyuanvideo.tiles_in_time`.
    """
    z = model(_cast(model, z, "post_quant_conv"), method="post_quant_conv")
    video: jax.Array = model(z, method="decoder")
    return video


def encode_mode_15(model: BoundModule, x: jax.Array) -> jax.Array:
    """Video [B, 3, F, H, W] -> float32 latent mode [B, C, T, Y, X], unscaled.

    The encoder gives means and log variances side by side; the mode is the mean. ``x``
    is in [-1, 1], and cast to the weights' dtype here. Source: diffusers ``vae.py``,
    ``DiagonalGaussianDistribution.mode``.
    """
    moments = model(_cast(model, x, "encoder.conv_in"), method="encoder")
    return moments[:, : moments.shape[1] // 2].astype(jnp.float32)


def _cast(model: BoundModule, x: jax.Array, layer: str) -> jax.Array:
    """``x`` in the dtype of the weights of ``layer``, a convolution or a causal one."""
    weights = model.weights
    name = f"{layer}.conv.weight"
    return x.astype(weights[name if name in weights else f"{layer}.weight"].dtype)
