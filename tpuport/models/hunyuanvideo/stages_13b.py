"""The three stages of the original HunyuanVideo (13B) as pure functions.

Legend: B videos of a batch, R rows of the model (2B with true guidance, else B), Lt
text tokens, E width, C latent channels, T/Y/X latent frames, rows, columns, F frames.

The guidance scale is an input of the transformer; a second prediction with the negative
prompt is made only for a ``true_cfg_scale`` above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.layers.flow_match import FlowSchedule
from tpuport.core.run.model_stages import (
    by_name,
    rows_by_name,
    text_specs,
    texts_of,
)
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import common, encoders, inputs, upstream
from tpuport.models.hunyuanvideo.common import encoder_program
from tpuport.models.hunyuanvideo.config import guided_13b
from tpuport.models.hunyuanvideo.vae import decode_tile_13b

#: Lengths that text is cut to; a prompt beyond the last keeps all of its padding.
TEXT_BUCKETS = (32, 64, 128, 192)


# ---------------------------------------------------------------------- encode


def plan_encode(ctx: StageContext) -> Work:
    """Encode the prompts of a batch, with the negative ones for true guidance."""
    guided = guided_13b(ctx.request)
    texts = texts_of(ctx, guided)
    llama = inputs.load_tokenizer(ctx.checkpoint, "tokenizer", "LlamaTokenizerFast")
    clip = inputs.load_tokenizer(ctx.checkpoint, "tokenizer_2", "CLIPTokenizer")
    ids, mask = inputs.llama_ids(llama, texts, say=ctx.say)
    pooled_ids = inputs.clip_ids(clip, texts, ctx.say)
    start = inputs.llama_crop()

    def finish(carry: None, outputs: list[Any]) -> dict[str, Any]:
        tensors = {
            "prompt_embeds": to_torch(outputs[0])[:, start:],
            "prompt_attention_mask": mask[:, start:],
            "pooled_prompt_embeds": to_torch(outputs[1]),
        }
        return by_name(tensors, len(ctx.prompts), guided=guided)

    return Work(
        carry=None,
        constants=None,
        calls=[
            Call("text", {"input_ids": ids, "mask": mask}),
            Call("pooled", {"input_ids": pooled_ids}),
        ],
        total=2,
        finish=finish,
    )


# --------------------------------------------------------------------- denoise


def _denoise_step(
    model: BoundModule,
    carry: Mapping[str, Any],
    constants: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step: the transformer, true guidance if asked for, the sampler.

    Latents are float32 whatever the weights' dtype.
    """
    latents = carry["latents"]
    text = constants["text"]
    dtype = model.weights["proj_out.weight"].dtype
    guided = text.shape[0] != latents.shape[0]
    rows = jnp.concatenate([latents] * 2) if guided else latents
    rows = model.constrain(rows.astype(dtype), "dp")
    count = rows.shape[0]
    extra: dict[str, Any] = {}
    if "embedded_guidance" in given:
        # Upstream rounds the scale to the weights' dtype and then multiplies.
        scale = given["embedded_guidance"].astype(dtype) * 1000
        extra["guidance"] = jnp.full((count,), scale, dtype)
    prediction = model(
        hidden_states=model.row_major(rows),
        # Upstream's latents, and with them its timesteps, are float32 here.
        timestep=jnp.full((count,), given["timestep"], jnp.float32),
        encoder_hidden_states=model.constrain(text.astype(dtype), "dp"),
        encoder_attention_mask=model.constrain(constants["text_mask"], "dp"),
        pooled_projections=model.constrain(constants["pooled"].astype(dtype), "dp"),
        image_rotary_emb=(constants["cos"], constants["sin"]),
        return_dict=False,
        **extra,
    )[0]
    prediction = model.row_major(prediction).astype(jnp.float32)
    guidance = given.get("true_guidance")
    return common.euler_step(latents, prediction, given["delta"], guidance)


def plan_denoise(ctx: StageContext) -> Work:
    """The denoising loop of a batch: one call a step."""
    request = ctx.request
    guided = guided_13b(request)
    text, text_mask = common.trimmed(
        ctx, "prompt_embeds", "prompt_attention_mask", TEXT_BUCKETS, guided=guided
    )
    constants = {
        "text": text,
        "text_mask": text_mask,
        "pooled": rows_by_name(ctx, "pooled_prompt_embeds", guided=guided),
    }
    embedded = ctx.checkpoint.config("transformer").get("guidance_embeds", True)

    def step(schedule: FlowSchedule, index: int) -> dict[str, Any]:
        given = {}
        if embedded:
            given["embedded_guidance"] = np.float32(request.guidance_scale)
        if guided:
            given["true_guidance"] = np.float32(request.options["true_cfg_scale"])
        return given

    # Float32 whatever the weights are, as upstream's pipeline draws it.
    shape = latent_shape(request, ctx.checkpoint)
    return common.euler_work(ctx, shape, torch.float32, constants, step)


def latent_shape(request: Request, checkpoint: Checkpoint) -> tuple[int, ...]:
    """[B, C, T, Y, X] of a batch."""
    channels = int(checkpoint.config("transformer").get("in_channels", 16))
    return common.latent_shape(request, checkpoint, channels, 8)


# ------------------------------------------------------------------------ table


def _guided_rows(request: Request) -> int:
    return request.batch_size * (2 if guided_13b(request) else 1)


_TEXT = {
    "prompt_embeds": ("text_tokens", "text_embed_dim"),
    "prompt_attention_mask": ("text_tokens",),
    "pooled_prompt_embeds": ("pooled_projection_dim",),
}

STAGES: tuple[Stage, ...] = (
    Stage(
        name="encode",
        unit="encoder",
        components=("text_encoder", "text_encoder_2"),
        files=("tokenizer", "tokenizer_2"),
        require=inputs.require_tokenizers_13b,
        programs={
            "text": encoder_program(
                "text_encoder", encoders.language_states, "input_ids", "mask"
            ),
            "pooled": encoder_program(
                "text_encoder_2", encoders.clip_pooled, "input_ids"
            ),
        },
        plan=plan_encode,
        upstream=upstream.encode_13b,
        writes=(
            *text_specs(_TEXT, "only for a true_cfg_scale above 1"),
            common.INITIAL_LATENTS,
        ),
    ),
    common.denoise_stage(
        _denoise_step,
        ("scheduler",),
        plan=plan_denoise,
        upstream=upstream.denoise_13b,
        batch_rows=_guided_rows,
    ),
    common.decode_stage(decode_tile_13b, upstream.decode),
)
