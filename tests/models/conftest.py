"""Small CogVideoX checkpoints in the real on-disk layout, one per form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpuport.models.cogvideox import demo

#: The three forms of the transformer, as published: 2b, 5b and 1.5-5b.
FORMS: dict[str, dict[str, Any]] = {
    "2b": {"use_rotary_positional_embeddings": False},
    "5b": {"use_rotary_positional_embeddings": True},
    "1.5-5b": {"use_rotary_positional_embeddings": True, "patch_size_t": 2},
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

SCHEDULER = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
    "timestep_spacing": "trailing",
    "clip_sample": False,
}


def make_transformer(form: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A small transformer of a form, with weights that are not all near zero."""
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(seed)
    config = {**TRANSFORMER, **FORMS[form], **changes}
    return CogVideoXTransformer3DModel(**config).eval()


def make_vae(seed: int = 0) -> torch.nn.Module:
    """A small autoencoder with the published depth and strides."""
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(seed)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 16, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
        scaling_factor=0.7,
    ).eval()
    # A trained decoder ends in [-1, 1]; a random one ends in [-13, 13], where the
    # rounding of upstream's own float32 run alone is over 1e-5.
    vae.decoder.conv_out.conv.weight.data.mul_(0.1)
    vae.decoder.conv_out.conv.bias.data.mul_(0.1)
    return vae


def make_text_encoder(seed: int = 0) -> torch.nn.Module:
    """A small T5 v1.1 encoder."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=512,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=8,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return T5EncoderModel(config).eval()


def write_checkpoint(folder: Path, form: str, scheduler: str, seed: int = 0) -> Path:
    """Write a pipeline as ``save_pretrained`` lays it out."""
    import diffusers

    make_transformer(form, seed).save_pretrained(folder / "transformer")
    make_vae(seed).save_pretrained(folder / "vae")
    make_text_encoder(seed).save_pretrained(folder / "text_encoder")
    demo.write_tokenizer(folder / "tokenizer")
    cls = getattr(diffusers, scheduler)
    cls(**SCHEDULER).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "CogVideoXPipeline",
        "_diffusers_version": diffusers.__version__,
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLCogVideoX"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


#: The scheduler each form is published with.
PUBLISHED = {
    "2b": "CogVideoXDDIMScheduler",
    "5b": "CogVideoXDPMScheduler",
    "1.5-5b": "CogVideoXDPMScheduler",
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small checkpoint of a form, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(form: str) -> Path:
        folder = root / form
        if not folder.exists():
            write_checkpoint(folder, form, PUBLISHED[form])
        return folder

    return get


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder shared by the tests, so that a program compiles once."""
    return tmp_path_factory.mktemp("cache")
