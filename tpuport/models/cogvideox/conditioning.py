"""From the pixels of an image or a video to the latents that a video is made from.

Upstream samples the VAE's posterior with the run's generators before it draws the
initial noise. Here the sampling is part of the encode stage, and the denoise stage
moves its fresh generators on by the same draws: both through ``posterior_draws``.

Legend: B videos of a batch, F frames, T/Y/X latent frames, rows, columns, C latent
channels. Sources: diffusers ``CogVideoXImageToVideoPipeline.prepare_latents``,
``CogVideoXVideoToVideoPipeline.prepare_latents``, ``AutoencoderKLCogVideoX._encode``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tpuport.core.enums import Task
from tpuport.core.files.sources import to_images
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.spec.stage import Program
from tpuport.core.spec.stage_work import Call, StageContext
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.errors import UsageError
from tpuport.models.cogvideox.inputs import (
    chunk_lengths,
    latent_shape,
    padding_frames,
    scaling_factor,
    vae_strides,
)

#: What each task starts from, and the tensor that the encode stage makes of it.
SOURCES = {
    "i2v": ("image", "image_latents"),
    "v2v": ("video", "video_latents"),
}

#: Frames that upstream's VAE encodes at a time.
FRAMES_PER_CHUNK = 8


def pixels(ctx: StageContext) -> torch.Tensor:
    """uint8 [B, F, Y, X, 3] of a batch's images (F = 1) or videos.

    Raises:
        UsageError: they were not given.
    """
    kind, _ = SOURCES[ctx.request.task]
    if kind not in ctx.inputs:
        raise UsageError(f"this run starts from its {kind}: give encode the pixels")
    found = ctx.inputs[kind]
    return found[:, None] if kind == "image" else found


def preprocess(ctx: StageContext, frames: torch.Tensor) -> torch.Tensor:
    """Pixels [B, F, Y, X, 3] -> [B, 3, F, height, width] in [-1, 1], float32.

    Resized to the request's size by upstream's processor, without a crop.
    """
    from diffusers.video_processor import VideoProcessor

    processor = VideoProcessor(vae_scale_factor=vae_strides(ctx.checkpoint)[0])
    size = {"height": ctx.request.height, "width": ctx.request.width}
    videos = [processor.preprocess(to_images(video), **size) for video in frames]
    return torch.stack(videos).permute(0, 2, 1, 3, 4).contiguous()


def encode_chunk(
    model: BoundModule, carry: Any, constants: None, inputs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Frames [B, 3, F, 8Y, 8X] of a chunk -> moments [B, 2C, T, Y, X].

    The carry is the encoder's convolution cache, as in decoding. The moments are the
    mean and the logarithm of the variance, in the weights' dtype.
    """
    x = inputs["pixels"].astype(model.weights["encoder.conv_in.conv.weight"].dtype)
    moments, cache = model(x, conv_cache=carry, method="encoder")
    if model.ported.module.quant_conv is not None:
        moments = model(moments, method="quant_conv")
    return cache, moments


ENCODE_SPACE = SpatialLayout(
    inputs={"pixels": "BCFYX"}, carry="BCFYX", output="BCTYX", granule=8
)
ENCODE_CHUNK = Program(component="vae", fn=encode_chunk, space=ENCODE_SPACE)
"""For the first chunk and for those that follow."""


def encode_calls(ctx: StageContext) -> Iterator[Call]:
    """The calls that encode the pixels, all videos of the batch at once."""
    frames = pixels(ctx)
    start = 0
    for index, length in enumerate(chunk_lengths(frames.shape[1], FRAMES_PER_CHUNK)):
        chunk = preprocess(ctx, frames[:, start : start + length])
        yield Call("next" if index else "first", {"pixels": chunk})
        start += length


