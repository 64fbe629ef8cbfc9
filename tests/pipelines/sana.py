"""Sana Video, Sana WM, Mochi and Motif Video."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import transformers

from tests.pipelines import ltx, wan
from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import picture
from tests.pipelines.tokenizers import gemma_tokenizer


def call(**changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "prompt": "a panda plays a guitar",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "guidance_scale": 4.5,
        "max_sequence_length": 32,
    }
    return {k: v for k, v in (usual | changed).items() if v is not None}


@example("MochiPipeline", kind="text and video tokens in one attention", gate=True)
def mochi() -> Made:
    made = diffusers.MochiPipeline(
        **t5_text(),
        transformer=diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=32,
            time_embed_dim=4,
            max_sequence_length=16,
        ),
        vae=diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    return made, call(height=16, num_frames=7, max_sequence_length=16)


def gemma_2(vocabulary: int) -> Any:
    return transformers.Gemma2Model(
        transformers.Gemma2Config(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=8,
        )
    )


def sana(kind: Any) -> Any:
    tokenizer = gemma_tokenizer()
    return kind(
        tokenizer=tokenizer,
        text_encoder=gemma_2(len(tokenizer)),
        transformer=diffusers.SanaVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=8,
            sample_size=8,
            rope_max_seq_len=32,
        ),
        vae=wan.vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def sana_call(**changed: Any) -> dict[str, Any]:
    return call(
        frames=9,
        complex_human_instruction=[],
        use_resolution_binning=False,
        **changed,
    )


@example("SanaVideoPipeline", kind="linear attention")
def sana_video() -> Made:
    return sana(diffusers.SanaVideoPipeline), sana_call()


@example("SanaImageToVideoPipeline", kind="linear attention, a picture")
def sana_image() -> Made:
    made = sana(diffusers.SanaImageToVideoPipeline)
    return made, sana_call(image=picture(1, 32, 32))


@example(
    "SanaWMPipeline",
    kind="a world model: a picture and a camera's path",
    refused="upstream's attention is in bfloat16 in any dtype: 7e-4, its rounding",
)
def sana_world() -> Made:
    tokenizer = gemma_tokenizer()
    made = diffusers.SanaWMPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma_2(len(tokenizer)),
        transformer=diffusers.SanaWMTransformer3DModel(
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            linear_head_dim=16,
            softmax_every_n=2,
            caption_channels=8,
            chunk_plucker_channels=12,
            chunk_plucker_post_attn_blocks=2,
        ),
        vae=ltx.vae_2(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    path = np.tile(np.eye(4, dtype=np.float32), (5, 1, 1))
    path[:, 2, 3] = np.linspace(0, 1, 5)
    return made, call(
        image=picture(1, 32, 32),
        c2w=path,
        intrinsics=[30.0, 30.0, 16.0, 16.0],
        num_frames=5,
        chi_prompt=["Describe:"],
    )


def motif(kind: Any, **changed: Any) -> Any:
    tokenizer = gemma_tokenizer()
    text = transformers.T5Gemma2TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        dropout_rate=0.0,
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    config = transformers.T5Gemma2EncoderConfig(text_config=text, vision_config=vision)
    return kind(
        tokenizer=tokenizer,
        text_encoder=transformers.models.t5gemma2.modeling_t5gemma2.T5Gemma2Encoder(
            config
        ),
        transformer=diffusers.MotifVideoTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_single_layers=2,
            patch_size=1,
            text_embed_dim=32,
            rope_axes_dim=(4, 4, 4),
            **changed,
        ),
        vae=wan.vae(),
        scheduler=wan.euler(),
        guider=diffusers.AdaptiveProjectedGuidance(),
        feature_extractor=transformers.SiglipImageProcessor(
            size={"height": 16, "width": 16}
        ),
    )


@example("MotifVideoPipeline", kind="guidance by projection")
def motif_video() -> Made:
    made = motif(diffusers.MotifVideoPipeline)
    return made, call(num_frames=9, height=16, guidance_scale=None)


@example("MotifVideoImage2VideoPipeline", kind="guidance by projection, a picture")
def motif_image() -> Made:
    made = motif(diffusers.MotifVideoImage2VideoPipeline, image_embed_dim=8)
    return made, call(image=picture(1), num_frames=9, height=16, guidance_scale=None)
