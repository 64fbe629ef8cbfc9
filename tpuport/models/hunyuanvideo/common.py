"""What the stages of both HunyuanVideo forms share.

Legend: B videos of a batch, C latent channels, T/Y/X latent frames, rows, columns, F
frames, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tpuport.core.arrays import to_torch
from tpuport.core.enums import Tiling
from tpuport.core.files.frames import PIXELS, as_frames, encode_pixels
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.layers.tiled_frames import JoinedFrames
from tpuport.core.layers.tiles import TilePlan, in_words
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work, finite_or_error
from tpuport.core.tracing.chunk_state import chunk_lengths
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import tiles_in_time, vae

#: The weights of an autoencoder that each half needs.
ENCODER = (r"encoder\..*", r"quant_conv\..*")
DECODER = (r"decoder\..*", r"post_quant_conv\..*")

#: Latent frames of 1.5 that are decoded at a time, where the video is not tiled. An
#: activation at the size of the pixels is that of 8 frames; every chunk more gathers
#: the keys and values of the whole video once more.
FRAMES_PER_CHUNK = 2

FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of embeddings and of given noise."""
MASKS = ("int64", "int32", "bool", *FLOATS)
"""Dtypes of masks: upstream's pipelines cast them to the model's."""

_LATENT_DIMS = ("videos", "channels", "frames", "rows", "columns")
INITIAL_LATENTS = TensorSpec(
    name="initial_latents",
    shape=_LATENT_DIMS,
    dtypes=FLOATS,
    optional=True,
    note="given by the user in place of the seed's noise",
)


def text_specs(
    shapes: Mapping[str, tuple[str, ...]], note: str
) -> tuple[TensorSpec, ...]:
    """What encode writes of the prompts, and of the negative prompts in front of it.

    Args:
        shapes: of each tensor without the videos; masks have ``mask`` in their names.
        note: when there are negative ones.
    """

    def spec(name: str, prefix: str, role: str) -> TensorSpec:
        return TensorSpec(
            name=prefix + name,
            shape=("videos", *shapes[name]),
            dtypes=MASKS if "mask" in name else FLOATS,
            optional=bool(prefix),
            role=role,
            note=note if prefix else "",
        )

    return (
        *(spec(name, "", "prompt") for name in shapes),
        *(spec(name, "negative_", "negative") for name in shapes),
    )


def by_name(
    tensors: Mapping[str, torch.Tensor], count: int, *, guided: bool
) -> dict[str, torch.Tensor]:
    """Rows of the model as tensors of ``count`` prompts and negative prompts."""
    named = {name: rows[-count:].contiguous() for name, rows in tensors.items()}
    if guided:
        for name, rows in tensors.items():
            named[f"negative_{name}"] = rows[:count].contiguous()
    return named


def rows_by_name(ctx: StageContext, name: str, *, guided: bool) -> torch.Tensor:
    """The inverse of :func:`by_name`: the negative prompts' rows first."""
    if not guided:
        return ctx.inputs[name]
    return torch.cat([ctx.inputs[f"negative_{name}"], ctx.inputs[name]])


def euler_work(
    ctx: StageContext,
    latents: torch.Tensor,
    constants: Mapping[str, Any],
    inputs: Iterable[Mapping[str, Any]],
) -> Work:
    """The denoising loop: one call of ``step`` for each of ``inputs``."""
    steps = ctx.request.num_inference_steps
    return Work(
        carry={"latents": latents.float()},
        constants=constants,
        calls=(Call("step", given) for given in inputs),
        total=steps,
        finish=lambda carry, outputs: {"latents": to_torch(carry["latents"])},
        watch=finite_or_error(steps),
    )


def denoise_stage(
    step: Callable[..., Any], files: tuple[str, ...], **functions: Any
) -> Stage:
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
                shape=_LATENT_DIMS,
                dtypes=("float32",),
                note="scaled, as the sampler leaves them",
            ),
        ),
        **functions,
    )


