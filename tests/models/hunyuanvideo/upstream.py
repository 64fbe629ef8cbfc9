"""The upstream pipelines of HunyuanVideo on a folder: what the tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from PIL import Image

#: Noise levels that a tiny model turns into different pixels.
SHIFT = 5.0


def picture(size: tuple[int, int] = (140, 80), seed: int = 0) -> Image.Image:
    """A noisy gradient of (width, height)."""
    rng = np.random.default_rng(seed)
    rows = np.linspace(0, 200, size[1])[:, None, None]
    pixels = rows + rng.integers(0, 55, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def parts_15(folder: Path, guidance: float, image: bool) -> dict[str, Any]:
    """The components of a 1.5 pipeline, each by its own ``from_pretrained``."""
    load = {
        "text_encoder": transformers.Qwen2_5_VLTextModel,
        "tokenizer": transformers.Qwen2Tokenizer,
        "text_encoder_2": transformers.T5EncoderModel,
        "tokenizer_2": transformers.ByT5Tokenizer,
        "transformer": HunyuanVideo15Transformer3DModel,
        "vae": AutoencoderKLHunyuanVideo15,
        "scheduler": FlowMatchEulerDiscreteScheduler,
    }
    if image:
        load["image_encoder"] = transformers.SiglipVisionModel
        load["feature_extractor"] = transformers.SiglipImageProcessor
    parts = {name: cls.from_pretrained(folder / name) for name, cls in load.items()}
    return {**parts, "guider": ClassifierFreeGuidance(guidance_scale=guidance)}


def pipeline_15(folder: Path, guidance: float = 6.0, image: bool = False) -> Any:
    """The text or the image to video pipeline of 1.5."""
    parts = parts_15(folder, guidance, image)
    cls = HunyuanVideo15ImageToVideoPipeline if image else HunyuanVideo15Pipeline
    pipe = cls(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_13b(folder: Path) -> Any:
    """The pipeline of 13b; its tokenizer splits as its ``tokenizer.json`` says."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder / "tokenizer"
    )
    pipe = HunyuanVideoPipeline(
        text_encoder=transformers.LlamaModel.from_pretrained(folder / "text_encoder"),
        tokenizer=tokenizer,
        text_encoder_2=transformers.CLIPTextModel.from_pretrained(
            folder / "text_encoder_2"
        ),
        tokenizer_2=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=HunyuanVideoTransformer3DModel.from_pretrained(
            folder / "transformer"
        ),
        vae=AutoencoderKLHunyuanVideo.from_pretrained(folder / "vae"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, seeds: int | list[int], **asked: Any) -> dict[str, Any]:
    """Frames [N, F, Y, X, 3] and latents of a pipeline; the loop runs once."""
    generator: Any = (
        [torch.Generator().manual_seed(s) for s in seeds]
        if isinstance(seeds, list)
        else torch.Generator().manual_seed(seeds)
    )
    latents = pipe(generator=generator, output_type="latent", **asked).frames
    with torch.no_grad():
        # As the pipeline's own last lines.
        scaled = latents.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
        # One by one: the attention mask of the 1.5 autoencoder fits one video only.
        video = torch.cat([pipe.vae.decode(z).sample for z in scaled.split(1)])
        frames = pipe.video_processor.postprocess_video(video, output_type="np")
    return {"frames": np.asarray(frames), "latents": latents}
