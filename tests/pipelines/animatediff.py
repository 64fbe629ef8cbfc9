"""UNets: AnimateDiff and what is built on it, and the first models of videos."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, clip_encoder, clip_processor, picture
from tests.pipelines.tokenizers import clip_tokenizer

CHANNELS = (8, 8)
CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "negative_prompt": "blurry",
    "num_inference_steps": 2,
    "guidance_scale": 5.0,
}
SIZE: dict[str, Any] = {"height": 16, "width": 32}


def clip_text(width: int, pooled: bool = False, **changed: Any) -> dict[str, Any]:
    """CLIP's tokenizer, and its encoder of two layers."""
    tokenizer = clip_tokenizer()
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        projection_dim=width,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changed,
    )
    kind = transformers.CLIPTextModel
    if pooled:
        kind = transformers.CLIPTextModelWithProjection
    return {"tokenizer": tokenizer, "text_encoder": kind(config)}


def picture_vae(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": CHANNELS,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
        "norm_num_groups": 2,
    }
    return diffusers.AutoencoderKL(**config | changed)


def unet(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": CHANNELS,
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 2,
    }
    return diffusers.UNet2DConditionModel(**config | changed)


def motion(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": CHANNELS,
        "motion_layers_per_block": 1,
        "motion_norm_num_groups": 2,
        "motion_num_attention_heads": 2,
    }
    return diffusers.MotionAdapter(**config | changed)


def control() -> Any:
    return diffusers.ControlNetModel(
        block_out_channels=CHANNELS,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        conditioning_embedding_out_channels=(8, 8),
        norm_num_groups=2,
    )


def scheduler() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="linear", clip_sample=False
    )


def parts() -> dict[str, Any]:
    """The components of AnimateDiff."""
    return {
        **clip_text(8),
        "vae": picture_vae(),
        "unet": unet(),
        "motion_adapter": motion(),
        "scheduler": scheduler(),
    }


@example("AnimateDiffPipeline", kind="a UNet with layers over frames")
def animatediff() -> Made:
    pipeline = diffusers.AnimateDiffPipeline(**parts())
    return pipeline, {**CALL, **SIZE, "num_frames": 5}


@example("AnimateDiffPAGPipeline", kind="perturbed attention")
def animatediff_pag() -> Made:
    pipeline = diffusers.AnimateDiffPAGPipeline(**parts())
    return pipeline, {**CALL, **SIZE, "num_frames": 5}


@example("AnimateDiffControlNetPipeline", kind="a control net")
def animatediff_control() -> Made:
    pipeline = diffusers.AnimateDiffControlNetPipeline(**parts(), controlnet=control())
    return pipeline, {
        **CALL,
        **SIZE,
        "num_frames": 5,
        "conditioning_frames": clip(0, 5),
    }


@example("AnimateDiffSparseControlNetPipeline", kind="a control net of some frames")
def animatediff_sparse() -> Made:
    controlnet = diffusers.SparseControlNetModel(
        block_out_channels=CHANNELS,
        layers_per_block=1,
        conditioning_channels=3,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        cross_attention_dim=8,
        attention_head_dim=2,
        motion_num_attention_heads=2,
        conditioning_embedding_out_channels=(8, 8),
        norm_num_groups=2,
        use_simplified_condition_embedding=False,
    )
    pipeline = diffusers.AnimateDiffSparseControlNetPipeline(
        **parts(), controlnet=controlnet
    )
    call = {
        **CALL,
        **SIZE,
        "num_frames": 5,
        "conditioning_frames": clip(0, 2),
        "controlnet_frame_indices": [0, 3],
    }
    return pipeline, call


@example("AnimateDiffVideoToVideoPipeline", kind="from a video")
def animatediff_video() -> Made:
    pipeline = diffusers.AnimateDiffVideoToVideoPipeline(**parts())
    return pipeline, {**CALL, **SIZE, "video": clip(0, 5)}