def decode_stage(
    decode_tile: Callable[[BoundModule, Any], Any],
    upstream: Callable[[StageContext], dict[str, Any]],
    decode_chunk: Callable[..., tuple[Any, Any]] | None = None,
) -> Stage:
    """The decode stage of a form: ``decode_tile`` on each tile of the latents.

    The program ``tile`` gives floats in the weights' dtype, which the host blends: of
    tiles in rows and columns. Latents that are one tile become frames by
    ``decode_chunk``, chunk by chunk, in the programs ``first`` and ``next``; without it
    all at once, in ``whole``, or in tiles in time that are blended on the device, in
    ``seam`` and ``tile``: see :mod:`tpuport.models.hunyuanvideo.tiles_in_time`. Of what
    gives frames there is one for floats and one for bytes, such as ``first uint8``.
    """

    def run(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
        return None, decode_tile(model, given["latents"])

    def whole(
        pixels: str, model: BoundModule, carry: None, constants: None, given: Any
    ) -> Any:
        return None, _pixels(model, decode_tile(model, given["latents"]), pixels)

    def chunk(
        pixels: str, model: BoundModule, carry: Any, constants: Any, given: Any
    ) -> Any:
        assert decode_chunk is not None
        total = constants["frames"].shape[0]
        carry, video = decode_chunk(
            model, carry, given["latents"], given["start"], total
        )
        return carry, _pixels(model, video, pixels)

    chunked = decode_chunk is not None

    def form(fn: Any, space: SpatialLayout) -> Program:
        return Program(component="vae", fn=fn, space=space)

    def by_pixels(place: str, fn: Any, space: SpatialLayout) -> dict[str, Program]:
        return {f"{place} {p}": form(partial(fn, p), space) for p in PIXELS}

    programs = {"tile": form(run, vae.TILE)}
    if chunked:
        for place in ("first", "next"):
            programs |= by_pixels(place, chunk, vae.CHUNK)
    else:
        programs |= by_pixels("whole", whole, vae.WHOLE)
        programs["seam"] = form(tiles_in_time.first_seam, tiles_in_time.SEAM)
        blended = partial(tiles_in_time.tile_frames, decode_tile)
        programs |= by_pixels("tile", blended, tiles_in_time.TILE)
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


def _pixels(model: BoundModule, video: Any, pixels: str) -> dict[str, Any]:
    """A video [B, 3, F, H, W] of about [-1, 1] as it leaves the device."""
    return encode_pixels(video.astype("float32") * 0.5 + 0.5, pixels, model.space)


def rows_of(ctx: StageContext, guided: bool) -> tuple[str, ...]:
    """The texts of a batch in the order of the model's rows: negative ones first."""
    return (*ctx.negative_prompts, *ctx.prompts) if guided else ctx.prompts


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


def tiled(ctx: StageContext) -> bool:
    """Whether this run decodes in tiles: ``auto`` was decided by then."""
    return ctx.vae_tiling == Tiling.ON


def _tiles(ctx: StageContext) -> str:
    """Of rows and columns; the tiles in time of 13b are no choice."""
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
    plan = vae.plan_decode(ctx.module("vae"), tuple(z.shape), tiled(ctx))
    if len(plan.tiles) == 1:
        return _untiled(ctx, z, plan, chunked=chunked)
    if tiles_in_time.is_in_time(plan):
        return tiles_in_time.in_time_work(z, plan, ctx.pixels)

    def calls() -> Iterator[Call]:
        for tile in plan.tiles:
            yield Call("tile", {"latents": tile.cut(z).contiguous()})

    joined = JoinedFrames(plan, ctx.pixels)
    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=len(plan.tiles),
        frames=lambda index, output: joined.add(without_phantoms(plan, index, output)),
    )


def without_phantoms(plan: TilePlan, index: int, output: np.ndarray) -> np.ndarray:
    """A tile [B, 3, F, H, W] less the rows and columns that let it divide."""
    places = plan.tiles[index].index[1:]
    rows, columns = (
        axis.spans[n].made for axis, n in zip(plan.axes[1:], places, strict=True)
    )
    return output[..., :rows, :columns]


def _untiled(
    ctx: StageContext, z: torch.Tensor, plan: TilePlan, *, chunked: bool
) -> Work:
    """Decode latents [B, C, T, Y, X] at once, or chunk by chunk."""
    total = z.shape[2]
    lengths = chunk_lengths(total, FRAMES_PER_CHUNK) if chunked else [total]
    _, rows, columns = plan.output

    def calls() -> Iterator[Call]:
        start = 0
        for index, length in enumerate(lengths):
            place = "whole" if not chunked else "next" if index else "first"
            given: dict[str, Any] = {
                "latents": z[:, :, start : start + length].contiguous()
            }
            if chunked:
                given["start"] = np.int32(start)
            yield Call(f"{place} {ctx.pixels}", given)
            start += length

    def frames(index: int, output: Mapping[str, Any]) -> np.ndarray:
        return as_frames(output["frames"], rows, columns)

    return Work(
        carry=None,
        # Its length is how many latent frames there are in all chunks.
        constants={"frames": np.arange(total, dtype=np.int32)} if chunked else None,
        calls=calls(),
        total=len(lengths),
        frames=frames,
    )
