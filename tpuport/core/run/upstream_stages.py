"""Stages by plain upstream code: what ``--backend diffusers`` runs of any model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.core.arrays import torch_dtype
from tpuport.core.enums import Tiling
from tpuport.core.spec.stage_work import StageContext, one_or_all


def upstream_pipeline(cls: Callable[..., Any], **parts: Any) -> Any:
    """A pipeline of diffusers with these parts, and ``None`` in place of all others."""
    pipe = cls(**dict.fromkeys(inspect.signature(cls).parameters) | parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def upstream_denoise(ctx: StageContext, pipe: Any, **arguments: Any) -> dict[str, Any]:
    """The denoise stage by a pipeline's ``__call__`` with latents as output.

    Args:
        arguments: further ones of the call, or others than those of the request.
    """
    given = {
        "num_inference_steps": ctx.request.num_inference_steps,
        "generator": one_or_all(ctx.generators()),
        "output_type": "latent",
        "return_dict": False,
    }
    with torch.no_grad():
        latents = pipe(**given | arguments)[0]
    return {"latents": latents.float().cpu()}


def upstream_decode(ctx: StageContext, z: torch.Tensor, each: int) -> dict[str, Any]:
    """The decode stage by the autoencoder's ``decode`` and upstream's postprocessing.

    Args:
        z: latents [B, C, T, Y, X] as the autoencoder takes them.
        each: how many videos to decode at a time.
    """
    from diffusers.video_processor import VideoProcessor

    vae = ctx.upstream_component("vae")
    z = z.to(ctx.device, torch_dtype(ctx.dtype))
    # The object may be kept, and with it the encoder: it stays as it was.
    before, vae.use_tiling = vae.use_tiling, ctx.vae_tiling == Tiling.ON
    try:
        with torch.no_grad():
            video = torch.cat([vae.decode(part).sample for part in z.split(each)])
    finally:
        vae.use_tiling = before
    frames = VideoProcessor().postprocess_video(video.float(), output_type="np")
    return {"frames": np.asarray(frames, np.float32)}
