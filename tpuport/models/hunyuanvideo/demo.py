"""The demo checkpoints: the real classes at a small size, with random weights.

They lie on disk as the published checkpoints do and are read by the same code. Making
one takes seconds and is deterministic. The 1.5 demo makes text-to-video and
image-to-video runs; the 13b demo is the original HunyuanVideo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.files.atomic import atomic_write_json

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

    from tpuport.core.spec.demo_checkpoint import write_checkpoint
    from tpuport.models.hunyuanvideo.demo_tokenizers import (
        write_byt5_tokenizer,
        write_qwen_tokenizer,
    )

    configs: dict[str, Any] = {k: dict(v) for k, v in DEMO_CONFIGS.items()}
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
        folder / "feature_extractor", DEMO_CONFIGS["image_encoder"]["image_size"]
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
    import torch
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    from tpuport.core.spec.demo_checkpoint import write_checkpoint
    from tpuport.models.hunyuanvideo.demo_tokenizers import (
        write_clip_tokenizer,
        write_llama_tokenizer,
    )

    configs: dict[str, Any] = {k: dict(v) for k, v in DEMO_CONFIGS_13B.items()}
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
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / "preprocessor_config.json", config)
