"""AnyFlow, ChronoEdit, EasyAnimate and Helios."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example, seeded
from tests.pipelines.pictures import clip_encoder, clip_processor, picture
from tests.pipelines.tokenizers import qwen_config, qwen_tokenizer
from tests.pipelines.wan import SIZES
from tests.pipelines.wan import vae as wan_vae

CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "negative_prompt": "blurry",
    "height": 16,
    "width": 32,
    "num_frames": 9,
    "num_inference_steps": 2,
    "guidance_scale": 5.0,
    "max_sequence_length": 16,
}


def flow_map() -> Any:
    return diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)


@example("AnyFlowPipeline", kind="steps of any length")
def any_flow() -> Made:
    pipeline = diffusers.AnyFlowPipeline(
        **t5_text(),
        transformer=diffusers.AnyFlowTransformer3DModel(
            **SIZES, rope_max_seq_len=32, gate_value=0.25, deltatime_type="r"
        ),
        vae=wan_vae(),
        scheduler=flow_map(),
    )
    return pipeline, dict(CALL)


@example("AnyFlowFARPipeline", kind="FlexAttention, chunks with a cache")
def any_flow_far() -> Made:
    pipeline = diffusers.AnyFlowFARPipeline(
        **t5_text(),
        transformer=diffusers.AnyFlowFARTransformer3DModel(
            **SIZES,
            rope_max_seq_len=32,
            gate_value=0.25,
            deltatime_type="r",
            compressed_patch_size=(1, 4, 4),
            full_chunk_limit=3,
            chunk_partition=(1, 1, 1),
        ),
        vae=wan_vae(),
        scheduler=flow_map(),
    )
    return pipeline, dict(CALL)


@example("ChronoEditPipeline", kind="an edit as a short video")
def chrono_edit() -> Made:
    pipeline = diffusers.ChronoEditPipeline(
        **t5_text(),
        image_encoder=clip_encoder(16),
        image_processor=clip_processor(16),
        transformer=diffusers.ChronoEditTransformer3DModel(
            **SIZES | {"in_channels": 36},
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
            image_dim=8,
        ),
        vae=wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    return pipeline, {**CALL, "image": picture(0), "num_frames": 5}


def helios_transformer() -> Any:
    return diffusers.HeliosTransformer3DModel(
        **SIZES, qk_norm="rms_norm_across_heads", rope_dim=(4, 4, 4)
    )


def helios_steps() -> Any:
    return diffusers.HeliosScheduler(
        stage_range=[0, 1], stages=1, use_dynamic_shifting=True
    )


def pyramid_steps() -> Any:
    return diffusers.HeliosScheduler(
        stage_range=[0, 0.5, 1], stages=2, gamma=0.25, use_dynamic_shifting=True
    )


@example("HeliosPipeline", kind="chunks with a memory of those before", gate=True)
def helios() -> Made:
    pipeline = diffusers.HeliosPipeline(
        **t5_text(),
        transformer=helios_transformer(),
        vae=wan_vae(),
        scheduler=helios_steps(),
    )
    return pipeline, {**CALL, "num_latent_frames_per_chunk": 3}


@example("HeliosPyramidPipeline", kind="from coarse to fine")
def helios_pyramid() -> Made:
    pipeline = diffusers.HeliosPyramidPipeline(
        **t5_text(),
        transformer=helios_transformer(),
        vae=wan_vae(),
        scheduler=pyramid_steps(),
    )
    call = {
        **CALL,
        "height": 64,
        "width": 64,
        "num_latent_frames_per_chunk": 2,
        "num_frames": 5,
        "pyramid_num_inference_steps_list": [2, 2],
    }
    del call["num_inference_steps"]
    return pipeline, call


def easy_animate_parts(in_channels: int, **changed: Any) -> dict[str, Any]:
    """The components of EasyAnimate."""
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen2VLConfig(
        text_config=qwen_config(tokenizer, num_hidden_layers=3),
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
        tie_word_embeddings=False,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2VLForConditionalGeneration(config),
        "transformer": diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=in_channels,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            num_layers=2,
            mmdit_layers=2,
            sample_width=4,
            sample_height=2,
            patch_size=2,
            **changed,
        ),
        "vae": diffusers.AutoencoderKLMagvit(
            down_block_types=("SpatialDownBlock3D",)
            + ("SpatialTemporalDownBlock3D",) * 3,
            up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 3,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


EASY: dict[str, Any] = {k: v for k, v in CALL.items() if k != "max_sequence_length"}


@example("EasyAnimatePipeline", kind="a language model as text encoder")
def easy_animate() -> Made:
    return diffusers.EasyAnimatePipeline(**easy_animate_parts(4)), dict(EASY)


@example(
    "EasyAnimateControlPipeline",
    kind="a video as control",
    refused="upstream's own call ends in a TypeError: it hands text_encoder_index to "
    "encode_prompt, which takes none (diffusers 0.42.1)",
)
def easy_animate_control() -> Made:
    pipeline = diffusers.EasyAnimateControlPipeline(**easy_animate_parts(4 * 3))
    video = seeded(1, 1, 3, 9, 16, 32).sigmoid()
    return pipeline, {**EASY, "control_video": video}


@example("EasyAnimateInpaintPipeline", kind="a video with a mask")
def easy_animate_inpaint() -> Made:
    pipeline = diffusers.EasyAnimateInpaintPipeline(
        **easy_animate_parts(4 * 3, resize_inpaint_mask_directly=False)
    )
    mask = torch.zeros(1, 1, 9, 16, 32)
    mask[..., 16:] = 255.0
    video = seeded(1, 1, 3, 9, 16, 32).sigmoid()
    return pipeline, {**EASY, "video": video, "mask_video": mask}
