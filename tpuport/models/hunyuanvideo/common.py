"""What the stages of both HunyuanVideo forms share.

Legend: B videos of a batch, C latent channels, T/Y/X latent frames, rows, columns, F
frames, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.enums import Tiling
from tpuport.core.files.frames import PIXELS
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.layers.flow_match import FlowSchedule
from tpuport.core.layers.text_trimming import trim
from tpuport.core.layers.tiles import in_words
from tpuport.core.run.model_stages import (
    Step,
    chunk_work,
    frame_programs,
    initial_latents_spec,
    rows_by_name,
    tile_work,
)
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work, finite_or_error
from tpuport.core.tracing.chunk_state import chunk_lengths
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import rotary, tiles_in_time, vae
from tpuport.models.hunyuanvideo.scheduler import request_schedule

#: The weights of an autoencoder that each half needs.
ENCODER = (r"encoder\..*", r"quant_conv\..*")
DECODER = (r"decoder\..*", r"post_quant_conv\..*")

#: Latent frames of 1.5 that are decoded at a time, where the video is not tiled. An
#: activation at the size of the pixels is that of 8 frames; every chunk more gathers
#: the keys and values of the whole video once more.
FRAMES_PER_CHUNK = 2

_LATENT_DIMS = ("channels", "frames", "rows", "columns")
INITIAL_LATENTS = initial_latents_spec(*_LATENT_DIMS)


def encoder_program(component: str, fn: Callable[..., Any], *inputs: str) -> Program:
    """A program that calls ``fn`` on a model and the inputs of these names."""

    def run(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
        return None, fn(model, *(given[name] for name in inputs))

    return Program(component=component, fn=run)


# --------------------------------------------------------------------- denoise


def trimmed(
    ctx: StageContext, name: str, mask: str, buckets: Sequence[int], *, guided: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's rows of embeddings and of their mask, without needless padding."""
    rows, masks = (rows_by_name(ctx, n, guided=guided) for n in (name, mask))
    return trim(rows, masks, buckets)


def euler_work(
    ctx: StageContext,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    constants: Mapping[str, Any],
    inputs: Callable[[FlowSchedule, int], dict[str, Any]],
) -> Work:
    """The denoising loop of a batch: one call of ``step`` a step.

    Args:
        shape, dtype: in which noise is drawn where none is given.
        constants: what all steps take besides the rotary tables.
        inputs: what a step of the schedule takes besides its time and size.
    """
    steps = ctx.request.num_inference_steps
    config = ctx.checkpoint.config("transformer")
    schedule = request_schedule(ctx.request, ctx.checkpoint)
    latents = ctx.inputs.get("initial_latents")
    if latents is None:
        latents = ctx.noise(shape, dtype)
    cos, sin = rotary.tables(config, latents.shape[2:])

    def call(index: int) -> Call:
        given = {
            "timestep": schedule.timesteps[index],
            "delta": schedule.deltas[index],
        }
        return Call("step", {**given, **inputs(schedule, index)})

    return Work(
        carry={"latents": latents.float()},
        constants={**constants, "cos": cos, "sin": sin},
        calls=map(call, range(steps)),
        total=steps,
        finish=lambda carry, outputs: {"latents": to_torch(carry["latents"])},
        watch=finite_or_error(steps, ctx.dtype),
    )