def posterior_draws(
    ctx: StageContext, generators: list[torch.Generator], dtype: torch.dtype
) -> torch.Tensor:
    """The noise that samples the posterior: [B, C, T, Y, X], drawn video by video.

    Args:
        generators: fresh ones; moved on by this.
        dtype: of the moments, in which upstream draws.
    """
    from diffusers.utils.torch_utils import randn_tensor

    batch, frames, channels, rows, columns = latent_shape(ctx.request, ctx.checkpoint)
    frames -= padding_frames(ctx.request, ctx.checkpoint)
    encoded = 1 if ctx.request.task == Task.IMAGE else frames
    shape = (1, channels, encoded, rows, columns)
    if ctx.planned:
        return torch.zeros((batch, *shape[1:]), dtype=dtype)
    several = len(generators) > 1
    return torch.cat(
        [
            randn_tensor(shape, generators[i if several else 0], dtype=dtype)
            for i in range(batch)
        ]
    )


def source_latents(ctx: StageContext, moments: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sampled, scaled and padded latents [B, T, C, Y, X] of moments [B, 2C, T, Y, X].

    Their dtype is that of the moments; the denoise stage goes by it.
    """
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    posterior = DiagonalGaussianDistribution(moments)
    noise = posterior_draws(ctx, ctx.generators(), moments.dtype)
    latents = (posterior.mean + posterior.std * noise).permute(0, 2, 1, 3, 4)
    _, name = SOURCES[ctx.request.task]
    return {name: padded(ctx, scaled(ctx, latents)).contiguous()}


def scaled(ctx: StageContext, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the transformer takes them.

    Only image latents heed ``invert_scale_latents``: upstream scales videos, and all
    latents that it decodes, the plain way in every checkpoint.
    """
    factor = scaling_factor(ctx.checkpoint)
    inverted = ctx.checkpoint.config("vae").get("invert_scale_latents", False)
    if ctx.request.task == Task.IMAGE and inverted:
        return 1 / factor * latents
    return factor * latents


def padded(ctx: StageContext, latents: torch.Tensor) -> torch.Tensor:
    """[B, T', C, Y, X] -> [B, T, C, Y, X], the frames of the denoising loop.

    An image stands in the first frame and zeros follow, also where ``patch_size_t``
    adds a frame in front that is cut off in the end: as upstream. A video has its first
    frame repeated there; upstream's pipeline refuses such a frame count.
    """
    if ctx.request.task == Task.IMAGE:
        total = latent_shape(ctx.request, ctx.checkpoint)[1]
        rest = latents.new_zeros(latents.shape[0], total - 1, *latents.shape[2:])
        return torch.cat([latents, rest], dim=1)
    padding = padding_frames(ctx.request, ctx.checkpoint)
    return torch.cat([latents[:, :1]] * padding + [latents], dim=1)


def given_latents(ctx: StageContext) -> torch.Tensor | None:
    """What encode made of the image or the video; ``None`` for text to video.

    Raises:
        UsageError: it is missing or has another shape, or initial latents were given
            in place of a video.
    """
    if ctx.request.task not in SOURCES:
        return None
    kind, name = SOURCES[ctx.request.task]
    shape = latent_shape(ctx.request, ctx.checkpoint)
    if kind == "video" and "initial_latents" in ctx.inputs:
        raise UsageError("a video and initial latents exclude each other; give one")
    if name not in ctx.inputs:
        raise UsageError(f"denoise needs {name}: run encode with the {kind}")
    found = ctx.inputs[name]
    if tuple(found.shape) != shape:
        raise UsageError(f"{name} of shape {tuple(found.shape)}; needed is {shape}")
    return found


def noised(
    latents: torch.Tensor, noise: torch.Tensor, sampler: Any, timestep: int
) -> torch.Tensor:
    """A video's latents with the noise of a timestep, by upstream's ``add_noise``."""
    timesteps = torch.full((latents.shape[0],), timestep, dtype=torch.int64)
    mixed: torch.Tensor = sampler.add_noise(latents.float(), noise.float(), timesteps)
    return mixed
