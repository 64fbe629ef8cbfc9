"""Small modules of CogVideoX, one per form."""

from __future__ import annotations

from typing import Any

import torch

#: The three forms of the transformer, as published: 2b, 5b and 1.5-5b.
FORMS: dict[str, dict[str, Any]] = {
    "2b": {"use_rotary_positional_embeddings": False},
    "5b": {"use_rotary_positional_embeddings": True},
    "1.5-5b": {"use_rotary_positional_embeddings": True, "patch_size_t": 2},
}

#: Those that start from an image; their positions are learned, or they take ``ofs``.
IMAGE_FORMS: dict[str, dict[str, Any]] = {
    "5b-i2v": {
        "in_channels": 8,
        "use_rotary_positional_embeddings": True,
        "use_learned_positional_embeddings": True,
        # Learned positions are for one size only: that of the tests.
        "sample_height": 8,
        "sample_width": 12,
    },
    "1.5-5b-i2v": {
        "in_channels": 8,
        "use_rotary_positional_embeddings": True,
        "patch_size_t": 2,
        # As wide as the embedding of the time, to which it is added.
        "ofs_embed_dim": 32,
    },
}

TRANSFORMER = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 2,
    "max_text_seq_length": 20,
    "sample_height": 12,
    "sample_width": 16,
    "sample_frames": 9,
}


def make_transformer(form: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A small transformer of a form, with weights that are not all near zero."""
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(seed)
    config = {**TRANSFORMER, **{**FORMS, **IMAGE_FORMS}[form], **changes}
    module = CogVideoXTransformer3DModel(**config).eval()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            # Norms start at 1 and 0, which hides whether they were applied.
            parameter.data += 0.2 * torch.randn_like(parameter)
    if config.get("use_learned_positional_embeddings"):
        # They start out as the computed ones.
        module.patch_embed.pos_embedding.normal_()
    return module


def make_vae(seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A small autoencoder with the published depth and strides."""
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "block_out_channels": (8, 16, 16, 16),
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "latent_channels": 4,
        "scaling_factor": 0.7,
    }
    vae = AutoencoderKLCogVideoX(**{**config, **changes}).eval()
    # A trained decoder ends in [-1, 1]; a random one ends in [-13, 13], where the
    # rounding of upstream's own float32 run alone is over 1e-5.
    vae.decoder.conv_out.conv.weight.data.mul_(0.1)
    vae.decoder.conv_out.conv.bias.data.mul_(0.1)
    return vae
