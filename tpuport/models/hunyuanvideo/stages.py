"""The three stages of HunyuanVideo-1.5 as pure functions.

Legend: B videos of a batch, R rows of the model (2B with guidance, else B), Lt text, Lg
glyph and Li image tokens, E width, C latent channels, T/Y/X latent frames, rows,
columns, F frames.

Latents are [B, C, T, Y, X] everywhere, as in the diffusers pipelines. Embeddings are
stored with all their padding and trimmed when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.enums import Task
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.layers.flow_match import FlowSchedule
from tpuport.core.run.model_stages import FLOATS, by_name, text_specs, texts_of
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import common, encoders, inputs, upstream
from tpuport.models.hunyuanvideo.common import encoder_program, trimmed
from tpuport.models.hunyuanvideo.vae import (
    ENCODE_15,
    decode_chunk_15,
    decode_tile_15,
    encode_mode_15,
)

#: Lengths that text is cut to; a prompt beyond the last keeps all of its padding.
TEXT_BUCKETS = (64, 128, 192, 256, 384, 512, 768)
GLYPH_BUCKETS = (0, 32, 64, 128)


# ---------------------------------------------------------------------- encode


def _image_latents(model: BoundModule, pixels: jax.Array) -> jax.Array:
    """pixels [B, 3, 1, Y, X] in [-1, 1] -> scaled latents [B, C, 1, Y, X]."""
    scaling = model.ported.module.config.scaling_factor
    return encode_mode_15(model, pixels) * scaling


def plan_encode(ctx: StageContext) -> Work:
    """Encode the prompts of a batch, with the negative ones when guided, and images."""
    texts = texts_of(ctx, ctx.request.guided)
    chat = inputs.load_tokenizer(ctx.checkpoint, "tokenizer", "Qwen2Tokenizer")
    ids, mask = inputs.chat_ids(chat, texts, ctx.say)
    calls = [Call("text", {"input_ids": ids, "mask": mask})]
    quoted = inputs.load_tokenizer(ctx.checkpoint, "tokenizer_2", "ByT5Tokenizer")
    glyph_ids, glyph_mask, has_glyphs = inputs.glyph_ids(quoted, texts, ctx.say)
    if bool(has_glyphs.any()):
        calls.append(Call("glyphs", {"input_ids": glyph_ids, "mask": glyph_mask}))
    if ctx.request.task == Task.IMAGE:
        pictures = inputs.fitted_images(ctx)
        extractor = inputs.load_feature_extractor(ctx.checkpoint)
        pixels = inputs.image_pixels(extractor, pictures)
        calls.append(Call("image", {"pixel_values": pixels}))
        calls.append(Call("condition", {"pixels": inputs.condition_pixels(pictures)}))
    start = inputs.chat_template().crop_start

    def finish(carry: None, outputs: list[Any]) -> dict[str, Any]:
        made = {c.program: to_torch(o) for c, o in zip(calls, outputs, strict=True)}
        width = int(ctx.checkpoint.config("text_encoder_2").get("d_model", 512))
        drawn = torch.zeros(*glyph_ids.shape, width)
        if "glyphs" in made:
            # A row without text to draw is zeros, as upstream has it.
            drawn = torch.where(has_glyphs[:, None, None], made["glyphs"], drawn)
        tensors = {
            "prompt_embeds": made["text"][:, start:],
            "prompt_embeds_mask": mask[:, start:],
            "prompt_embeds_2": drawn.float(),
            "prompt_embeds_mask_2": glyph_mask,
        }
        count = len(ctx.prompts)
        named = by_name(tensors, count, guided=ctx.request.guided)
        if "condition" in made:
            # Split in space, they come with phantom rows and columns.
            rows, columns = latent_shape(ctx.request, ctx.checkpoint)[-2:]
            made["condition"] = made["condition"][..., :rows, :columns]
        for program, name in (
            ("image", "image_embeds"),
            ("condition", "image_latents"),
        ):
            if program in made:
                found = made[program]
                named[name] = found.expand(count, *found.shape[1:]).contiguous()
        return named

    return Work(
        carry=None, constants=None, calls=calls, total=len(calls), finish=finish
    )


def encode_needs(request: Request) -> tuple[str, ...]:
    """The text encoders, and for image to video what looks at the image."""
    texts = ("text_encoder", "text_encoder_2")
    return (*texts, "image_encoder", "vae") if request.task == Task.IMAGE else texts


# --------------------------------------------------------------------- denoise


def _denoise_step(
    model: BoundModule,
    carry: Mapping[str, Any],
    constants: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step: the transformer on both prompts at once, guidance, the sampler.

    Latents are float32 whatever the weights' dtype.
    """
    latents = carry["latents"]
    text = constants["text"]
    dtype = model.weights["proj_out.weight"].dtype
    guided = text.shape[0] != latents.shape[0]
    # The channels after the latents: the image's latents, and 1 where they are given.
    batch, channels, *grid = latents.shape
    condition = jnp.zeros((batch, channels + 1, *grid), latents.dtype)
    if "image_latents" in constants:
        image = constants["image_latents"].astype(latents.dtype)
        first = jnp.concatenate([image, jnp.ones_like(image[:, :1])], axis=1)
        condition = jnp.concatenate([first, condition[:, :, 1:]], axis=2)
    rows = jnp.concatenate([latents, condition], axis=1).astype(dtype)
    if guided:
        rows = jnp.concatenate([rows] * 2)
    rows = model.constrain(rows, "dp")
    count = rows.shape[0]
    extra: dict[str, Any] = {}
    if "next_timestep" in given:
        extra["timestep_r"] = jnp.full((count,), given["next_timestep"], dtype)
    image_tokens = constants.get("image_embeds")
    if image_tokens is not None:
        image_tokens = image_tokens.astype(dtype)
        if guided:
            image_tokens = jnp.concatenate([image_tokens] * 2)
        image_tokens = model.constrain(image_tokens, "dp")
    prediction = model(
        hidden_states=model.row_major(rows),
        timestep=jnp.full((count,), given["timestep"], dtype),
        encoder_hidden_states=model.constrain(text.astype(dtype), "dp"),
        encoder_attention_mask=model.constrain(constants["text_mask"], "dp"),
        encoder_hidden_states_2=model.constrain(
            constants["glyphs"].astype(dtype), "dp"
        ),
        encoder_attention_mask_2=model.constrain(constants["glyph_mask"], "dp"),
        image_embeds=image_tokens,
        image_rotary_emb=(constants["cos"], constants["sin"]),
        return_dict=False,
        **extra,
    )[0]
    # Whole everywhere: halves that lie apart would be selected by index.
    prediction = model.row_major(model.constrain(prediction)).astype(jnp.float32)
    return common.euler_step(latents, prediction, given["delta"], given["guidance"])


