"""LTX-Video, and LTX-2 with sound."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines import ltx2
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example, seeded
from tests.pipelines.pictures import clip, picture
from tests.pipelines.tokenizers import gemma_tokenizer


def transformer() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )


def vae(**changed: Any) -> Any:
    """Eight pixels and four frames a latent in each direction."""
    config: dict[str, Any] = {
        "latent_channels": 8,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
        "decoder_inject_noise": (False,) * 5,
        "upsample_residual": (False,) * 4,
        "upsample_factor": (1,) * 4,
        "patch_size": 1,
    }
    return diffusers.AutoencoderKLLTXVideo(**config | changed)


def pipeline(kind: Any, **components: Any) -> Any:
    usual: dict[str, Any] = {
        **t5_text(),
        "transformer": transformer(),
        "vae": vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    return kind(**usual | components)


def call(**changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "prompt": "a panda plays a guitar",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 64,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "max_sequence_length": 16,
    }
    return {k: v for k, v in (usual | changed).items() if v is not None}


@example("LTXPipeline", kind="noise and a timestep in the decoder")
def ltx() -> Made:
    made = pipeline(
        diffusers.LTXPipeline,
        vae=vae(timestep_conditioning=True, decoder_inject_noise=(True,) * 5),
    )
    return made, call(decode_timestep=0.05, decode_noise_scale=0.025)


@example("LTXImageToVideoPipeline", kind="a timestep for each token")
def ltx_image() -> Made:
    made = pipeline(diffusers.LTXImageToVideoPipeline)
    return made, call(image=picture(1, 64, 32))


@example("LTXConditionPipeline", kind="pictures at chosen frames")
def ltx_condition() -> Made:
    made = pipeline(diffusers.LTXConditionPipeline)
    conditions = [
        LTXVideoCondition(image=picture(1, 64, 32)),
        LTXVideoCondition(video=clip(2, 9, 64, 32), frame_index=8, strength=0.8),
    ]
    return made, call(conditions=conditions, num_frames=17)


@example("LTXI2VLongMultiPromptPipeline", kind="windows with prompts of their own")
def ltx_long() -> Made:
    made = pipeline(diffusers.LTXI2VLongMultiPromptPipeline)
    return made, call(
        prompt="a panda plays a guitar | a panda sleeps",
        cond_image=picture(1, 64, 32),
        num_frames=25,
        temporal_tile_size=16,
        temporal_overlap=8,
        decode_horizontal_tiles=1,
        decode_vertical_tiles=1,
        seed=None,
    )


@example("LTXLatentUpsamplePipeline", kind="a video twice as large")
def ltx_upsample() -> Made:
    made = diffusers.LTXLatentUpsamplePipeline(
        vae=vae(),
        latent_upsampler=LTXLatentUpsamplerModel(
            in_channels=8, mid_channels=32, num_blocks_per_stage=1
        ),
    )
    return made, {"video": clip(1, 5, 32, 32), "height": 32, "width": 32}


# LTX-2


def gemma(vocabulary: int) -> Any:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4
        )
    )


def vae_2(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "latent_channels": 4,
        "block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "layers_per_block": (1,),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True,),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "downsample_type": ("spatial",),
        "upsample_residual": (False,),
        "upsample_factor": (1,),
        "patch_size": 1,
    }
    return diffusers.AutoencoderKLLTX2Video(**config | changed)


def audio_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        mel_bins=8,
    )


def transformer_2(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
        "caption_channels": 16,
        "rope_type": "split",
    }
    return diffusers.LTX2VideoTransformer3DModel(**config | changed)


def connectors() -> Any:
    return ltx2.LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=4,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=4,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=True,
        causal_temporal_positioning=False,
        rope_type="split",
    )


def vocoder() -> Any:
    return ltx2.LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )


def pipeline_2(kind: Any, **components: Any) -> Any:
    tokenizer = gemma_tokenizer()
    usual: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": gemma(len(tokenizer)),
        "connectors": connectors(),
        "transformer": transformer_2(),
        "vae": vae_2(),
        "audio_vae": audio_vae(),
        "vocoder": vocoder(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    return kind(**usual | components)


def call_2(**changed: Any) -> dict[str, Any]:
    """With every kind of guidance: four rows a step."""
    usual: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "spatio_temporal_guidance_blocks": [1],
        "max_sequence_length": 32,
    }
    return call(**usual | changed)


@example("LTX2Pipeline", kind="video with sound, four kinds of guidance", gate=True)
def ltx_2() -> Made:
    return pipeline_2(diffusers.LTX2Pipeline), call_2()


@example("LTX2ImageToVideoPipeline", kind="a picture, with sound")
def ltx_2_image() -> Made:
    made = pipeline_2(diffusers.LTX2ImageToVideoPipeline)
    return made, call_2(image=picture(1, 32, 32), image_crf=0)


@example("LTX2ConditionPipeline", kind="pictures at chosen frames, with sound")
def ltx_2_condition() -> Made:
    made = pipeline_2(diffusers.LTX2ConditionPipeline)
    first = ltx2.LTX2VideoCondition(frames=picture(1, 32, 32), strength=0.9, crf=0)
    return made, call_2(conditions=[first])


@example("LTX2InContextPipeline", kind="a reference video, with sound")
def ltx_2_in_context() -> Made:
    made = pipeline_2(diffusers.LTX2InContextPipeline)
    reference = ltx2.LTX2ReferenceCondition(frames=clip(1, 5, 32, 32), strength=0.9)
    return made, call_2(
        reference_conditions=[reference], conditioning_attention_strength=0.5
    )


@example("LTX2HDRPipeline", kind="a video in linear light")
def ltx_2_hdr() -> Made:
    made = pipeline_2(diffusers.LTX2HDRPipeline)
    reference = ltx2.LTX2HDRReferenceCondition(frames=clip(1, 5, 32, 32))
    return made, call_2(reference_conditions=[reference])


def keyframes() -> Any:
    """LTX-2.5's transformer: frames of its choice are made first."""
    return transformer_2(use_keyframes_abs_pos_embedding=True)


