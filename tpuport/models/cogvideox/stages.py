"""The three stages of CogVideoX as pure functions, and the same in plain upstream code.

Legend: B videos of a batch, R rows of the model (2B with guidance, else B), Lt text
tokens, E text width, T/Y/X latent frames, rows, columns, C latent channels, F frames.

Latents are [B, T, C, Y, X] in the files and in the sampler, as in the diffusers
pipeline, and [B, C, T, Y, X] for the VAE. A 1.5 checkpoint pads T to a multiple of
``patch_size_t``; the file holds the padded latents, as upstream's
``output_type="latent"`` returns them, and decode cuts the padding off the front.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.enums import Task, Tiling
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.layers.tiles import in_words
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.run.model_stages import (
    FLOATS,
    FRAMES,
    Step,
    by_name,
    chunk_work,
    frame_programs,
    initial_latents_spec,
    rows_by_name,
    text_specs,
    texts_of,
    tile_work,
)
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work, finite_or_error
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.models.cogvideox import (
    conditioning,
    rotary,
    scheduler,
    upstream,
    vae_tiles,
)
from tpuport.models.cogvideox.inputs import (
    chunk_lengths,
    draw_noise,
    initial_latents,
    latent_shape,
    latents_for_vae,
    require_tokenizer,
    tokenize,
)

#: What a 1.5 image-to-video transformer takes as ``ofs``; fixed in upstream's pipeline.
OFFSET = 2.0


# ---------------------------------------------------------------------- encode


def _encode_program(
    model: BoundModule, carry: None, constants: None, inputs: Mapping[str, Any]
) -> tuple[None, Any]:
    """ids [R, Lt] -> embeddings [R, Lt, E] in the weights' dtype."""
    weights_dtype = model.weights["shared.weight"].dtype
    return None, model(inputs["input_ids"])[0].astype(weights_dtype)


def plan_encode(ctx: StageContext) -> Work:
    """Encode the prompts of a batch, with the negative prompts when guided.

    After them the image or the video that the run starts from, chunk by chunk.
    """
    prompts = texts_of(ctx, ctx.request.guided)
    chunks = 0
    if ctx.request.task in conditioning.SOURCES:
        frames = conditioning.pixels(ctx).shape[1]
        chunks = len(chunk_lengths(frames, conditioning.FRAMES_PER_CHUNK))

    def calls() -> Iterator[Call]:
        yield Call("encode", {"input_ids": tokenize(ctx, prompts)})
        if chunks:
            yield from conditioning.encode_calls(ctx)

    def finish(carry: Any, outputs: list[Any]) -> dict[str, Any]:
        named = by_name(
            {"prompt_embeds": to_torch(outputs[0])},
            len(ctx.prompts),
            guided=ctx.request.guided,
        )
        if chunks:
            moments = torch.cat([to_torch(output) for output in outputs[1:]], dim=2)
            # Split in space, they come with phantom rows and columns.
            rows, columns = latent_shape(ctx.request, ctx.checkpoint)[-2:]
            moments = moments[..., :rows, :columns]
            named |= conditioning.source_latents(ctx, moments)
        return named

    return Work(
        carry=None, constants=None, calls=calls(), total=1 + chunks, finish=finish
    )


# --------------------------------------------------------------------- denoise


