"""The demo checkpoints: the real classes at a small size, with random weights.

Files and code are those for published checkpoints: ``model_index.json``, a
SentencePiece tokenizer, T5, a transformer with rotary positions and ``patch_size_t``,
VAE, scheduler. Making one takes seconds and is deterministic.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from tpuport.core.spec.demo_checkpoint import demo_sentences, write_checkpoint
from tpuport.models.cogvideox.published import CONFIGS

_LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"
_CHARACTERS = _LETTERS + " .,;:!?'-()"

TOKENS = 400
"""Pieces of the tokenizer; T5 adds 100 sentinels."""


#: By variant: the configs, and the pipeline that the checkpoint is one of.
CHECKPOINTS = {
    "demo": (CONFIGS["demo"], "CogVideoXPipeline"),
    "demo-i2v": (CONFIGS["demo-i2v"], "CogVideoXImageToVideoPipeline"),
}


def make_demo(folder: Path, variant: str = "demo") -> None:
    """Write the demo checkpoint of a variant into an empty folder."""
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDPMScheduler,
        CogVideoXTransformer3DModel,
    )
    from transformers import T5Config, T5EncoderModel

    known, pipeline = CHECKPOINTS[variant]
    configs: dict[str, Any] = {k: dict(v) for k, v in known.items()}
    parts: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250101)
        parts["text_encoder"] = T5EncoderModel(T5Config(**configs["text_encoder"]))
        parts["transformer"] = CogVideoXTransformer3DModel(**configs["transformer"])
        parts["vae"] = AutoencoderKLCogVideoX(**configs["vae"])
    parts["scheduler"] = CogVideoXDPMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        timestep_spacing="trailing",
        clip_sample=False,
    )
    write_tokenizer(folder / "tokenizer")
    write_checkpoint(folder, pipeline, parts, tokenizer="T5Tokenizer")


def write_tokenizer(folder: Path) -> None:
    """A T5 tokenizer trained on a few hundred made-up sentences."""
    sentences = [*demo_sentences(), *[_CHARACTERS] * 20]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=TOKENS,
        model_type="unigram",
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(model.getvalue())
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    config = {
        **special,
        "extra_ids": 100,
        "model_max_length": 226,
        "tokenizer_class": "T5Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
