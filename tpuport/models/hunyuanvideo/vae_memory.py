"""What decoding takes of a device, from the shapes of the two decoders alone.

A decoder is walked level by level: its largest activation, of which several are alive
at the same time, and what chunks hand on, or tiles in time. The result is what the
compiler comes to or more; the share by which it may be less is ``MARGIN``.

Legend: B videos, T/Y/X latent frames, rows, columns; N latent frames of the whole
video, E frames of pixels where tiles in time meet. Sources of the structure: diffusers
``autoencoder_kl_hunyuanvideo15.py``, ``HunyuanVideo15Decoder3D``, and
``autoencoder_kl_hunyuan_video.py``, ``HunyuanVideoDecoder3D``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuport.core.layers.tiles import TilePlan
from tpuport.core.mesh.spatial_split import choose_split
from tpuport.core.spec.stage_work import StageContext
from tpuport.core.spec.tiling import Footprint
from tpuport.core.tracing.chunk_state import chunk_lengths
from tpuport.models.hunyuanvideo import vae
from tpuport.models.hunyuanvideo.tiles_in_time import is_in_time

#: Latent frames of 1.5 that are decoded at a time, where the video is not tiled. An
#: activation at the size of the pixels is that of 8 frames; every chunk more gathers
#: the keys and values of the whole video once more.
FRAMES_PER_CHUNK = 2

#: Arrays as large as the largest activation that are alive at the same time, in 1.5.
#: Measured on v6e-8 at 720x1280: 16.8 in a chunk of two latent frames. No other size,
#: and no tile, was compared with a program for a TPU.
ALIVE_15_ON_TPU = 20.0
#: The compiler for CPUs, which computes in float32 whatever the weights are. Measured
#: with the demo: 8.1 to 9.3, and with the copies of weights that count in a small
#: picture up to 13.7.
ALIVE_15_ELSEWHERE = 10.0
#: The same of 13b. Measured on v6e-8 at 320x1024, nine frames: 5.7. No other size, and
#: no tile, was compared with a program for a TPU.
ALIVE_13B_ON_TPU = 7.0
#: Measured with the demo: 5.7 to 6.3.
ALIVE_13B_ELSEWHERE = 7.5
#: Bytes of a program for a TPU (94 MiB of 1.5 at 720x1280, 58 MiB of 13b at 320x1024);
#: on CPUs it is small.
CODE_ON_TPU = 96 * 2**20

MARGIN = 0.15
"""By how much the compiled program may be above the estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Elements of one device for a program of decode, without weights.

    Attributes:
        largest: of the largest activation.
        past: that go from one call to the next, those of the attention included.
        gathered: keys and values of the whole picture, for one layer of attention.
        video: of the pixels that come out.
    """

    largest: int
    past: int = 0
    gathered: int = 0
    video: int = 0

    def bytes(self, kept: int, busy: int, alive: float) -> int:
        """At the peak. What goes from call to call is written in place.

        Args:
            kept: bytes of an element that goes from call to call.
            busy: bytes of an element of an activation.
            alive: how many of ``largest`` are held at the same time.
        """
        most = max(alive * self.largest, 2 * self.gathered)
        return int(kept * self.past + busy * most + 8 * self.video)


def footprint_15(ctx: StageContext, tiled: bool, devices: Sequence[Any]) -> Footprint:
    """Bytes of one of ``devices`` that a program of 1.5's decode takes."""
    on_tpu = devices[0].platform == "tpu"
    alive = ALIVE_15_ON_TPU if on_tpu else ALIVE_15_ELSEWHERE
    return _footprint(ctx, tiled, devices, decoder_15, alive, chunked=True)


def footprint_13b(ctx: StageContext, tiled: bool, devices: Sequence[Any]) -> Footprint:
    """Bytes of one of ``devices`` that a program of 13b's decode takes."""
    on_tpu = devices[0].platform == "tpu"
    alive = ALIVE_13B_ON_TPU if on_tpu else ALIVE_13B_ELSEWHERE
    return _footprint(ctx, tiled, devices, decoder_13b, alive, chunked=False)