def plan_denoise(ctx: StageContext) -> Work:
    """The denoising loop of a batch: one call a step."""
    request = ctx.request
    guided = request.guided
    text, text_mask = trimmed(
        ctx, "prompt_embeds", "prompt_embeds_mask", TEXT_BUCKETS, guided=guided
    )
    glyphs, glyph_mask = trimmed(
        ctx, "prompt_embeds_2", "prompt_embeds_mask_2", GLYPH_BUCKETS, guided=guided
    )
    constants = {
        "text": text,
        "text_mask": text_mask,
        "glyphs": glyphs,
        "glyph_mask": glyph_mask,
    }
    for name in ("image_embeds", "image_latents"):
        if name in ctx.inputs:
            constants[name] = ctx.inputs[name]
    meanflow = bool(ctx.checkpoint.config("transformer").get("use_meanflow"))

    def step(schedule: FlowSchedule, index: int) -> dict[str, Any]:
        given: dict[str, Any] = {"guidance": np.float32(request.guidance_scale)}
        if meanflow and request.task == Task.IMAGE:
            # Upstream's text-to-video pipeline has no second time.
            given["next_timestep"] = schedule.next_timesteps[index]
        return given

    shape = latent_shape(request, ctx.checkpoint)
    return common.euler_work(
        ctx, shape, ctx.inputs["prompt_embeds"].dtype, constants, step
    )


def latent_shape(request: Request, checkpoint: Checkpoint) -> tuple[int, ...]:
    """[B, C, T, Y, X] of a batch."""
    channels = int(checkpoint.config("vae").get("latent_channels", 32))
    return common.latent_shape(request, checkpoint, channels, 16)


# ------------------------------------------------------------------------ table


def _guided_rows(request: Request) -> int:
    return request.batch_size * (2 if request.guided else 1)


_TEXT = {
    "prompt_embeds": ("text_tokens", "text_embed_dim"),
    "prompt_embeds_mask": ("text_tokens",),
    "prompt_embeds_2": ("glyph_tokens", "text_embed_2_dim"),
    "prompt_embeds_mask_2": ("glyph_tokens",),
}

STAGES: tuple[Stage, ...] = (
    Stage(
        name="encode",
        unit="encoder",
        components=("text_encoder", "text_encoder_2", "image_encoder", "vae"),
        files=("tokenizer", "tokenizer_2", "feature_extractor"),
        require=inputs.require_tokenizers_15,
        needs=encode_needs,
        loads={"vae": common.ENCODER},
        programs={
            "text": encoder_program(
                "text_encoder", encoders.language_states, "input_ids", "mask"
            ),
            "glyphs": encoder_program(
                "text_encoder_2", encoders.byt5_states, "input_ids", "mask"
            ),
            "image": encoder_program(
                "image_encoder", encoders.siglip_states, "pixel_values"
            ),
            "condition": replace(
                encoder_program("vae", _image_latents, "pixels"), space=ENCODE_15
            ),
        },
        plan=plan_encode,
        upstream=upstream.encode_15,
        writes=(
            *text_specs(_TEXT, "only when guidance is on"),
            TensorSpec(
                name="image_embeds",
                shape=("videos", "image_tokens", "image_embed_dim"),
                dtypes=FLOATS,
                optional=True,
                note="image to video only",
            ),
            TensorSpec(
                name="image_latents",
                shape=("videos", "channels", 1, "rows", "columns"),
                dtypes=FLOATS,
                optional=True,
                note="of the first frame, scaled; image to video only",
            ),
            common.INITIAL_LATENTS,
        ),
    ),
    common.denoise_stage(
        _denoise_step,
        ("scheduler", "guider"),
        plan=plan_denoise,
        upstream=upstream.denoise_15,
        batch_rows=_guided_rows,
    ),
    common.decode_stage(decode_tile_15, upstream.decode, decode_chunk_15),
)
