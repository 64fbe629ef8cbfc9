"""Pictures, sound and the processors that encoders of pictures want."""

from __future__ import annotations

import numpy as np
import transformers
from PIL import Image


def picture(seed: int, width: int = 32, height: int = 16) -> Image.Image:
    """A soft picture of random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def clip(
    seed: int, frames: int, width: int = 32, height: int = 16
) -> list[Image.Image]:
    """As many pictures, all different."""
    return [picture(seed + frame, width, height) for frame in range(frames)]


def clip_processor(size: int) -> transformers.CLIPImageProcessor:
    """Cuts pictures to squares of ``size`` pixels."""
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


def clip_encoder(
    size: int, width: int = 8
) -> transformers.CLIPVisionModelWithProjection:
    """Encodes squares of ``size`` pixels in two layers."""
    return transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(
            hidden_size=width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=size,
            intermediate_size=16,
            patch_size=2,
        )
    )