def _footprint(
    ctx: StageContext,
    tiled: bool,
    devices: Sequence[Any],
    parts: Callable[..., Parts],
    alive: float,
    *,
    chunked: bool,
) -> Footprint:
    module: Any = ctx.module("vae")
    request = ctx.request
    space = module.spatial_compression_ratio
    total = (request.num_frames - 1) // module.temporal_compression_ratio + 1
    rows, columns = request.height // space, request.width // space
    shape = (request.batch_size, 0, total, rows, columns)
    plan = vae.plan_decode(module, shape, tiled)
    frames, rows, columns = (
        max(span.stop - span.start for span in axis.spans) for axis in plan.axes
    )
    handed: int | None = None
    if chunked and len(plan.tiles) == 1:
        frames = max(chunk_lengths(total, FRAMES_PER_CHUNK))
        handed = total
    elif is_in_time(plan):
        handed = plan.axes[0].blend
    found = parts(
        module.config,
        (request.batch_size, frames, rows, columns),
        len(devices),
        handed,
    )
    on_tpu = devices[0].platform == "tpu"
    itemsize = 4 if ctx.dtype == "float32" else 2
    peak = found.bytes(itemsize, itemsize if on_tpu else 4, alive)
    names = ("decoder.", "post_quant_conv.")
    weights = sum(
        tensor.numel()
        for name, tensor in module.state_dict().items()
        if name.startswith(names)
    )
    code = CODE_ON_TPU if on_tpu else 0
    return Footprint(bytes=peak + weights * itemsize + code, tiles=_in_words(plan))


def _in_words(plan: TilePlan) -> str:
    """Such as ``"3 x 5 tiles of up to 256 x 256 pixels"``; empty for a whole picture.

    The tiles in time of 13b are no choice, and not among them.
    """
    _, rows, columns = plan.axes
    if len(rows.spans) * len(columns.spans) == 1:
        return ""
    high, wide = (max(span.made for span in axis.spans) for axis in (rows, columns))
    return (
        f"{len(rows.spans)} x {len(columns.spans)} tiles of up to {high} x {wide} "
        "pixels"
    )


def decoder_15(
    config: Mapping[str, Any],
    latents: tuple[int, int, int, int],
    devices: int,
    total: int | None,
) -> Parts:
    """What a chunk, or a tile, of 1.5 takes of one device.

    Every causal convolution hands on two frames of its input, the attention the keys
    and the values of all N latent frames.

    Args:
        config: of the autoencoder.
        latents: B, T, Y and X of a chunk or a tile.
        devices: that share it.
        total: N; ``None`` where the video is not decoded in chunks.
    """
    frames = latents[1]
    area, picture = _areas(latents, devices)
    channels = list(reversed(config["block_out_channels"]))
    in_space = int(math.log2(config["spatial_compression_ratio"]))
    in_time = int(math.log2(config["temporal_compression_ratio"]))
    convolutions = 2 * (int(config["layers_per_block"]) + 1)
    kept = frames if total is None else total
    gathered = 2 * kept * picture * channels[0]
    past = 2 * kept * area * channels[0]
    past += 2 * area * (int(config["latent_channels"]) + 4 * channels[0])
    # Of the first frame of a video comes one alone.
    alone = total in (None, frames)
    largest = 0
    before = channels[0]
    for level, width in enumerate(channels):
        past += 2 * area * (before + (convolutions - 1) * width)
        largest = max(largest, area * frames * max(before, width))
        before = width
        if level < max(in_space, in_time):
            past += 2 * area * width
            if config["upsample_match_channel"]:
                before = channels[level + 1]
            area *= 4
            if level < in_time:
                frames = 2 * frames - alone
            largest = max(largest, area * frames * before)
    past += 2 * area * channels[-1]
    return Parts(
        largest=largest,
        past=0 if total is None else past,
        gathered=gathered,
        video=3 * area * frames,
    )


def decoder_13b(
    config: Mapping[str, Any],
    latents: tuple[int, int, int, int],
    devices: int,
    seam: int | None = None,
) -> Parts:
    """What a tile of 13b takes of one device; upstream cuts long videos in time too.

    Args:
        config, latents, devices: as for :func:`decoder_15`.
        seam: E; ``None`` where tiles are blended on the host, and for a single one.
    """
    frames = latents[1]
    area, picture = _areas(latents, devices)
    channels = list(reversed(config["block_out_channels"]))
    in_space = int(math.log2(config["spatial_compression_ratio"]))
    in_time = int(math.log2(config["temporal_compression_ratio"]))
    last = len(channels) - 1
    attends = bool(config["mid_block_add_attention"])
    gathered = 2 * frames * picture * channels[0] if attends else 0
    largest = 0
    before = channels[0]
    for level, width in enumerate(channels):
        largest = max(largest, area * frames * max(before, width))
        if level < in_space:
            area *= 4
        if last - in_time <= level < last:
            frames = 2 * frames - 1
        # What is enlarged has the channels of the level before.
        largest = max(largest, area * frames * width)
        before = width
    return Parts(
        largest=largest,
        past=3 * area * (seam or 0),
        gathered=gathered,
        video=3 * area * frames,
    )


def _areas(latents: tuple[int, int, int, int], devices: int) -> tuple[int, int]:
    """Latent positions of a frame, of all videos of a device: its part, the picture."""
    batch, _, rows, columns = latents
    split = choose_split(devices, batch, rows, columns)
    videos = batch // split.videos
    part = math.ceil(rows / split.rows) * math.ceil(columns / split.columns)
    return videos * part, videos * rows * columns
