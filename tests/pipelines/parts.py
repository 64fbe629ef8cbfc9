"""What ``examples.yaml`` names: inputs, tokenizers, and parts that upstream lacks."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.controlnets import controlnet_cosmos
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from PIL import Image
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from tpuport.core.pipelines import stand_in

__all__ = ["LTXLatentUpsamplerModel", "LTXVideoCondition"]

# ----------------------------------------------------------------------------- inputs


def picture(seed: int, width: int = 32, height: int = 16) -> Image.Image:
    """A soft picture of random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def clip(
    seed: int, frames: int, width: int = 32, height: int = 16
) -> list[Image.Image]:
    """As many pictures, all different."""
    return [picture(seed + frame, width, height) for frame in range(frames)]


def masks(seed: int, frames: int) -> list[Image.Image]:
    """As many pictures in grey."""
    return [one.convert("L") for one in clip(seed, frames)]


def right_half(frames: int, height: int, width: int) -> torch.Tensor:
    """A video that is white at the right."""
    mask = torch.zeros(1, 1, frames, height, width)
    mask[..., width // 2 :] = 255.0
    return mask


def camera_path(frames: int) -> np.ndarray:
    """The poses of a camera that moves forward."""
    path = np.tile(np.eye(4, dtype=np.float32), (frames, 1, 1))
    path[:, 2, 3] = np.linspace(0, 1, frames)
    return path


def seeded(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


def times(one: Any, count: int) -> list[Any]:
    """A list of one value."""
    return [one] * count


def tuple_of(*values: Any) -> tuple[Any, ...]:
    """Values that are no list."""
    return values


def ids(count: int) -> torch.Tensor:
    """The numbers from 0 on, in one row."""
    return torch.arange(count)[None]


def none() -> None:
    """A keyword that is given as ``None``."""


# ------------------------------------------------------------------------- tokenizers


def t5_tokenizer() -> Any:
    """For T5 and UMT5: a piece for each letter."""
    return stand_in.tokenizer("T5Tokenizer")


def clip_tokenizer() -> Any:
    """For CLIP: a piece for each letter."""
    return stand_in.tokenizer("CLIPTokenizer")


def gemma_tokenizer() -> Any:
    """For Gemma: one token a letter, and bytes for the rest."""
    return stand_in.tokenizer("GemmaTokenizer")


def llama_tokenizer(*special: str) -> Any:
    """For Llama 3, with the words of HunyuanVideo's template and of prompts."""
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"]
    texts = re.split(r"<[^>]*>|{}", template)
    made = stand_in.tokenizer("LlamaTokenizer", [*texts, "a panda plays a guitar"])
    if special:
        made.add_special_tokens({"additional_special_tokens": [*special]})
    return made


def qwen_tokenizer(*texts: str) -> Any:
    """For Qwen 2 and 2.5, with words: turns may be text, or lists of parts with text.

    Args:
        texts: whose words are tokens; by default those of HunyuanVideo-1.5's template.
    """
    function = diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    template = inspect.signature(function).parameters["system_message"].default
    return stand_in.tokenizer("Qwen2Tokenizer", texts or [template])


def template(picture: str = "", **more: int) -> dict[str, Any]:
    """A short template of HunyuanVideo's prompts, in the form of upstream's own."""
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    before = head.format("system") + f"{picture}Describe the video:<|eot_id|>\n\n"
    before += head.format("user")
    return {
        "template": before + "{}<|eot_id|>" + head.format("assistant"),
        "crop_start": len(llama_tokenizer()(before).input_ids),
        **more,
    }


# -------------------------------------------------------------------------- components


def clip_processor(size: int) -> transformers.CLIPImageProcessor:
    """Cuts pictures to squares of ``size`` pixels."""
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


def clip_encoder(size: int, width: int = 8, patch: int = 2) -> Any:
    """Encodes squares of ``size`` pixels, ``patch`` pixels a token, in two layers."""
    return transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(
            hidden_size=width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=size,
            intermediate_size=16,
            patch_size=patch,
        )
    )


def t5gemma2_encoder(text: dict[str, Any], vision: dict[str, Any]) -> Any:
    """The encoder alone, which is no class of ``transformers`` itself."""
    config = transformers.T5Gemma2EncoderConfig(
        text_config=transformers.T5Gemma2TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**vision),
    )
    return T5Gemma2Encoder(config)


def allegro_vae(**config: Any) -> Any:
    """In tiles: upstream decodes whole tiles alone, and zeros where none fits."""
    made = diffusers.AutoencoderKLAllegro(**config)
    made.enable_tiling()
    made.kernel, made.stride = (8, 16, 16), (8, 16, 8)
    return made


def narrow_decoder(**config: Any) -> Any:
    """LTX-2.5's decoder for latents of a smaller spread."""
    made = diffusers.LTX2VideoDiffusionDecoderModel(**config)
    with torch.no_grad():
        made.latents_std.mul_(0.5)
    return made


def z_image_transformer(**config: Any) -> Any:
    """With numbers for the tokens that upstream leaves unset."""
    made = diffusers.ZImageTransformer2DModel(**config)
    for name in ("x_pad_token", "cap_pad_token"):
        getattr(made, name).data.normal_()
    return made


class QwenProcessor(transformers.Qwen3VLProcessor):
    """Without videos: their processor wants torchvision, which diffusers does not."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        ids = tokenizer.convert_tokens_to_ids
        self.image_token_id = ids("<|image_pad|>")
        self.video_token_id = ids("<|video_pad|>")
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)


def qwen_processor() -> QwenProcessor:
    """Of pictures and text."""
    return QwenProcessor(transformers.Qwen2VLImageProcessorPil(), qwen_tokenizer())


class Unchecked(diffusers.ConfigMixin):
    """Lets everything pass: the real checker is a model of several gigabytes."""

    config_name = "config.json"

    @diffusers.configuration_utils.register_to_config
    def __init__(self) -> None:
        super().__init__()

    def to(self, *args: Any, **kwargs: Any) -> Unchecked:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def _resize(x: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, size, mode=interpolation)


# Upstream resizes a mask with torchvision, which diffusers does not install.
for module in (controlnet_cosmos, transformer_cosmos):
    vars(module).setdefault(
        "transforms",
        SimpleNamespace(
            functional=SimpleNamespace(resize=_resize),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        ),
    )