def euler_step(
    latents: Any, prediction: Any, delta: Any, guidance: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Carry and output of a step.

    Args:
        latents: [B, C, T, Y, X], float32.
        prediction: the same, or [2B, C, T, Y, X] with guidance.
        delta: size of the step.
        guidance: scale, where there are two predictions.
    """
    if prediction.shape[0] != latents.shape[0]:
        uncond, cond = jnp.split(prediction, 2)
        prediction = uncond + guidance * (cond - uncond)
    latents = latents + delta * prediction
    return {"latents": latents}, {"finite": jnp.isfinite(latents).all()}


def denoise_stage(step: Step, files: tuple[str, ...], **functions: Any) -> Stage:
    """The denoise stage of a form; ``functions`` are its plan, upstream, batch_rows."""
    return Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        files=files,
        programs={"step": Program(component="transformer", fn=step)},
        writes=(
            TensorSpec(
                name="latents",
                shape=("videos", *_LATENT_DIMS),
                dtypes=("float32",),
                note="scaled, as the sampler leaves them",
            ),
        ),
        **functions,
    )


# ---------------------------------------------------------------------- decode


def decode_stage(
    decode_tile: Callable[[BoundModule, Any], Any],
    upstream: Callable[[StageContext], dict[str, Any]],
    decode_chunk: Callable[..., tuple[Any, Any]] | None = None,
) -> Stage:
    """The decode stage of a form.

    The program ``tile`` gives a tile of rows and columns as floats in the weights'
    dtype, and the host blends them. Latents that are one tile become frames in the
    programs ``first`` and ``next``, chunk by chunk, where there is a ``decode_chunk``.
    Without one they become frames all at once in ``whole``, or in tiles in time that
    the device blends, in ``seam`` and ``tile``: see
    :mod:`tpuport.models.hunyuanvideo.tiles_in_time`. A program that gives frames is
    there for floats and for bytes, such as ``first uint8``.
    """

    def tile(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
        return None, decode_tile(model, given["latents"])

    programs = {"tile": Program(component="vae", fn=tile, space=vae.TILE)}
    if decode_chunk is not None:

        def chunk(model: BoundModule, carry: Any, constants: Any, given: Any) -> Any:
            total = constants["frames"].shape[0]
            return decode_chunk(model, carry, given["latents"], given["start"], total)

        programs |= frame_programs(("first", "next"), chunk, vae.CHUNK)
    else:
        programs |= frame_programs(("whole",), tile, vae.WHOLE)
        programs["seam"] = Program(
            component="vae", fn=tiles_in_time.first_seam, space=tiles_in_time.SEAM
        )
        programs |= {
            f"tile {pixels}": Program(
                component="vae",
                fn=partial(tiles_in_time.tile_frames, decode_tile, pixels),
                space=tiles_in_time.TILE,
            )
            for pixels in PIXELS
        }
    chunked = decode_chunk is not None
    return Stage(
        name="decode",
        unit="chunk" if chunked else "tile",
        components=("vae",),
        loads={"vae": DECODER},
        programs=programs,
        plan=partial(plan_frames, chunked=chunked),
        upstream=upstream,
        tiles=_tiles,
        writes=(),
    )


def latent_shape(
    request: Request, checkpoint: Checkpoint, channels: int, space: int
) -> tuple[int, ...]:
    """[B, C, T, Y, X] of a batch.

    Args:
        channels: C.
        space: pixels of a latent's side where the config of the VAE does not tell.
    """
    config = checkpoint.config("vae")
    space = int(config.get("spatial_compression_ratio", space))
    time = int(config.get("temporal_compression_ratio", 4))
    frames = (request.num_frames - 1) // time + 1
    sides = (request.height // space, request.width // space)
    return (request.batch_size, channels, frames, *sides)


def unscaled_latents(ctx: StageContext) -> torch.Tensor:
    """[B, C, T, Y, X] for the decoder."""
    scaling = float(ctx.module("vae").config["scaling_factor"])
    return ctx.inputs["latents"].float() / scaling


def _tiles(ctx: StageContext) -> str:
    """Tiles of rows and columns, in words; the tiles in time of 13b are no choice."""
    module: Any = ctx.module("vae")
    space = module.spatial_compression_ratio
    frames = (ctx.request.num_frames - 1) // module.temporal_compression_ratio + 1
    shape = (0, 0, frames, ctx.request.height // space, ctx.request.width // space)
    return in_words(*vae.plan_decode(module, shape, tiling=True).axes[1:])


def plan_frames(ctx: StageContext, *, chunked: bool) -> Work:
    """Decode tile by tile with upstream's tile sizes and blending, or without tiles.

    Args:
        chunked: whether latents that are one tile are decoded chunk by chunk.
    """
    z = unscaled_latents(ctx)
    tiling = ctx.vae_tiling == Tiling.ON
    plan = vae.plan_decode(ctx.module("vae"), tuple(z.shape), tiling)
    if tiles_in_time.is_in_time(plan):
        return tiles_in_time.in_time_work(z, plan, ctx.pixels)
    if len(plan.tiles) > 1:
        return tile_work(z, [plan], ctx.pixels)
    _, rows, columns = plan.output
    size = (rows, columns)
    if chunked:
        lengths = chunk_lengths(z.shape[2], FRAMES_PER_CHUNK)
        return chunk_work(z, lengths, size, ctx.pixels, counted=True)
    places = ("whole", "whole")
    return chunk_work(z, [z.shape[2]], size, ctx.pixels, places=places)
