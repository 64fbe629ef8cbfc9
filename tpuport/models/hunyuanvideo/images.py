"""Images for image to video, fitted to the video as upstream's pipeline does.

Legend: B videos of a batch, Y rows and X columns of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image

from tpuport.core.files.sources import to_images
from tpuport.core.spec.stage_work import StageContext


def processor() -> Any:
    """The image processor of ``HunyuanVideo15ImageToVideoPipeline``."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import (
        HunyuanVideo15ImageProcessor,
    )

    return HunyuanVideo15ImageProcessor(
        vae_scale_factor=16, do_resize=False, do_convert_rgb=True
    )


def fitted(ctx: StageContext) -> list[Image]:
    """The images of a batch, scaled and cropped about the centre to the video's size.

    One where all videos start from the same image, else one for each.
    """
    request = ctx.request
    sources = request.sources[request.slice(ctx.batch)]
    pixels = ctx.inputs["image"][: 1 if len(set(sources)) == 1 else None]
    return [
        processor().resize(
            image, height=request.height, width=request.width, resize_mode="crop"
        )
        for image in to_images(pixels)
    ]


def condition_pixels(pictures: Sequence[Image]) -> torch.Tensor:
    """[len(pictures), 3, 1, Y, X] in [-1, 1] for the autoencoder."""
    pixels: torch.Tensor = processor().preprocess(
        list(pictures), height=pictures[0].height, width=pictures[0].width
    )
    return pixels.unsqueeze(2)
