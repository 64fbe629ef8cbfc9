"""The demo checkpoints: the real classes at a small size, with random weights.

Layout and code are those for published checkpoints. Making one takes seconds and is
deterministic. The 1.5 demo makes text-to-video and image-to-video runs; the 13b demo is
the original HunyuanVideo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tpuport.core.files.atomic import atomic_write_json
from tpuport.core.spec.demo_checkpoint import write_checkpoint
from tpuport.core.spec.variant import Variant
from tpuport.models.hunyuanvideo import config
from tpuport.models.hunyuanvideo.demo_tokenizers import (
    write_byt5_tokenizer,
    write_clip_tokenizer,
    write_llama_tokenizer,
    write_qwen_tokenizer,
)
from tpuport.models.hunyuanvideo.published import CONFIGS


def make_demo_of(folder: Path, variant: str) -> None:
    """Write the demo checkpoint of a variant into an empty folder."""
    if variant == config.DEMO_13B.name:
        make_demo_13b(folder)
    else:
        make_demo(folder)


def make_demo(folder: Path) -> None:
    """Write the 1.5 demo checkpoint into an empty folder."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import (
        Qwen2_5_VLTextModel,
        SiglipVisionConfig,
        SiglipVisionModel,
        T5Config,
        T5EncoderModel,
    )

    configs: dict[str, Any] = {k: dict(v) for k, v in CONFIGS["demo-1.5"].items()}
    parts: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250101)
        text_config = Qwen2_5_VLTextModel.config_class(**configs["text_encoder"])
        parts["text_encoder"] = Qwen2_5_VLTextModel(text_config)
        parts["text_encoder_2"] = T5EncoderModel(T5Config(**configs["text_encoder_2"]))
        image_config = SiglipVisionConfig(**configs["image_encoder"])
        parts["image_encoder"] = SiglipVisionModel(image_config)
        transformer = HunyuanVideo15Transformer3DModel(**configs["transformer"])
        parts["transformer"] = transformer
        parts["vae"] = AutoencoderKLHunyuanVideo15(**configs["vae"])
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=5.0)
    parts["guider"] = ClassifierFreeGuidance(guidance_scale=6.0)
    write_qwen_tokenizer(folder / "tokenizer")
    write_byt5_tokenizer(folder / "tokenizer_2")
    write_feature_extractor(
        folder / "feature_extractor",
        CONFIGS["demo-1.5"]["image_encoder"]["image_size"],
    )
    write_checkpoint(
        folder,
        "HunyuanVideo15ImageToVideoPipeline",
        parts,
        feature_extractor="SiglipImageProcessor",
        tokenizer="Qwen2Tokenizer",
        tokenizer_2="ByT5Tokenizer",
    )
    _prefix_names(folder / "image_encoder", "vision_model.")


def make_demo_13b(folder: Path) -> None:
    """Write the 13b demo checkpoint into an empty folder."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    configs: dict[str, Any] = {k: dict(v) for k, v in CONFIGS["demo-13b"].items()}
    parts: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250101)
        parts["text_encoder"] = LlamaModel(LlamaConfig(**configs["text_encoder"]))
        clip_config = CLIPTextConfig(**configs["text_encoder_2"])
        parts["text_encoder_2"] = CLIPTextModel(clip_config)
        parts["transformer"] = HunyuanVideoTransformer3DModel(**configs["transformer"])
        parts["vae"] = AutoencoderKLHunyuanVideo(**configs["vae"])
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=7.0)
    write_llama_tokenizer(folder / "tokenizer")
    write_clip_tokenizer(folder / "tokenizer_2")
    write_checkpoint(
        folder,
        "HunyuanVideoPipeline",
        parts,
        tokenizer="LlamaTokenizerFast",
        tokenizer_2="CLIPTokenizer",
    )
    _prefix_names(folder / "text_encoder_2", "text_model.")


# ----------------------------------------------------------------------- files


def _prefix_names(folder: Path, prefix: str) -> None:
    """Rename the weights to what published files call them.

    transformers 5 saves these classes without the name of an inner module that they
    had when the published files were made.
    """
    path = folder / "model.safetensors"
    weights = {
        f"{prefix}{name.removeprefix(prefix)}": tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def write_processors(folder: Path, variant: Variant) -> None:
    """The image processor's config for a published variant's image encoder."""
    encoder = variant.configs.get("image_encoder")
    if encoder is not None:
        size = int(encoder["image_size"])
        write_feature_extractor(folder / "feature_extractor", size)


def write_feature_extractor(folder: Path, size: int) -> None:
    """The image processor's config for pictures of ``size`` x ``size`` pixels."""
    config = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "SiglipImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": size, "width": size},
    }
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / "preprocessor_config.json", config)
