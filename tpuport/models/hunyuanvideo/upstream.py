"""The stages of HunyuanVideo by plain upstream code, on the same files.

This is what ``--backend diffusers`` runs, and what the tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from tpuport.core.arrays import torch_dtype
from tpuport.core.enums import Task
from tpuport.core.spec.stage_work import StageContext, one_or_all
from tpuport.models.hunyuanvideo import images, inputs
from tpuport.models.hunyuanvideo.common import tiled, unscaled_latents
from tpuport.models.hunyuanvideo.config import guided_13b
from tpuport.models.hunyuanvideo.scheduler import upstream_scheduler


def encode_15(ctx: StageContext) -> dict[str, Any]:
    """The same by the static methods of upstream's pipelines."""
    from diffusers import (
        HunyuanVideo15ImageToVideoPipeline,
        HunyuanVideo15Pipeline,
    )

    qwen = ctx.upstream_component("text_encoder")
    # ByT5 stays in float32, as the port has it.
    byt5 = ctx.upstream_component("text_encoder_2", "float32")
    chat = inputs.load_tokenizer(ctx.checkpoint, "tokenizer", "Qwen2Tokenizer")
    quoted = inputs.load_tokenizer(ctx.checkpoint, "tokenizer_2", "ByT5Tokenizer")
    # Tokenising here as well is what reports a prompt over the limit.
    inputs.chat_ids(chat, ctx.prompts, ctx.say)
    inputs.glyph_ids(quoted, ctx.prompts, ctx.say)
    named: dict[str, Any] = {}
    groups = {"": ctx.prompts}
    if ctx.request.guided:
        groups["negative_"] = ctx.negative_prompts
    with torch.no_grad():
        for prefix, prompts in groups.items():
            embeds, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
                qwen, chat, list(prompts), ctx.device
            )
            glyphs, glyph_mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
                quoted, byt5, list(prompts), ctx.device
            )
            named[f"{prefix}prompt_embeds"] = embeds.contiguous().cpu()
            named[f"{prefix}prompt_embeds_mask"] = mask.contiguous().cpu()
            named[f"{prefix}prompt_embeds_2"] = glyphs.cpu()
            named[f"{prefix}prompt_embeds_mask_2"] = glyph_mask.cpu()
        if ctx.request.task != Task.IMAGE:
            return named
        pipeline, count = HunyuanVideo15ImageToVideoPipeline, len(ctx.prompts)
        tokens, latents = [], []
        for picture in images.fitted(ctx):
            latents.append(
                pipeline._get_image_latents(
                    ctx.upstream_component("vae"),
                    images.processor(),
                    picture,
                    picture.height,
                    picture.width,
                    ctx.device,
                )
            )
            tokens.append(
                pipeline._get_image_embeds(
                    ctx.upstream_component("image_encoder"),
                    inputs.load_feature_extractor(ctx.checkpoint),
                    picture,
                    ctx.device,
                )
            )
    for name, parts in (("image_embeds", tokens), ("image_latents", latents)):
        rows = torch.cat(parts).cpu()
        named[name] = rows.expand(count, *rows.shape[1:]).contiguous()
    return named


def denoise_15(ctx: StageContext) -> dict[str, Any]:
    """The same by the ``__call__`` of upstream's pipelines, with latents as output."""
    from diffusers import ClassifierFreeGuidance

    request = ctx.request
    transformer = ctx.upstream_component("transformer")
    parts: dict[str, Any] = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    )
    parts |= {
        "transformer": transformer,
        # Only its sizes are read.
        "vae": _sizes_of(ctx.module("vae")),
        "scheduler": upstream_scheduler(ctx),
        "guider": ClassifierFreeGuidance(guidance_scale=request.guidance_scale),
    }
    arguments: dict[str, Any] = {
        name: tensor.to(ctx.device)
        for name, tensor in ctx.inputs.items()
        if "prompt_embeds" in name
    }
    if request.task == Task.IMAGE:
        pipe, picture = _image_pipeline(ctx, parts)
        arguments["image"] = picture
    else:
        pipe = _text_pipeline(parts)
        arguments |= {"height": request.height, "width": request.width}
    pipe.set_progress_bar_config(disable=True)
    given = ctx.inputs.get("initial_latents")
    with torch.no_grad():
        latents = pipe(
            **arguments,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            generator=one_or_all(ctx.generators()),
            latents=given,
            output_type="latent",
            return_dict=False,
        )[0]
    return {"latents": latents.float().cpu()}


def _text_pipeline(parts: dict[str, Any]) -> Any:
    from diffusers import HunyuanVideo15Pipeline

    return HunyuanVideo15Pipeline(**parts)


