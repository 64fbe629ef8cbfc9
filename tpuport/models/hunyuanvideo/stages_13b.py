"""The three stages of the original HunyuanVideo (13B) as pure functions.

Legend: B videos of a batch, R rows of the model (2B with true guidance, else B), Lt
text tokens, E width, C latent channels, T/Y/X latent frames, rows, columns, F frames.

The guidance scale is an input of the transformer; a second prediction with the negative
prompt is made only for a ``true_cfg_scale`` above 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.layers.text_trimming import trim
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import (
    common,
    encoders,
    inputs,
    rotary,
    scheduler,
    upstream,
)
from tpuport.models.hunyuanvideo.common import (
    INITIAL_LATENTS,
    by_name,
    decode_stage,
    denoise_stage,
    euler_work,
    rows_by_name,
    rows_of,
    text_specs,
)
from tpuport.models.hunyuanvideo.config import guided_13b
from tpuport.models.hunyuanvideo.vae import decode_tile_13b

#: Lengths that text is cut to; a prompt beyond the last keeps all of its padding.
TEXT_BUCKETS = (32, 64, 128, 192)


# ---------------------------------------------------------------------- encode


def _text(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
    """ids, mask [R, L] -> states [R, L, E]."""
    return None, encoders.llama_states(model, given["input_ids"], given["mask"])


def _pooled(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
    """ids [R, 77] -> pooled [R, E]."""
    return None, encoders.clip_pooled(model, given["input_ids"])


def plan_encode(ctx: StageContext) -> Work:
    """Encode the prompts of a batch, with the negative ones for true guidance."""
    guided = guided_13b(ctx.request)
    texts = rows_of(ctx, guided)
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
    if guided:
        uncond, cond = jnp.split(prediction, 2)
        prediction = uncond + given["true_guidance"] * (cond - uncond)
    latents = latents + given["delta"] * prediction
    return {"latents": latents}, {"finite": jnp.isfinite(latents).all()}


def plan_denoise(ctx: StageContext) -> Work:
    """The denoising loop of a batch: one call a step."""
    request = ctx.request
    config = ctx.checkpoint.config("transformer")
    schedule = scheduler.request_schedule(ctx.request, ctx.checkpoint)
    latents = ctx.inputs.get("initial_latents")
    if latents is None:
        # Float32 whatever the weights are, as upstream's pipeline draws it.
        latents = ctx.noise(latent_shape(request, ctx.checkpoint), torch.float32)
    guided = guided_13b(request)

    def rows(name: str) -> torch.Tensor:
        return rows_by_name(ctx, name, guided=guided)

    text, text_mask = trim(
        rows("prompt_embeds"), rows("prompt_attention_mask"), TEXT_BUCKETS
    )
    cos, sin = rotary.tables(ctx.rotary, config, tuple(latents.shape[2:]))
    constants = {
        "text": text,
        "text_mask": text_mask,
        "pooled": rows("pooled_prompt_embeds"),
        "cos": cos,
        "sin": sin,
    }

    def given() -> Iterator[dict[str, Any]]:
        for index, timestep in enumerate(schedule.timesteps):
            step: dict[str, Any] = {
                "timestep": timestep,
                "delta": schedule.deltas[index],
            }
            if config.get("guidance_embeds", True):
                step["embedded_guidance"] = np.float32(request.guidance_scale)
            if guided:
                step["true_guidance"] = np.float32(request.options["true_cfg_scale"])
            yield step

    return euler_work(ctx, latents, constants, given())


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
            "text": Program(component="text_encoder", fn=_text),
            "pooled": Program(component="text_encoder_2", fn=_pooled),
        },
        plan=plan_encode,
        upstream=upstream.encode_13b,
        writes=(
            *text_specs(_TEXT, "only for a true_cfg_scale above 1"),
            INITIAL_LATENTS,
        ),
    ),
    denoise_stage(
        _denoise_step,
        ("scheduler",),
        plan=plan_denoise,
        upstream=upstream.denoise_13b,
        batch_rows=_guided_rows,
    ),
    decode_stage(decode_tile_13b, upstream.decode),
)
