"""The stages of CogVideoX by plain upstream code, on the same files.

This is what ``--backend diffusers`` runs, and what the tests compare with.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from tpuport.core.enums import Task
from tpuport.core.run.upstream_stages import (
    upstream_decode,
    upstream_denoise,
    upstream_pipeline,
)
from tpuport.core.spec.stage_work import StageContext, one_or_all
from tpuport.models.cogvideox import scheduler
from tpuport.models.cogvideox.conditioning import (
    given_latents,
    padded,
    pixels,
    posterior_draws,
    preprocess,
)
from tpuport.models.cogvideox.inputs import (
    initial_latents,
    latent_shape,
    latents_for_vae,
    load_tokenizer,
    text_tokens,
    tokenize,
    vae_strides,
)

#: The pipeline of each task.
PIPELINES = {
    "t2v": "CogVideoXPipeline",
    "i2v": "CogVideoXImageToVideoPipeline",
    "v2v": "CogVideoXVideoToVideoPipeline",
}


def encode(ctx: StageContext) -> dict[str, Any]:
    """The same by ``encode_prompt`` and ``prepare_latents`` of upstream's pipelines."""
    pipe = _pipeline(
        ctx,
        text_encoder=ctx.upstream_component("text_encoder"),
        tokenizer=load_tokenizer(ctx.checkpoint),
    )
    # Tokenising here as well is what reports a prompt over the limit.
    tokenize(ctx, ctx.prompts)
    with torch.no_grad():
        embeds, negative = pipe.encode_prompt(
            list(ctx.prompts),
            list(ctx.negative_prompts),
            ctx.request.guided,
            max_sequence_length=text_tokens(ctx),
            device=ctx.device,
        )
        named = {"prompt_embeds": embeds.cpu()}
        if ctx.request.guided:
            named["negative_prompt_embeds"] = negative.cpu()
        if ctx.request.task == Task.IMAGE:
            named["image_latents"] = _image_latents(ctx).cpu()
        elif ctx.request.task == Task.VIDEO:
            named["video_latents"] = _video_latents(ctx).cpu()
    return named


def _image_latents(ctx: StageContext) -> torch.Tensor:
    """The second result of ``CogVideoXImageToVideoPipeline.prepare_latents``."""
    from diffusers import CogVideoXImageToVideoPipeline

    vae = ctx.upstream_component("vae")
    spatial, temporal = vae_strides(ctx.checkpoint)
    batch, frames, channels, *_ = latent_shape(ctx.request, ctx.checkpoint)
    patch_t = ctx.checkpoint.config("transformer").get("patch_size_t")
    # All that the method reads of a pipeline: no transformer is loaded for this stage.
    pipe = SimpleNamespace(
        vae=vae,
        vae_scaling_factor_image=vae.config.scaling_factor,
        vae_scale_factor_spatial=spatial,
        vae_scale_factor_temporal=temporal,
        transformer=SimpleNamespace(config=SimpleNamespace(patch_size_t=patch_t)),
        scheduler=SimpleNamespace(init_noise_sigma=1.0),
    )
    image = preprocess(ctx, pixels(ctx))[:, :, 0].to(ctx.device, vae.dtype)
    generators = ctx.generators()
    _, latents = CogVideoXImageToVideoPipeline.prepare_latents(
        pipe,
        image,
        batch,
        channels,
        (frames - 1) * temporal + 1,
        ctx.request.height,
        ctx.request.width,
        vae.dtype,
        ctx.device,
        one_or_all(generators),
        latents=image,  # in place of noise, which is drawn when denoising
    )
    return latents


def _video_latents(ctx: StageContext) -> torch.Tensor:
    """The clean latents of ``CogVideoXVideoToVideoPipeline.prepare_latents``."""
    from diffusers.pipelines.cogvideo.pipeline_cogvideox_video2video import (
        retrieve_latents,
    )

    vae = ctx.upstream_component("vae")
    videos = preprocess(ctx, pixels(ctx)).to(ctx.device, vae.dtype)
    generators = ctx.generators() * len(videos)
    latents = [
        retrieve_latents(vae.encode(video[None]), generator)
        for video, generator in zip(videos, generators, strict=False)
    ]
    joined = torch.cat(latents).permute(0, 2, 1, 3, 4)
    return padded(ctx, vae.config.scaling_factor * joined)


def denoise(ctx: StageContext) -> dict[str, Any]:
    """The same by the pipeline's ``__call__`` with ``output_type="latent"``.

    Its own loop from its own numbers: only ``prepare_latents`` is replaced where the
    image or the video was encoded by the stage before.
    """
    request = ctx.request
    pipe = _pipeline(
        ctx,
        transformer=ctx.upstream_component("transformer"),
        scheduler=scheduler.make_scheduler(
            ctx.checkpoint, request.options["scheduler"]
        ),
    )
    strides = vae_strides(ctx.checkpoint)
    pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal = strides
    generators = ctx.generators()
    embeds = {k: v.to(ctx.device) for k, v in ctx.inputs.items() if "embeds" in k}
    dtype = embeds["prompt_embeds"].dtype
    asked: dict[str, Any] = {}
    source = given_latents(ctx)
    if source is None:
        given = ctx.inputs.get("initial_latents")
        asked["latents"] = None if given is None else given.to(dtype)
    else:
        posterior_draws(ctx, generators, source.dtype)
        noise = initial_latents(ctx, generators).to(ctx.device, dtype)
        source = source.to(ctx.device, dtype)
        pipe.prepare_latents = functools.partial(_prepared, pipe, source, noise)
    frames = latent_shape(request, ctx.checkpoint)[1]
    if request.task == Task.IMAGE:
        # Only its size counts: the latents are ready.
        asked["image"] = torch.zeros(1, 3, request.height, request.width)
    if request.task == Task.VIDEO:
        # Its number of frames is all that is read of it.
        asked["latents"] = torch.empty(1, (frames - 1) * strides[1] + 1)
        asked["strength"] = request.strength
    else:
        asked["num_frames"] = request.num_frames
    return upstream_denoise(
        ctx,
        pipe,
        **embeds,
        **asked,
        height=request.height,
        width=request.width,
        guidance_scale=request.guidance_scale,
        use_dynamic_cfg=request.options["dynamic_cfg"],
        generator=one_or_all(generators),
        max_sequence_length=embeds["prompt_embeds"].shape[1],
    )


def _prepared(
    pipe: Any, source: torch.Tensor, noise: torch.Tensor, *args: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What ``prepare_latents`` returns from here on; its last argument is for v2v."""
    scale = pipe.scheduler.init_noise_sigma
    if type(pipe).__name__ == PIPELINES["i2v"]:
        return noise * scale, source
    timestep = args[-1]
    mixed: torch.Tensor = pipe.scheduler.add_noise(source, noise, timestep)
    return mixed * scale


def decode(ctx: StageContext) -> dict[str, Any]:
    """The same by ``AutoencoderKLCogVideoX.decode``."""
    z = latents_for_vae(ctx)
    return upstream_decode(ctx, z, each=len(z))


def _pipeline(ctx: StageContext, **parts: Any) -> Any:
    """The pipeline of the task with these parts."""
    import diffusers

    return upstream_pipeline(getattr(diffusers, PIPELINES[ctx.request.task]), **parts)