@example("AnimateDiffVideoToVideoControlNetPipeline", kind="from a video, controlled")
def animatediff_video_control() -> Made:
    pipeline = diffusers.AnimateDiffVideoToVideoControlNetPipeline(
        **parts(), controlnet=control()
    )
    frames = {"video": clip(0, 5), "conditioning_frames": clip(5, 5)}
    return pipeline, {**CALL, **SIZE, **frames}


def unet_xl() -> Any:
    """For two text encoders, the second one pooled, and sizes of pictures."""
    return unet(
        cross_attention_dim=16,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 8,
    )


@example("AnimateDiffSDXLPipeline", kind="two text encoders")
def animatediff_sdxl() -> Made:
    second = clip_text(8, pooled=True)
    pipeline = diffusers.AnimateDiffSDXLPipeline(
        **clip_text(8),
        text_encoder_2=second["text_encoder"],
        tokenizer_2=second["tokenizer"],
        vae=picture_vae(),
        unet=unet_xl(),
        motion_adapter=motion(),
        scheduler=scheduler(),
    )
    return pipeline, {**CALL, **SIZE, "num_frames": 5}


@example("PIAPipeline", kind="from a picture")
def pia() -> Made:
    components = parts() | {
        "unet": diffusers.UNetMotionModel.from_unet2d(
            unet(), motion(conv_in_channels=9)
        ),
        "motion_adapter": motion(conv_in_channels=9),
    }
    pipeline = diffusers.PIAPipeline(**components)
    return pipeline, {**CALL, **SIZE, "num_frames": 5, "image": picture(0)}


def unet_3d() -> Any:
    return diffusers.UNet3DConditionModel(
        block_out_channels=CHANNELS,
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=2,
    )


@example("TextToVideoSDPipeline", kind="a UNet with convolutions over frames")
def text_to_video() -> Made:
    pipeline = diffusers.TextToVideoSDPipeline(
        **clip_text(8), vae=picture_vae(), unet=unet_3d(), scheduler=scheduler()
    )
    return pipeline, {**CALL, **SIZE, "num_frames": 5}


@example("VideoToVideoSDPipeline", kind="from a video")
def video_to_video() -> Made:
    pipeline = diffusers.VideoToVideoSDPipeline(
        **clip_text(8), vae=picture_vae(), unet=unet_3d(), scheduler=scheduler()
    )
    return pipeline, {**CALL, "video": clip(0, 5), "strength": 0.9}


@example("I2VGenXLPipeline", kind="from a picture, with a UNet")
def i2vgen() -> Made:
    pipeline = diffusers.I2VGenXLPipeline(
        **clip_text(8),
        vae=picture_vae(),
        image_encoder=clip_encoder(16),
        feature_extractor=clip_processor(16),
        unet=diffusers.I2VGenXLUNet(
            block_out_channels=CHANNELS,
            layers_per_block=1,
            sample_size=8,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=2,
        ),
        scheduler=scheduler(),
    )
    return pipeline, {
        **CALL,
        **SIZE,
        "num_frames": 5,
        "image": picture(0),
        "clip_skip": None,
    }


@example("StableVideoDiffusionPipeline", kind="from a picture alone", gate=True)
def stable_video() -> Made:
    pipeline = diffusers.StableVideoDiffusionPipeline(
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=[32, 32],
            down_block_types=["DownEncoderBlock2D"] * 2,
            latent_channels=4,
        ),
        image_encoder=clip_encoder(224, patch=32),
        feature_extractor=clip_processor(224),
        unet=diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 32),
            layers_per_block=1,
            sample_size=8,
            down_block_types=(
                "CrossAttnDownBlockSpatioTemporal",
                "DownBlockSpatioTemporal",
            ),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=8,
            num_attention_heads=2,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            sigma_max=700.0,
            sigma_min=0.002,
            timestep_type="continuous",
            use_karras_sigmas=True,
        ),
    )
    call = {
        **SIZE,
        "image": picture(0),
        "num_frames": 5,
        "num_inference_steps": 2,
        "max_guidance_scale": 2.5,
    }
    return pipeline, call
