"""What the stages of several models are made of: rows of text, and decode.

Legend: B videos of a batch, C latent channels, T/Y/X latent frames, rows, columns, F
frames, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tpuport.core.files.frames import PIXELS, as_frames, encode_pixels
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.layers.tiled_frames import JoinedFrames
from tpuport.core.layers.tiles import TilePlan
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.spec.stage import Program
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.tracing.ported_module import BoundModule

FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of embeddings and of given noise."""
MASKS = ("int64", "int32", "bool", *FLOATS)
"""Dtypes of masks: upstream's pipelines cast them to the model's."""

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""A program's function: (model, carry, constants, inputs) -> (carry, output)."""

# ------------------------------------------------------------------------- text


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


def initial_latents_spec(*dims: str) -> TensorSpec:
    """Noise in a file; ``dims`` are its dims after the videos."""
    return TensorSpec(
        name="initial_latents",
        shape=("videos", *dims),
        dtypes=FLOATS,
        optional=True,
        note="given by the user in place of the seed's noise",
    )


def texts_of(ctx: StageContext, guided: bool) -> tuple[str, ...]:
    """The texts of a batch in the order of the model's rows: negative ones first."""
    return (*ctx.negative_prompts, *ctx.prompts) if guided else ctx.prompts


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


# ----------------------------------------------------------------------- decode


def frame_programs(
    places: Sequence[str], decode: Step, space: SpatialLayout
) -> dict[str, Program]:
    """Programs such as ``"first uint8"``: for each place, one for each kind of pixels.

    Args:
        decode: gives a video [B, 3, F, H, W] of about [-1, 1].
        space: of their arrays; ``output`` is that of :data:`FRAMES`.
    """

    def program(pixels: str) -> Program:
        def run(model: BoundModule, carry: Any, constants: Any, given: Any) -> Any:
            carry, video = decode(model, carry, constants, given)
            frames = video.astype("float32") * 0.5 + 0.5
            return carry, encode_pixels(frames, pixels, model.space)

        return Program(component="vae", fn=run, space=space)

    return {f"{place} {p}": program(p) for place in places for p in PIXELS}


#: How frames and their statistics are split in space.
FRAMES = {"frames": "BCFYX", "finite": "BF", "low": "BC", "high": "BC"}


def chunk_work(
    z: torch.Tensor,
    lengths: Sequence[int],
    size: tuple[int, int],
    pixels: str,
    *,
    places: tuple[str, str] = ("first", "next"),
    counted: bool = False,
) -> Work:
    """Decode latents chunk by chunk.

    Args:
        z: [B, C, T, Y, X].
        lengths: latent frames of each chunk.
        size: H and W; programs on a split picture give phantom rows and columns.
        pixels: of the frames, ``"float32"`` or ``"uint8"``.
        places: of the first chunk and of all others, see :func:`frame_programs`.
        counted: whether programs take the index of a chunk's first latent frame,
            ``start``, and a constant ``frames`` whose length is T.
    """

    def calls() -> Iterator[Call]:
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            given: dict[str, Any] = {
                "latents": z[:, :, start : start + length].contiguous()
            }
            if counted:
                given["start"] = np.int32(start)
            yield Call(f"{places[start > 0]} {pixels}", given)

    def to_frames(index: int, output: Mapping[str, Any]) -> np.ndarray:
        return as_frames(output["frames"], *size)

    total = z.shape[2]
    return Work(
        carry=None,
        constants={"frames": np.arange(total, dtype=np.int32)} if counted else None,
        calls=calls(),
        total=len(lengths),
        to_frames=to_frames,
    )


def tile_work(
    z: torch.Tensor,
    plans: Sequence[TilePlan],
    pixels: str,
    places: tuple[str, str] = ("tile", "tile"),
) -> Work:
    """Decode latents tile by tile, the chunks of each in a row, and blend on the host.

    Programs give a video [B, 3, F, H, W] of about [-1, 1], unclipped, in the weights'
    dtype.

    Args:
        z: [B, C, T, Y, X].
        plans: of each chunk of z, with the same rows and columns in all of them.
        pixels: of the frames, ``"float32"`` or ``"uint8"``.
        places: the programs of a first chunk, and of all others.
    """
    lengths = [plan.axes[0].spans[-1].stop for plan in plans]
    chunks = z.split(lengths, dim=2)
    joined = [JoinedFrames(plan, pixels) for plan in plans]

    def calls() -> Iterator[Call]:
        for tiles in zip(*(plan.tiles for plan in plans), strict=True):
            for index, (tile, chunk) in enumerate(zip(tiles, chunks, strict=True)):
                given = {"latents": tile.cut(chunk).contiguous()}
                yield Call(places[index > 0], given, fresh=index == 0)

    def to_frames(index: int, output: np.ndarray) -> Any:
        tile, chunk = divmod(index, len(plans))
        return joined[chunk].add(without_phantoms(plans[chunk], tile, output))

    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=len(plans[0].tiles) * len(plans),
        to_frames=to_frames,
    )


def without_phantoms(plan: TilePlan, index: int, output: np.ndarray) -> np.ndarray:
    """A tile [B, 3, F, H, W] less the rows and columns that let it divide."""
    places = plan.tiles[index].index[1:]
    rows, columns = (
        axis.spans[n].made for axis, n in zip(plan.axes[1:], places, strict=True)
    )
    return output[..., :rows, :columns]
