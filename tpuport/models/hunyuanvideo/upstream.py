"""The stages of HunyuanVideo by plain upstream code, on the same files.

This is what ``--backend diffusers`` runs, and what the tests compare with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from tpuport.core.enums import Task
from tpuport.core.layers.flow_match import make_scheduler
from tpuport.core.run.upstream_stages import (
    upstream_decode,
    upstream_denoise,
    upstream_pipeline,
)
from tpuport.core.spec.stage_work import StageContext
from tpuport.models.hunyuanvideo import inputs
from tpuport.models.hunyuanvideo.common import unscaled_latents
from tpuport.models.hunyuanvideo.config import guided_13b


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
        for picture in inputs.fitted_images(ctx):
            latents.append(
                pipeline._get_image_latents(
                    ctx.upstream_component("vae"),
                    inputs.image_processor(),
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
    from diffusers import ClassifierFreeGuidance, HunyuanVideo15Pipeline

    request = ctx.request
    image = request.task == Task.IMAGE
    pipe = upstream_pipeline(
        _image_pipeline(ctx) if image else HunyuanVideo15Pipeline,
        **_denoising_parts(ctx),
        guider=ClassifierFreeGuidance(guidance_scale=request.guidance_scale),
    )
    height, width = request.height, request.width
    size: dict[str, Any] = {"height": height, "width": width}
    if image:
        pipe.video_processor.calculate_default_height_width = lambda **_: (
            height,
            width,
        )
        size = {"image": Image.new("RGB", (width, height))}
    return upstream_denoise(
        ctx,
        pipe,
        **_texts(ctx),
        **size,
        num_frames=request.num_frames,
        latents=ctx.inputs.get("initial_latents"),
    )


def _denoising_parts(ctx: StageContext) -> dict[str, Any]:
    config = ctx.checkpoint.config("scheduler")
    return {
        "transformer": ctx.upstream_component("transformer"),
        # Only its sizes are read.
        "vae": _sizes_of(ctx.module("vae")),
        "scheduler": make_scheduler(config, float(ctx.request.options["flow_shift"])),
    }


def _texts(ctx: StageContext) -> dict[str, torch.Tensor]:
    """The embeddings and masks of the run as a pipeline takes them."""
    return {k: v.to(ctx.device) for k, v in ctx.inputs.items() if "prompt" in k}


def _image_pipeline(ctx: StageContext) -> Any:
    """Upstream's pipeline with the encoded image of the run in place of its own."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline

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

    return Pipeline


def encode_13b(ctx: StageContext) -> dict[str, Any]:
    """The same by ``HunyuanVideoPipeline.encode_prompt``."""
    from diffusers import HunyuanVideoPipeline

    tokenizer = inputs.load_tokenizer(ctx.checkpoint, "tokenizer", "LlamaTokenizerFast")
    tokenizer_2 = inputs.load_tokenizer(ctx.checkpoint, "tokenizer_2", "CLIPTokenizer")
    inputs.llama_ids(tokenizer, ctx.prompts, say=ctx.say)
    inputs.clip_ids(tokenizer_2, ctx.prompts, ctx.say)
    pipe = upstream_pipeline(
        HunyuanVideoPipeline,
        text_encoder=ctx.upstream_component("text_encoder"),
        tokenizer=tokenizer,
        text_encoder_2=ctx.upstream_component("text_encoder_2"),
        tokenizer_2=tokenizer_2,
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
    pipe = upstream_pipeline(HunyuanVideoPipeline, **_denoising_parts(ctx))
    return upstream_denoise(
        ctx,
        pipe,
        **_texts(ctx),
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        guidance_scale=request.guidance_scale,
        true_cfg_scale=float(request.options["true_cfg_scale"]),
        latents=ctx.inputs.get("initial_latents"),
    )


def decode(ctx: StageContext) -> dict[str, Any]:
    """The same by the autoencoder's ``decode``.

    One by one: the attention mask of the 1.5 autoencoder fits one video only.
    """
    return upstream_decode(ctx, unscaled_latents(ctx), each=1)


class _Sizes(SimpleNamespace):
    """A class of our own: diffusers asks a part for its ``__module__``."""


def _sizes_of(vae: Any) -> _Sizes:
    """What a pipeline reads of an autoencoder that it does not run."""
    return _Sizes(
        temporal_compression_ratio=vae.temporal_compression_ratio,
        spatial_compression_ratio=vae.spatial_compression_ratio,
        config=vae.config,
        dtype=None,
    )