def _image_pipeline(ctx: StageContext, parts: dict[str, Any]) -> tuple[Any, Any]:
    """Upstream's pipeline that takes the encoded image of the run, and an image for it.

    Its own encoding is handed what the encode stage has made; its choice of a size is
    handed the run's.
    """
    from diffusers import HunyuanVideo15ImageToVideoPipeline

    request = ctx.request

    class Pipeline(HunyuanVideo15ImageToVideoPipeline):
        def encode_image(
            self, image: Any, batch_size: int, device: Any, dtype: Any
        ) -> Any:
            return ctx.inputs["image_embeds"].to(device, dtype)

        @staticmethod
        def _get_image_latents(*args: Any, **kwargs: Any) -> Any:
            return ctx.inputs["image_latents"].to(ctx.device)

        def prepare_cond_latents_and_mask(self, *args: Any, **kwargs: Any) -> Any:
            # The latents are of every video already: nothing is to be repeated.
            kwargs["batch_size"] = 1
            return super().prepare_cond_latents_and_mask(*args, **kwargs)

    pipe = Pipeline(**parts, image_encoder=None, feature_extractor=None)
    pipe.video_processor.calculate_default_height_width = lambda **_: (
        request.height,
        request.width,
    )
    return pipe, Image.new("RGB", (request.width, request.height))


def encode_13b(ctx: StageContext) -> dict[str, Any]:
    """The same by ``HunyuanVideoPipeline.encode_prompt``."""
    from diffusers import HunyuanVideoPipeline

    tokenizer = inputs.load_tokenizer(ctx.checkpoint, "tokenizer", "LlamaTokenizerFast")
    tokenizer_2 = inputs.load_tokenizer(ctx.checkpoint, "tokenizer_2", "CLIPTokenizer")
    inputs.llama_ids(tokenizer, ctx.prompts, say=ctx.say)
    inputs.clip_ids(tokenizer_2, ctx.prompts, ctx.say)
    pipe = HunyuanVideoPipeline(
        text_encoder=ctx.upstream_component("text_encoder"),
        tokenizer=tokenizer,
        text_encoder_2=ctx.upstream_component("text_encoder_2"),
        tokenizer_2=tokenizer_2,
        transformer=None,
        vae=None,
        scheduler=None,
    )
    groups = {"": ctx.prompts}
    if guided_13b(ctx.request):
        groups["negative_"] = ctx.negative_prompts
    named: dict[str, Any] = {}
    with torch.no_grad():
        for prefix, prompts in groups.items():
            embeds, pooled, mask = pipe.encode_prompt(list(prompts), device=ctx.device)
            named[f"{prefix}prompt_embeds"] = embeds.contiguous().cpu()
            named[f"{prefix}prompt_attention_mask"] = mask.contiguous().cpu()
            named[f"{prefix}pooled_prompt_embeds"] = pooled.cpu()
    return named


def denoise_13b(ctx: StageContext) -> dict[str, Any]:
    """The same by ``HunyuanVideoPipeline.__call__`` with latents as output."""
    from diffusers import HunyuanVideoPipeline

    request = ctx.request
    pipe = HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=ctx.upstream_component("transformer"),
        vae=None,
        scheduler=upstream_scheduler(ctx),
    )
    sizes = _sizes_of(ctx.module("vae"))
    pipe.vae_scale_factor_temporal = sizes.temporal_compression_ratio
    pipe.vae_scale_factor_spatial = sizes.spatial_compression_ratio
    pipe.set_progress_bar_config(disable=True)
    embeds = {
        name: tensor.to(ctx.device)
        for name, tensor in ctx.inputs.items()
        if "prompt" in name
    }
    with torch.no_grad():
        latents = pipe(
            **embeds,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            true_cfg_scale=float(request.options["true_cfg_scale"]),
            generator=one_or_all(ctx.generators()),
            latents=ctx.inputs.get("initial_latents"),
            output_type="latent",
            return_dict=False,
        )[0]
    return {"latents": latents.float().cpu()}


def decode(ctx: StageContext) -> dict[str, Any]:
    """The same by the autoencoder's ``decode`` and upstream's postprocessing."""
    from diffusers.video_processor import VideoProcessor

    vae = ctx.upstream_component("vae")
    # The module may be kept between runs: both ways are set.
    vae.use_tiling = tiled(ctx)
    with torch.no_grad():
        z = unscaled_latents(ctx).to(ctx.device, torch_dtype(ctx.dtype))
        # One by one: the attention mask of the 1.5 autoencoder fits one video only.
        video = torch.cat([vae.decode(one).sample for one in z.split(1)])
    frames = VideoProcessor().postprocess_video(video.float(), output_type="np")
    return {"frames": np.asarray(frames, np.float32)}


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    temporal_compression_ratio: int
    spatial_compression_ratio: int
    config: Any
    dtype: None = None


def _sizes_of(vae: Any) -> Any:
    """What a pipeline reads of an autoencoder that it does not run."""
    return _Sizes(
        temporal_compression_ratio=vae.temporal_compression_ratio,
        spatial_compression_ratio=vae.spatial_compression_ratio,
        config=vae.config,
    )