def _denoise_step(
    model: BoundModule,
    carry: Mapping[str, Any],
    constants: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step: the transformer on both prompts at once, guidance, the sampler.

    Latents and the sampler's state are float32 whatever the weights' dtype.
    """
    latents = carry["latents"]
    embeds = constants["embeds"]
    dtype = model.weights["proj_out.weight"].dtype
    guided = embeds.shape[0] != latents.shape[0]
    rows = latents.astype(dtype)
    if "image_latents" in constants:
        rows = jnp.concatenate([rows, constants["image_latents"].astype(dtype)], axis=2)
    rows = jnp.concatenate([rows] * 2) if guided else rows
    rows = model.constrain(rows, "dp")
    embeds = model.constrain(embeds.astype(dtype), "dp")
    timestep = jnp.broadcast_to(inputs["timestep"], (rows.shape[0],))
    positions = constants["positions"]
    extra: dict[str, Any] = {}
    if "cos" in positions:
        extra["image_rotary_emb"] = (positions["cos"], positions["sin"])
    if "sincos" in positions:
        config = model.ported.module.config
        frames = (rows.shape[1] - 1) * config.temporal_compression_ratio + 1
        extra["weight_overrides"] = {"patch_embed.pos_embedding": positions["sincos"]}
        extra["attributes"] = {
            "patch_embed.sample_height": rows.shape[3],
            "patch_embed.sample_width": rows.shape[4],
            "patch_embed.sample_frames": frames,
        }
    if "ofs" in constants:
        extra["ofs"] = constants["ofs"]
    prediction = model(
        hidden_states=model.row_major(rows),
        encoder_hidden_states=embeds,
        timestep=timestep,
        return_dict=False,
        **extra,
    )[0]
    # Whole everywhere: halves that lie apart would be selected by index.
    prediction = model.row_major(model.constrain(prediction)).astype(jnp.float32)
    if guided:
        uncond, text = jnp.split(prediction, 2)
        prediction = uncond + inputs["guidance"] * (text - uncond)
    a, b, c, d, e, f = (inputs["coefficients"][i] for i in range(6))
    x0 = a * latents + b * prediction
    latents = c * latents + d * x0
    carried = {"latents": latents}
    if "previous" in carry:
        carried["latents"] = latents + e * carry["previous"] + f * inputs["noise"]
        carried["previous"] = x0
    return carried, {"finite": jnp.isfinite(carried["latents"]).all()}


def plan_denoise(ctx: StageContext) -> Work:
    """The denoising loop of a batch: one call a step."""
    request = ctx.request
    # With upstream's defaults for what the file leaves out.
    config = ctx.module("transformer").config
    sampler = scheduler.make_scheduler(ctx.checkpoint, request.options["scheduler"])
    schedule = scheduler.request_schedule(request, ctx.checkpoint)
    generators = ctx.generators()
    source = conditioning.given_latents(ctx)
    if source is not None:
        conditioning.posterior_draws(ctx, generators, source.dtype)
    latents = initial_latents(ctx, generators).float()
    if source is not None and request.task == Task.VIDEO:
        first = int(schedule.timesteps[0])
        latents = conditioning.noised(source, latents, sampler, first)
    latents = latents * schedule.initial_scale
    embeds = rows_by_name(ctx, "prompt_embeds", guided=request.guided)
    scales = scheduler.guidance_scales(
        schedule.timesteps,
        request.guidance_scale,
        dynamic=request.options["dynamic_cfg"],
    )

    def calls() -> Iterator[Call]:
        for index, timestep in enumerate(schedule.timesteps):
            inputs: dict[str, Any] = {
                "timestep": timestep,
                "coefficients": schedule.coefficients[index],
                "guidance": scales[index],
            }
            # Upstream draws once or twice a step and uses the last draw; the draws
            # that do not count still move the generator on.
            for _ in range(schedule.noise_draws[index]):
                inputs["noise"] = draw_noise(ctx, generators).float()
            yield Call("step", inputs)

    def finish(carry: Mapping[str, Any], outputs: list[Any]) -> dict[str, Any]:
        return {"latents": to_torch(carry["latents"])}

    carry = {"latents": latents}
    if schedule.stochastic:
        carry["previous"] = torch.zeros_like(latents)
    constants = {"embeds": embeds, "positions": _positions(ctx, config)}
    if source is not None and request.task == Task.IMAGE:
        constants["image_latents"] = source
    if config.get("ofs_embed_dim") is not None:
        constants["ofs"] = torch.tensor([OFFSET])
    return Work(
        carry=carry,
        constants=constants,
        calls=calls(),
        total=len(schedule.timesteps),
        finish=finish,
        watch=finite_or_error(len(schedule.timesteps), ctx.dtype),
    )


def _positions(ctx: StageContext, config: Mapping[str, Any]) -> dict[str, Any]:
    """Position tables for this size: rotary (cos, sin) [L, D] and sin-cos [1, L, E].

    Learned positions are weights; upstream uses them for the frame count that they were
    trained for, and computes sin-cos ones for any other.
    """
    _, frames, _, rows, columns = latent_shape(ctx.request, ctx.checkpoint)
    tables: dict[str, Any] = {}
    if config.get("use_rotary_positional_embeddings"):
        cos, sin = rotary.tables(config, rows, columns, frames)
        tables |= {"cos": cos, "sin": sin}
    embed = ctx.module("transformer").patch_embed
    frames = (frames - 1) * embed.temporal_compression_ratio + 1
    learned = embed.use_learned_positional_embeddings
    if embed.use_positional_embeddings or (learned and frames != embed.sample_frames):
        tables["sincos"] = embed._get_positional_embeddings(rows, columns, frames)
    return tables


# ---------------------------------------------------------------------- decode


def _decode(
    model: BoundModule, carry: Any, constants: None, inputs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Latents [B, C, T, Y, X] of a chunk -> video [B, 3, F, H, W] of about [-1, 1].

    Unclipped, in the weights' dtype. The carry is the decoder's convolution cache: the
    last frames of each causal convolution's input in the chunk before.
    """
    z = inputs["latents"].astype(model.weights["decoder.conv_in.conv.weight"].dtype)
    if model.ported.module.post_quant_conv is not None:
        z = model(z, method="post_quant_conv")
    video, cache = model(z, conv_cache=carry, method="decoder")
    return cache, video


def decode_programs(decode: Step, cache: str) -> dict[str, Program]:
    """For first chunks and all others: frames, or the floats of a tile.

    Args:
        decode: as the function of this module, of any implementation.
        cache: the dims of the arrays that go from chunk to chunk.
    """
    tile = SpatialLayout(inputs={"latents": "BCTYX"}, carry=cache, output="BCFYX")
    return {
        **frame_programs(("first", "next"), decode, replace(tile, output=FRAMES)),
        "first tile": Program(component="vae", fn=decode, space=tile),
        "next tile": Program(component="vae", fn=decode, space=tile),
    }


def _tiles(ctx: StageContext) -> str:
    vae = ctx.module("vae")
    rows, columns = latent_shape(ctx.request, ctx.checkpoint)[3:]
    return in_words(*vae_tiles.decode_axes(vae, rows, columns))


def plan_decode(ctx: StageContext) -> Work:
    """Decode chunk by chunk; one program for the first chunk, one for the others.

    In tiles where that was chosen and upstream would: see
    :mod:`tpuport.models.cogvideox.vae_tiles`.
    """
    z = latents_for_vae(ctx)
    lengths = chunk_lengths(z.shape[2], vae_tiles.FRAMES_PER_CHUNK)
    vae = ctx.module("vae")
    axes = vae_tiles.decode_axes(vae, *z.shape[3:])
    if ctx.vae_tiling == Tiling.ON and in_words(*axes):
        ratio = int(vae.config.temporal_compression_ratio)
        made = functools.partial(vae_tiles.frames_of_chunk, ratio)
        plans = vae_tiles.chunk_plans(axes, lengths, made)
        return tile_work(z, plans, ctx.pixels, ("first tile", "next tile"))
    size = (ctx.request.height, ctx.request.width)
    return chunk_work(z, lengths, size, ctx.pixels)


# ------------------------------------------------------------------------ table


def _encoders(request: Request) -> tuple[str, ...]:
    """The components that encode needs: the VAE only for an image or a video."""
    return ("text_encoder", "vae") if request.sources else ("text_encoder",)


def _guided_rows(request: Request) -> int:
    return request.batch_size * (2 if request.guided else 1)


_LATENTS = ("frames", "channels", "rows", "columns")

STAGES: tuple[Stage, ...] = (
    Stage(
        name="encode",
        unit="call",
        components=("text_encoder", "vae"),
        needs=_encoders,
        loads={"vae": (r"encoder\..*", r"quant_conv\..*")},
        files=("tokenizer",),
        require=require_tokenizer,
        programs={
            "encode": Program(component="text_encoder", fn=_encode_program),
            "first": conditioning.ENCODE_CHUNK,
            "next": conditioning.ENCODE_CHUNK,
        },
        plan=plan_encode,
        upstream=upstream.encode,
        writes=(
            *text_specs(
                {"prompt_embeds": ("text_tokens", "text_embed_dim")},
                "only when guidance is on",
            ),
            initial_latents_spec(*_LATENTS),
            *(
                TensorSpec(
                    name=name,
                    shape=("videos", *_LATENTS),
                    dtypes=FLOATS,
                    optional=True,
                    note=f"of the {kind} that the run starts from, sampled and scaled",
                )
                for kind, name in conditioning.SOURCES.values()
            ),
        ),
    ),
    Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        files=("scheduler",),
        programs={"step": Program(component="transformer", fn=_denoise_step)},
        plan=plan_denoise,
        upstream=upstream.denoise,
        writes=(
            TensorSpec(
                name="latents",
                shape=("videos", *_LATENTS),
                dtypes=("float32",),
                note="padding frames of patch_size_t included, unscaled",
            ),
        ),
        batch_rows=_guided_rows,
    ),
    Stage(
        name="decode",
        unit="chunk",
        components=("vae",),
        loads={"vae": (r"decoder\..*", r"post_quant_conv\..*")},
        programs=decode_programs(_decode, "BCTYX"),
        tiles=_tiles,
        plan=plan_decode,
        upstream=upstream.decode,
        writes=(),
    ),
)
