"""The stages of CogVideoX by plain upstream code, on the same files.

This is what ``--backend diffusers`` runs, and what the tests compare with.
"""

from __future__ import annotations

from typing import Any

from tpuport.core.arrays import torch_dtype
from tpuport.core.spec import StageContext
from tpuport.models.cogvideox import scheduler
from tpuport.models.cogvideox.inputs import (
    latents_for_vae,
    load_tokenizer,
    text_tokens,
    tokenize,
    vae_strides,
)


def encode(ctx: StageContext) -> dict[str, Any]:
    """The same by ``CogVideoXPipeline.encode_prompt``."""
    import torch

    pipe = _pipeline(ctx, "text_encoder", "tokenizer")
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
    return named


def denoise(ctx: StageContext) -> dict[str, Any]:
    """The same by ``CogVideoXPipeline.__call__`` with ``output_type="latent"``."""
    import torch

    request = ctx.request
    pipe = _pipeline(ctx, "transformer")
    pipe.scheduler = scheduler.make_scheduler(
        ctx.checkpoint, request.options["scheduler"]
    )
    strides = vae_strides(ctx.checkpoint)
    pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal = strides
    generators = ctx.generators()
    embeds = {k: v.to(ctx.device) for k, v in ctx.inputs.items() if "embeds" in k}
    given = ctx.inputs.get("initial_latents")
    with torch.no_grad():
        latents = pipe(
            **embeds,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            use_dynamic_cfg=request.options["dynamic_cfg"],
            generator=generators if len(generators) > 1 else generators[0],
            latents=None if given is None else given.to(embeds["prompt_embeds"].dtype),
            max_sequence_length=embeds["prompt_embeds"].shape[1],
            output_type="latent",
            return_dict=False,
        )[0]
    return {"latents": latents.float().cpu()}


def decode(ctx: StageContext) -> dict[str, Any]:
    """The same by ``AutoencoderKLCogVideoX.decode`` and upstream's postprocessing."""
    import numpy as np
    import torch
    from diffusers.video_processor import VideoProcessor

    vae = _upstream_component(ctx, "vae")
    spatial, _ = vae_strides(ctx.checkpoint)
    with torch.no_grad():
        z = latents_for_vae(ctx).to(ctx.device, torch_dtype(ctx.dtype))
        video = vae.decode(z).sample
    frames = VideoProcessor(vae_scale_factor=spatial).postprocess_video(
        video.float(), output_type="np"
    )
    return {"frames": np.asarray(frames, np.float32)}


def _pipeline(ctx: StageContext, *components: str) -> Any:
    """``CogVideoXPipeline`` with only the named components loaded."""
    from diffusers import CogVideoXPipeline

    loaded: dict[str, Any] = dict.fromkeys(
        ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
    )
    for name in components:
        loaded[name] = _upstream_component(ctx, name)
    pipe = CogVideoXPipeline(**loaded)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _upstream_component(ctx: StageContext, name: str) -> Any:
    """One component as upstream's own object."""
    return ctx.upstream(name, lambda: _from_pretrained(ctx, name))


def _from_pretrained(ctx: StageContext, name: str) -> Any:
    """One component loaded by upstream's own ``from_pretrained``."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
    from transformers import T5EncoderModel

    folder = ctx.checkpoint.folder / name
    if name == "tokenizer":
        return load_tokenizer(ctx.checkpoint)
    dtype = torch_dtype(ctx.dtype)
    if name == "text_encoder":
        module = T5EncoderModel.from_pretrained(folder, dtype=dtype)
    elif name == "transformer":
        module = CogVideoXTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    else:
        module = AutoencoderKLCogVideoX.from_pretrained(folder, torch_dtype=dtype)
    return module.eval().to(ctx.device)
