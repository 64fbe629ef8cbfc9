"""Wan 2.1 and 2.2, and what is built on them."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.example import Made, example
from tests.pipelines.tokenizers import t5_tokenizer


def text_encoder(vocabulary: int) -> Any:
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=vocabulary,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=4,
        )
    )


def transformer(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    return diffusers.WanTransformer3DModel(**config | changed)


def vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


@example("WanPipeline", kind="two calls a step", gate=True)
def wan() -> Made:
    tokenizer = t5_tokenizer()
    pipeline = diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder(len(tokenizer)),
        transformer=transformer(),
        vae=vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    call = {
        "prompt": "a panda plays a guitar",
        "negative_prompt": "blurry",
        "height": 16,
        "width": 32,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }
    return pipeline, call