@example("LTX2DFRPipeline", kind="keyframes besides the video, with sound")
def ltx_2_keyframes() -> Made:
    made = pipeline_2(diffusers.LTX2DFRPipeline, transformer=keyframes())
    return made, call_2(
        negative_prompt=None,
        num_inference_steps=None,
        guidance_scale=None,
        spatio_temporal_guidance_blocks=None,
        sigmas=[1.0, 0.5],
    )


@example("LTX2DFRTemporalRefinePipeline", kind="twice the frames")
def ltx_2_refine() -> Made:
    made = pipeline_2(
        diffusers.LTX2DFRTemporalRefinePipeline,
        transformer=keyframes(),
        scheduler=diffusers.LTXEulerAncestralRFScheduler(eta=0.5),
        temporal_latent_upsampler=ltx2.LTX2LatentUpsamplerModel(
            in_channels=4,
            mid_channels=32,
            num_blocks_per_stage=1,
            spatial_upsample=False,
            temporal_upsample=True,
        ),
    )
    return made, call_2(
        latents=seeded(1, 1, 4, 4, 16, 16),
        keyframes_latents=seeded(2, 1, 4, 1, 16, 16),
        keyframe_positions=[6],
        num_frames=7,
        audio_latents=seeded(3, 1, 2, 5, 2),
        negative_prompt=None,
        num_inference_steps=None,
        guidance_scale=None,
        spatio_temporal_guidance_blocks=None,
        sigmas=[0.9, 0.5],
    )


@example("LTX2LatentUpsamplePipeline", kind="a video twice as large")
def ltx_2_upsample() -> Made:
    made = diffusers.LTX2LatentUpsamplePipeline(
        vae=vae_2(),
        latent_upsampler=ltx2.LTX2LatentUpsamplerModel(
            in_channels=4, mid_channels=32, num_blocks_per_stage=1
        ),
    )
    return made, {
        "video": clip(1, 5, 32, 32),
        "height": 32,
        "width": 32,
        "num_frames": 5,
    }


def diffusion_decoder(channels: int) -> Any:
    """LTX-2.5's decoder, which is a diffusion model itself."""
    return diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=channels,
        patch_size=2,
        decoder_head_dim=16,
        decoder_stage_channels=(64, 32, 16, 16, 16),
        decoder_stage_depths=(1, 1, 1, 1, 2),
        decoder_stage_kernels=((3, 3, 3),) * 4,
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)),
        decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(3, 3, 3),
        decoder_t_emb_dim=32,
        spatial_compression_ratio=16,
        temporal_compression_ratio=8,
    )


@example("LTX2VideoDiffusionDecodePipeline", kind="a decoder with local attention")
def ltx_2_decode() -> Made:
    decoder = diffusion_decoder(8)
    with torch.no_grad():
        decoder.latents_std.mul_(0.5)
    made = diffusers.LTX2VideoDiffusionDecodePipeline(
        diffusion_decoder=decoder,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    return made, {"latents": seeded(1, 1, 8, 2, 3, 3)}
