"""What the stages of both HunyuanVideo forms share.

Legend: B videos of a batch, C latent channels, T/Y/X latent frames, rows, columns, F
frames, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tpuport.core.arrays import to_torch
from tpuport.core.frames import PIXELS, encode_on_host, encode_pixels
from tpuport.core.spec import Call, Program, Stage, StageContext, Work
from tpuport.core.tensors import TensorSpec
from tpuport.errors import VideoError
from tpuport.models.hunyuanvideo.vae import plan_decode
from tpuport.patches.tiling import TileJoin, TilePlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tpuport.core.module import BoundModule

#: Pixels that ``vae_tiling=auto`` decodes in one go: 129 frames of 384 x 320, about two
#: of upstream's tiles.
UNTILED_PIXELS = 2**24


#: The weights of an autoencoder that each half needs.
ENCODER = (r"encoder\..*", r"quant_conv\..*")
DECODER = (r"decoder\..*", r"post_quant_conv\..*")


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
    import torch

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
) -> Stage:
    """The decode stage of a form: ``decode_tile`` on each tile of the latents.

    The program ``tile`` gives floats, which the host blends; ``whole float32`` and
    ``whole uint8`` give the frames of latents that are one tile.
    """

    def run(model: BoundModule, carry: None, constants: None, given: Any) -> Any:
        return None, decode_tile(model, given["latents"])

    def whole(
        pixels: str, model: BoundModule, carry: None, constants: None, given: Any
    ) -> Any:
        import jax.numpy as jnp

        video = decode_tile(model, given["latents"])
        frames = jnp.transpose(video, (0, 2, 3, 4, 1)) * 0.5 + 0.5
        return None, encode_pixels(frames, pixels)

    return Stage(
        name="decode",
        unit="tile",
        components=("vae",),
        loads={"vae": DECODER},
        programs={
            "tile": Program(component="vae", fn=run),
            **{
                f"whole {pixels}": Program(component="vae", fn=partial(whole, pixels))
                for pixels in PIXELS
            },
        },
        plan=plan_tiles,
        upstream=upstream,
        writes=(),
    )


def rows_of(ctx: StageContext, guided: bool) -> tuple[str, ...]:
    """The texts of a batch in the order of the model's rows: negative ones first."""
    return (*ctx.negative_prompts, *ctx.prompts) if guided else ctx.prompts


def draw_noise(
    ctx: StageContext, shape: tuple[int, ...], like: torch.Tensor | None
) -> torch.Tensor:
    """The initial noise of a batch, as upstream's ``prepare_latents`` draws it.

    Args:
        like: whose dtype it is drawn in, since a generator gives other numbers in
            bfloat16; float32 without it.
    """
    import torch
    from diffusers.utils.torch_utils import randn_tensor

    generators = ctx.generators()
    noise: torch.Tensor = randn_tensor(
        shape,
        generator=generators if len(generators) > 1 else generators[0],
        dtype=torch.float32 if like is None else like.dtype,
    )
    return noise


def finite_or_error(steps: int) -> Callable[[int, Mapping[str, Any]], None]:
    """Refuses latents that a step left infinite or NaN."""

    def watch(index: int, output: Mapping[str, Any]) -> None:
        if not bool(output["finite"]):
            raise VideoError(
                f"the latents are not finite after step {index + 1} of {steps}; try "
                "--dtype float32, and check the weights"
            )

    return watch


def unscaled_latents(ctx: StageContext) -> torch.Tensor:
    """[B, C, T, Y, X] for the decoder."""
    scaling = float(ctx.module("vae").config["scaling_factor"])
    return ctx.inputs["latents"].float() / scaling


def tiled(ctx: StageContext) -> bool:
    """Whether this run decodes in tiles."""
    choice = ctx.request.options["vae_tiling"]
    if choice == "auto":
        request = ctx.request
        pixels = request.num_frames * request.height * request.width
        return bool(pixels > UNTILED_PIXELS)
    return bool(choice == "on")


def plan_tiles(ctx: StageContext) -> Work:
    """Decode tile by tile with upstream's tile sizes and blending; or all at once."""
    z = unscaled_latents(ctx)
    plan = plan_decode(ctx.module("vae"), tuple(z.shape), tiled(ctx))
    if len(plan.tiles) == 1:
        return Work(
            carry=None,
            constants=None,
            calls=[Call(f"whole {ctx.pixels}", {"latents": z.contiguous()})],
            total=1,
            frames=lambda index, output: output,
        )

    def calls() -> Iterator[Call]:
        for tile in plan.tiles:
            yield Call("tile", {"latents": tile.cut(z).contiguous()})

    joined = JoinedFrames(plan, ctx.pixels)
    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=len(plan.tiles),
        frames=lambda index, output: joined.add(output),
    )


class JoinedFrames:
    """Tiles of a video as its frames: finished where the last tile of them is in.

    A piece becomes pixels as soon as it is blended, so that of the floats one tile and
    the seams are held, and of the pixels the frames of one row of tiles in time.

    Args:
        plan: the tiles.
        pixels: ``"float32"`` or ``"uint8"``.
    """

    def __init__(self, plan: TilePlan, pixels: str) -> None:
        self._plan = plan
        self._pixels = pixels
        self._join = TileJoin(plan)
        self._row: dict[str, np.ndarray] | None = None

    def add(self, output: np.ndarray) -> dict[str, np.ndarray] | None:
        """The next tile, [B, 3, F, H, W], about [-1, 1].

        Returns:
            The frames that it completes, as :func:`tpuport.core.frames.encode_pixels`
            gives them, or ``None``.
        """
        import numpy as np

        values, (frames, rows, columns), ends_row = self._join.add(output)
        values *= np.float32(0.5)
        values += np.float32(0.5)
        piece = encode_on_host(values.transpose(0, 2, 3, 4, 1), self._pixels)
        if self._row is None:
            shape = (len(values), frames.stop - frames.start, *self._plan.output[1:], 3)
            self._row = {
                "frames": np.empty(shape, self._pixels),
                "finite": np.zeros_like(piece["finite"]),
                "low": piece["low"],
                "high": piece["high"],
            }
        row = self._row
        row["frames"][:, :, rows, columns] = piece["frames"]
        row["finite"] += piece["finite"]
        row["low"] = np.minimum(row["low"], piece["low"])
        row["high"] = np.maximum(row["high"], piece["high"])
        if not ends_row:
            return None
        self._row = None
        return row
