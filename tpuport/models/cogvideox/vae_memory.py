"""What decoding takes of a device, from the shapes of the decoder alone.

The decoder is walked level by level: at each, the largest layer holds its input, the
input with its halo and its past, what it gives, and what is between them. The result is
what the compiler comes to or more; the share by which it may be less is ``MARGIN``.

Legend: B videos, T/Y/X latent frames, rows, columns. Source of the structure:
diffusers ``autoencoder_kl_cogvideox.py``, ``CogVideoXDecoder3D``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpuport.core.mesh.spatial_split import choose_split
from tpuport.core.spec.stage_work import StageContext
from tpuport.core.spec.tiling import Footprint
from tpuport.models.cogvideox import vae_tiles
from tpuport.models.cogvideox.inputs import latent_shape, padding_frames

#: Arrays as large as the largest layer's input that are alive at the same time.
#: With 1.5-5b on v6e at 720x1280: 3.1 on eight chips, and less on one. The VAE in Flax
#: runs the same kernels in the same order.
ALIVE_ON_TPU = 4.5
#: Bytes of a program for a TPU; on CPUs it is small.
CODE_ON_TPU = 64 * 2**20
#: The compiler for CPUs keeps more of them, and computes in float32 whatever the
#: weights are. Measured: up to 9.6 in the first chunk.
ALIVE_ELSEWHERE = 10.0
#: The same of the VAE in Flax. Measured: up to 6.4, in the second chunk on one device;
#: 5.5 in the first.
FLAX_ALIVE_ELSEWHERE = 6.5

MARGIN = 0.15
"""By how much the compiled program may be above the estimate."""


def decode_footprint(
    ctx: StageContext, tiled: bool, devices: Sequence[Any]
) -> Footprint:
    """Bytes of one of ``devices`` that a chunk of decode takes, in tiles or not."""
    return _footprint(ctx, tiled, devices, ALIVE_ON_TPU, ALIVE_ELSEWHERE)


def flax_decode_footprint(
    ctx: StageContext, tiled: bool, devices: Sequence[Any]
) -> Footprint:
    """The same of the VAE in Flax."""
    return _footprint(ctx, tiled, devices, ALIVE_ON_TPU, FLAX_ALIVE_ELSEWHERE)


def _footprint(
    ctx: StageContext,
    tiled: bool,
    devices: Sequence[Any],
    alive_on_tpu: float,
    alive_elsewhere: float,
) -> Footprint:
    vae = ctx.module("vae")
    batch, frames, _, rows, columns = latent_shape(ctx.request, ctx.checkpoint)
    longest = max(
        vae_tiles.chunk_lengths(frames - padding_frames(ctx.request, ctx.checkpoint))
    )
    words = ""
    if vae_tiles.is_tiled(vae, rows, columns, tiled):
        axes = vae_tiles.decode_axes(vae, rows, columns, tiling=True)
        words = vae_tiles.in_words(axes)
        rows, columns = (max(s.stop - s.start for s in axis.spans) for axis in axes)
    itemsize = 4 if ctx.dtype == "float32" else 2
    on_tpu = devices[0].platform == "tpu"
    peak = decoder_bytes(
        vae.config,
        (batch, longest, rows, columns),
        len(devices),
        itemsize if on_tpu else 4,
        alive_on_tpu if on_tpu else alive_elsewhere,
    )
    names = ("decoder.", "post_quant_conv.")
    weights = sum(
        tensor.numel()
        for name, tensor in vae.state_dict().items()
        if name.startswith(names)
    )
    code = CODE_ON_TPU if on_tpu else 0
    return Footprint(bytes=peak + weights * itemsize + code, tiles=words)


def decoder_bytes(
    config: Mapping[str, Any],
    latents: tuple[int, int, int, int],
    devices: int,
    itemsize: int,
    alive: float,
) -> int:
    """Caches and activations of the decoder on one device, weights left out.

    Args:
        config: of the autoencoder.
        latents: B, T, Y and X of a chunk.
        devices: that share it.
        itemsize: bytes of an activation.
        alive: arrays of the largest layer that are held at the same time.
    """
    batch, frames, rows, columns = latents
    split = choose_split(devices, batch, rows, columns)
    area = math.ceil(rows / split.rows) * math.ceil(columns / split.columns)
    area *= batch // split.videos
    channels = list(reversed(config["block_out_channels"]))
    in_time = int(math.log2(config["temporal_compression_ratio"]))
    blocks = int(config["layers_per_block"]) + 1
    # The two frames of each causal convolution's input: conv_in, the middle, each
    # level, and the last convolution.
    past = area * (int(config["latent_channels"]) + 4 * channels[0])
    largest = 0
    before = channels[0]
    for level, width in enumerate(channels):
        past += area * (before + (2 * blocks - 1) * width)
        wide = max(before, width)
        largest = max(largest, area * frames * wide)
        before = width
        if level + 1 < len(channels):
            area *= 4
            if level < in_time:
                frames = 2 * frames - frames % 2
            # What is upsampled is held beside what it is made of.
            largest = max(largest, area * frames * width)
    past += area * channels[-1]
    video = area * frames * 3
    return int(itemsize * (2 * past + alive * largest) + 8 * video)
