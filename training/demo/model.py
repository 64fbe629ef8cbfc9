"""The demo's pipeline, in upstream's classes: small enough to lie in the package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from training.demo.shapes import scenes

#: Text tokens that the pipeline takes unless it is told otherwise.
TOKENS = 226
#: Numbers that stand for 8 x 8 x 4 pixels: at first, and the main ones that are kept.
WIDE, CHANNELS = 16, 8
_VOCABULARY = 256
_VAE = {
    "block_out_channels": (8, 16, 32, 48),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "temporal_compression_ratio": 4,
    "sample_height": 128,
    "sample_width": 128,
    "scaling_factor": 1.0,
}
_TRANSFORMER = {
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "time_embed_dim": 64,
    "text_embed_dim": 96,
    "num_layers": 4,
    "max_text_seq_length": TOKENS,
    "patch_size": 4,
    "sample_height": 16,
    "sample_width": 16,
    "sample_frames": 17,
    "use_rotary_positional_embeddings": True,
}
_TEXT_ENCODER = {
    "vocab_size": _VOCABULARY,
    "d_model": 96,
    "d_kv": 16,
    "d_ff": 192,
    "num_layers": 2,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
}
_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "snr_shift_scale": 6.0,
}


def tokenizer() -> transformers.T5Tokenizer:
    """A token for each word of the captions, and one for each letter."""
    words: set[str] = set()
    draw, drawn = random.Random(0), scenes(0)
    for _ in range(3000):
        words.update(next(drawn).caption(draw).replace(",", "").split())
    letters = [chr(code) for code in range(33, 127)]
    pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    pieces += [(piece, -10.0) for piece in ("▁", *letters)]
    pieces += [(f"▁{word}", -1.0) for word in sorted(words)]
    if len(pieces) > _VOCABULARY:
        raise ValueError(f"{len(pieces)} tokens are more than {_VOCABULARY}")
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0)


def new_vae(channels: int = CHANNELS) -> AutoencoderKLCogVideoX:
    """An autoencoder with random weights: 8 x 8 x 4 pixels are ``channels`` numbers."""
    return AutoencoderKLCogVideoX(latent_channels=channels, **_VAE)


def new_pipeline(vae: AutoencoderKLCogVideoX) -> CogVideoXPipeline:
    """The pipeline with random weights but for the autoencoder's."""
    return CogVideoXPipeline(
        tokenizer=tokenizer(),
        text_encoder=transformers.T5EncoderModel(
            transformers.T5Config(**_TEXT_ENCODER)
        ),
        vae=vae,
        transformer=CogVideoXTransformer3DModel(**_TRANSFORMER),
        scheduler=CogVideoXDPMScheduler(**_SCHEDULER),
    )


def tokens(pipe: CogVideoXPipeline, texts: Sequence[str]) -> torch.Tensor:
    """Ids [batch, TOKENS] of texts, padded as the pipeline pads them."""
    made = pipe.tokenizer(
        list(texts),
        padding="max_length",
        max_length=TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    return made.input_ids


def loaded(folder: Path) -> CogVideoXPipeline:
    """The pipeline of a folder, in float32."""
    return CogVideoXPipeline.from_pretrained(folder, dtype=torch.float32)
