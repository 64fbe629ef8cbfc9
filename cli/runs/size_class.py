"""``--resolution`` and ``--aspect-ratio``: height and width of any pipeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.variants import NAMED
from tpuport.core.drive.rehearsal import without_weights
from tpuport.core.enums import denoises
from tpuport.core.files.sources import read_image, read_video
from tpuport.core.pipelines.call_arguments import default_of
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.core.spec.kinds import MOST_ASPECT
from tpuport.errors import UsageError

#: Where upstream's pipelines keep the pixels of a latent's side.
_SCALES = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_scale_factor",
)


def sized(settings: Settings, folder: PipelineFolder, reporter: Reporter) -> Settings:
    """The settings with a height and a width in place of a size class and a shape.

    The video has as many pixels as a 16:9 video of the class, in the shape asked for.
    Both sides are multiples of a token's pixels.
    """
    name, aspect = settings.resolution, settings.aspect_ratio
    if name is None and aspect is None:
        return settings
    flag = "--aspect-ratio" if name is None else f"--resolution {name}"
    if not {"height", "width"} <= folder.parameters.keys():
        raise UsageError(f"{flag}: {folder.class_name} takes no height and width")
    sides = default_of(folder, "height"), default_of(folder, "width")
    pixels = _pixels(name, sides)
    height, width = aspect or _source(settings) or (sides if all(sides) else (9, 16))
    if max(height / width, width / height) > MOST_ASPECT:  # of an image
        raise UsageError(
            f"{flag}: the image has the shape {width:g}:{height:g}, and shapes go from "
            "1:4 to 4:1; add --aspect-ratio, such as 16:9"
        )
    unit = token_side(folder.fetched(reporter, weights=False))
    high, wide = (
        max(round(side / unit), 1) * unit
        for side in (
            math.sqrt(pixels * height / width),
            math.sqrt(pixels * width / height),
        )
    )
    own = replace(settings, height=high, width=wide)
    return replace(own, resolution=None, aspect_ratio=None)


def _pixels(name: str | None, sides: tuple[Any, Any]) -> float:
    """How many the video is to have; without a class as many as upstream's default."""
    if name is None:
        if not all(sides):
            raise UsageError("--aspect-ratio: add --resolution, such as 480p")
        return float(sides[0] * sides[1])
    return int(name.removesuffix("p")) ** 2 * NAMED


def _source(settings: Settings) -> tuple[int, int] | None:
    if settings.image is not None:
        image = read_image(settings.image)
    elif settings.video is not None:
        image = read_video(settings.video)[0]
    else:
        return None
    return image.height, image.width


def token_side(folder: PipelineFolder) -> int:
    """Pixels of a side of a denoiser's token; only configs are read."""
    pipeline = without_weights(folder, torch.float32)
    found = (getattr(pipeline, name, None) for name in _SCALES)
    side = next((int(scale) for scale in found if scale), 8)
    for name, component in pipeline.components.items():
        if not denoises(name) or component is None:
            continue
        patch = getattr(component.config, "patch_size", None) or 1
        patch = patch[-1] if isinstance(patch, list | tuple) else patch
        return side * int(patch)
    return side
