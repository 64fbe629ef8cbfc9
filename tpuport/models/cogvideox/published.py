"""Configs of the published components at full size, and of the demo checkpoints.

Sources: the configs of the checkpoints ``THUDM/CogVideoX*``, diffusers
``scripts/convert_cogvideox_to_diffusers.py``, and the defaults of the classes in
diffusers 0.42.1. Only what decides shapes and numbers is kept; the rest is defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

T5_XXL: Config = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

_VAE: Config = {"latent_channels": 16, "temporal_compression_ratio": 4}
VAE_2B: Config = {**_VAE, "scaling_factor": 1.15258426}
VAE_5B: Config = {**_VAE, "scaling_factor": 0.7}
#: Image latents are divided by the factor that all other latents are multiplied by.
VAE_15: Config = {**VAE_5B, "invert_scale_latents": True}

_TRANSFORMER: Config = {
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "text_embed_dim": 4096,
    "max_text_seq_length": 226,
    "patch_size": 2,
}
_TRAINED_10: Config = {"sample_height": 60, "sample_width": 90, "sample_frames": 49}

TRANSFORMER_2B: Config = {
    **_TRANSFORMER,
    **_TRAINED_10,
    "num_attention_heads": 30,
    "num_layers": 30,
    "use_rotary_positional_embeddings": False,
}
TRANSFORMER_5B: Config = {
    **_TRANSFORMER,
    **_TRAINED_10,
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
#: Twice the channels: the latents being denoised and those of the image.
TRANSFORMER_5B_I2V: Config = {
    **TRANSFORMER_5B,
    "in_channels": 32,
    "use_learned_positional_embeddings": True,
}
TRANSFORMER_15_5B: Config = {
    **TRANSFORMER_5B,
    "patch_size_t": 2,
    "patch_bias": False,
    "sample_height": 300,
    "sample_width": 300,
    "sample_frames": 81,
}
TRANSFORMER_15_5B_I2V: Config = {
    **TRANSFORMER_15_5B,
    "in_channels": 32,
    "ofs_embed_dim": 512,
}

# ------------------------------------------------------------------------ demo

_DEMO_T5: Config = {
    "vocab_size": 512,
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_DEMO_TRANSFORMER: Config = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 64,
    "text_embed_dim": 64,
    "num_layers": 3,
    "max_text_seq_length": 226,
    "patch_size": 2,
    "patch_size_t": 2,
    "sample_height": 128,
    "sample_width": 128,
    "sample_frames": 17,
    "use_rotary_positional_embeddings": True,
}
_DEMO_VAE: Config = {
    **_VAE,
    "block_out_channels": [16, 32, 32, 32],
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "scaling_factor": 0.7,
}
#: Components of the demo checkpoints, both of the 1.5 form.
DEMO: Mapping[str, Config] = {
    "text_encoder": _DEMO_T5,
    "transformer": _DEMO_TRANSFORMER,
    "vae": _DEMO_VAE,
}
DEMO_I2V: Mapping[str, Config] = {
    "text_encoder": _DEMO_T5,
    "transformer": {**_DEMO_TRANSFORMER, "in_channels": 32, "ofs_embed_dim": 64},
    "vae": {**_DEMO_VAE, "invert_scale_latents": True},
}
