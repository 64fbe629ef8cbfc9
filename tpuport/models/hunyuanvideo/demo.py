"""The demo checkpoints: the real classes at a small size, with random weights.

They lie on disk as the published checkpoints do and are read by the same code. Making
one takes seconds and is deterministic. The 1.5 demo makes text-to-video and
image-to-video runs; the 13b demo is the original HunyuanVideo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.models.hunyuanvideo.demo_tokenizers import (
    write_byt5_tokenizer,
    write_clip_tokenizer,
    write_json,
    write_llama_tokenizer,
    write_qwen_tokenizer,
)

if TYPE_CHECKING:
    from tpuport.core.spec.variant import Variant

VERSION = "1"
"""Part of the cache key: raise it when the files below change."""

_ROTARY: Mapping[str, Any] = {"rope_theta": 256.0, "rope_axes_dim": [4, 6, 6]}

DEMO_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        # At the usual 0.02 a model of this width hardly looks at its input.
        "initializer_range": 0.08,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [1, 1, 2],
        },
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    # Six heads, as ByT5 small: no power of two divides them.
    "text_encoder_2": {
        "vocab_size": 384,
        "d_model": 48,
        "d_kv": 8,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
    "image_encoder": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "image_size": 56,
        "patch_size": 14,
    },
    "transformer": {
        **_ROTARY,
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "num_layers": 3,
        "num_refiner_layers": 2,
        "mlp_ratio": 2.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 64,
        "text_embed_2_dim": 48,
        "image_embed_dim": 32,
        "target_size": 128,
        "task_type": "i2v",
        "use_meanflow": False,
    },
    "vae": {
        "latent_channels": 32,
        "block_out_channels": [8, 16, 32, 64, 64],
        "layers_per_block": 1,
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
        "scaling_factor": 1.03682,
    },
}
"""Configs of the 1.5 demo, by folder."""

DEMO_CONFIGS_13B: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "text_encoder_2": {
        "vocab_size": 1024,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "projection_dim": 48,
        # As published: the end-of-text token is found as the highest id.
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "transformer": {
        **_ROTARY,
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "num_layers": 3,
        "num_single_layers": 3,
        "num_refiner_layers": 2,
        "mlp_ratio": 2.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "guidance_embeds": True,
        "text_embed_dim": 64,
        "pooled_projection_dim": 48,
        "image_condition_type": None,
    },
    "vae": {
        "latent_channels": 16,
        "block_out_channels": [16, 16, 32, 32],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 4,
        "scaling_factor": 0.476986,
        "mid_block_add_attention": True,
    },
}
"""Configs of the 13b demo, by folder."""


def make_demo(folder: Path) -> None:
    """Write the 1.5 demo checkpoint into an empty folder."""
    import torch
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

    configs: dict[str, Any] = {k: dict(v) for k, v in DEMO_CONFIGS.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250101)
        text_config = Qwen2_5_VLTextModel.config_class(**configs["text_encoder"])
        text_encoder = Qwen2_5_VLTextModel(text_config)
        text_encoder_2 = T5EncoderModel(T5Config(**configs["text_encoder_2"]))
        image_config = SiglipVisionConfig(**configs["image_encoder"])
        image_encoder = SiglipVisionModel(image_config)
        transformer = HunyuanVideo15Transformer3DModel(**configs["transformer"])
        vae = AutoencoderKLHunyuanVideo15(**configs["vae"])
    text_encoder.save_pretrained(folder / "text_encoder")
    text_encoder_2.save_pretrained(folder / "text_encoder_2")
    image_encoder.save_pretrained(folder / "image_encoder")
    _prefix_names(folder / "image_encoder", "vision_model.")
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=5.0).save_pretrained(folder / "scheduler")
    ClassifierFreeGuidance(guidance_scale=6.0).save_pretrained(folder / "guider")
    write_qwen_tokenizer(folder / "tokenizer")
    write_byt5_tokenizer(folder / "tokenizer_2")
    write_feature_extractor(
        folder / "feature_extractor", DEMO_CONFIGS["image_encoder"]["image_size"]
    )
    _write_index(
        folder,
        "HunyuanVideo15ImageToVideoPipeline",
        feature_extractor="SiglipImageProcessor",
        guider="ClassifierFreeGuidance",
        image_encoder="SiglipVisionModel",
        scheduler="FlowMatchEulerDiscreteScheduler",
        text_encoder="Qwen2_5_VLTextModel",
        text_encoder_2="T5EncoderModel",
        tokenizer="Qwen2Tokenizer",
        tokenizer_2="ByT5Tokenizer",
        transformer="HunyuanVideo15Transformer3DModel",
        vae="AutoencoderKLHunyuanVideo15",
    )


def make_demo_13b(folder: Path) -> None:
    """Write the 13b demo checkpoint into an empty folder."""
    import torch
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    configs: dict[str, Any] = {k: dict(v) for k, v in DEMO_CONFIGS_13B.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250101)
        text_encoder = LlamaModel(LlamaConfig(**configs["text_encoder"]))
        text_encoder_2 = CLIPTextModel(CLIPTextConfig(**configs["text_encoder_2"]))
        transformer = HunyuanVideoTransformer3DModel(**configs["transformer"])
        vae = AutoencoderKLHunyuanVideo(**configs["vae"])
    text_encoder.save_pretrained(folder / "text_encoder")
    text_encoder_2.save_pretrained(folder / "text_encoder_2")
    _prefix_names(folder / "text_encoder_2", "text_model.")
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=7.0).save_pretrained(folder / "scheduler")
    write_llama_tokenizer(folder / "tokenizer")
    write_clip_tokenizer(folder / "tokenizer_2")
    _write_index(
        folder,
        "HunyuanVideoPipeline",
        scheduler="FlowMatchEulerDiscreteScheduler",
        text_encoder="LlamaModel",
        text_encoder_2="CLIPTextModel",
        tokenizer="LlamaTokenizerFast",
        tokenizer_2="CLIPTokenizer",
        transformer="HunyuanVideoTransformer3DModel",
        vae="AutoencoderKLHunyuanVideo",
    )


# ----------------------------------------------------------------------- files


def _write_index(folder: Path, pipeline: str, **classes: str) -> None:
    import diffusers

    index: dict[str, Any] = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
    }
    for name, cls in classes.items():
        library = "diffusers" if hasattr(diffusers, cls) else "transformers"
        index[name] = [library, cls]
    write_json(folder / "model_index.json", index)


def _prefix_names(folder: Path, prefix: str) -> None:
    """Rename the weights to what published files call them.

    transformers 5 saves these classes without the name of an inner module that they
    had when the published files were made.
    """
    from safetensors.torch import load_file, save_file

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
    write_json(folder / "preprocessor_config.json", config)
