"""Configs of the published components at full size, for checks without weights.

Sources: the configs of the checkpoints ``hunyuanvideo-community/HunyuanVideo-1.5-*``
and ``hunyuanvideo-community/HunyuanVideo``, and the defaults of their classes in
diffusers 0.42.1. Only what decides shapes and numbers is kept; the rest is defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Also the cfg-distilled ones. ``target_size`` is 960 for 720p.
TRANSFORMER_15: Mapping[str, Any] = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56),
    "target_size": 640,
    "task_type": "t2v",
    "use_meanflow": False,
}

TRANSFORMER_15_STEP_DISTILLED: Mapping[str, Any] = {
    **TRANSFORMER_15,
    "task_type": "i2v",
    "use_meanflow": True,
}

TRANSFORMER_13B: Mapping[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 20,
    "num_single_layers": 40,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "guidance_embeds": True,
    "text_embed_dim": 4096,
    "pooled_projection_dim": 768,
    "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56),
    "image_condition_type": None,
}

#: The text part of Qwen2.5-VL-7B.
QWEN: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    },
}

#: google/byt5-small with the words for colours and fonts that Glyph adds.
BYT5: Mapping[str, Any] = {
    "vocab_size": 1510,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}

#: SigLIP so400m, 384 pixels in patches of 14: 729 tokens.
SIGLIP: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}

#: The language model of llava-llama-3-8b.
LLAMA: Mapping[str, Any] = {
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

#: The text part of CLIP ViT-L/14.
CLIP: Mapping[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "projection_dim": 768,
}

VAE_15: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 1024, 1024),
    "layers_per_block": 2,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "scaling_factor": 1.03682,
}

VAE_13B: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
    "scaling_factor": 0.476986,
    "mid_block_add_attention": True,
}

#: By folder of the checkpoint.
CONFIGS_15: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": QWEN,
    "text_encoder_2": BYT5,
    "image_encoder": SIGLIP,
    "transformer": TRANSFORMER_15,
    "vae": VAE_15,
}
CONFIGS_13B: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": LLAMA,
    "text_encoder_2": CLIP,
    "transformer": TRANSFORMER_13B,
    "vae": VAE_13B,
}

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
