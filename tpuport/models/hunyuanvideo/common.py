"""What the stages of both HunyuanVideo forms share.

Legend: B videos of a batch, C latent channels, T/Y/X latent frames, rows, columns, F
frames, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tpuport.core.spec import Call, StageContext, Work
from tpuport.errors import VideoError
from tpuport.models.hunyuanvideo.vae import plan_decode
from tpuport.patches.tiling import assemble

if TYPE_CHECKING:
    import torch

#: Pixels that ``vae_tiling=auto`` decodes in one go: 129 frames of 384 x 320, about two
#: of upstream's tiles.
UNTILED_PIXELS = 2**24


#: The weights of an autoencoder that each half needs.
ENCODER = (r"encoder\..*", r"quant_conv\..*")
DECODER = (r"decoder\..*", r"post_quant_conv\..*")


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


def plan_tiles(ctx: StageContext, program: str) -> Work:
    """Decode tile by tile with upstream's tile sizes and blending."""
    import numpy as np

    z = unscaled_latents(ctx)
    plan = plan_decode(ctx.module("vae"), tuple(z.shape), tiled(ctx))

    def calls() -> Iterator[Call]:
        for tile in plan.tiles:
            yield Call(program, {"latents": tile.cut(z).contiguous()})

    def finish(carry: None, outputs: list[Any]) -> dict[str, Any]:
        outputs.reverse()
        # Taken off the list, so that a tile's memory is free once it is joined.
        video = assemble(plan, (outputs.pop() for _ in plan.tiles))
        frames = np.clip(video * np.float32(0.5) + np.float32(0.5), 0, 1)
        return {"frames": np.ascontiguousarray(frames.transpose(0, 2, 3, 4, 1))}

    return Work(
        carry=None,
        constants=None,
        calls=calls(),
        total=len(plan.tiles),
        finish=finish,
        to_host=True,
    )
