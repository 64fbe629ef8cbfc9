"""Wan 2.1 and 2.2, and what is built on them: Lucy Edit, SkyReels V2."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, clip_encoder, clip_processor, picture


def umt5_text() -> dict[str, Any]:
    return t5_text(kind="UMT5")


SIZES: dict[str, Any] = {
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
}
"""Of a transformer like Wan's."""


def transformer(kind: Any = diffusers.WanTransformer3DModel, **changed: Any) -> Any:
    norms = {"qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
    return kind(**SIZES | norms | changed)


def vae(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "base_dim": 3,
        "z_dim": 16,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    return diffusers.AutoencoderKLWan(**config | changed)


def vae_of_the_5b() -> Any:
    """The autoencoder that works on patches of 2x2 pixels."""
    return vae(
        z_dim=48,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )


def euler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def pipeline(kind: Any, **components: Any) -> Any:
    """A pipeline of the class, with Wan's text encoder and autoencoder."""
    usual: dict[str, Any] = {
        **umt5_text(),
        "vae": vae(),
        "scheduler": euler(),
    }
    return kind(**usual | components)


def call(**changed: Any) -> dict[str, Any]:
    """The keywords of a call; those that are ``None`` are left out."""
    usual: dict[str, Any] = {
        "prompt": "a panda plays a guitar",
        "negative_prompt": "blurry",
        "height": 16,
        "width": 32,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }
    return {k: v for k, v in (usual | changed).items() if v is not None}


@example("WanPipeline", kind="two calls a step", gate=True)
def wan() -> Made:
    made = pipeline(diffusers.WanPipeline, transformer=transformer())
    return made, call()


@example("WanPipeline-2.2", kind="two transformers", gate=True)
def wan_2_2() -> Made:
    made = pipeline(
        diffusers.WanPipeline,
        transformer=transformer(),
        transformer_2=transformer(),
        scheduler=unipc(),
        boundary_ratio=0.875,
    )
    return made, call(num_inference_steps=3, guidance_scale_2=3.0)


@example("WanPipeline-2.2-5B", kind="a timestep for each token")
def wan_5b() -> Made:
    made = pipeline(
        diffusers.WanPipeline,
        transformer=transformer(in_channels=48, out_channels=48),
        vae=vae_of_the_5b(),
        scheduler=unipc(),
        expand_timesteps=True,
    )
    return made, call(height=32)


@example("WanImageToVideoPipeline", kind="first and last picture, CLIP", gate=True)
def image_to_video() -> Made:
    made = pipeline(
        diffusers.WanImageToVideoPipeline,
        transformer=transformer(
            in_channels=36, image_dim=8, pos_embed_seq_len=2 * (4 * 4 + 1)
        ),
        image_encoder=clip_encoder(8),
        image_processor=clip_processor(8),
    )
    return made, call(image=picture(1), last_image=picture(2))


@example("WanImageToVideoPipeline-2.2", kind="two transformers")
def image_to_video_2_2() -> Made:
    made = pipeline(
        diffusers.WanImageToVideoPipeline,
        transformer=transformer(in_channels=36),
        transformer_2=transformer(in_channels=36),
        scheduler=unipc(),
        boundary_ratio=0.875,
    )
    return made, call(image=picture(1), num_inference_steps=3)


@example("WanImageToVideoPipeline-2.2-5B", kind="the first picture is kept")
def image_to_video_5b() -> Made:
    made = pipeline(
        diffusers.WanImageToVideoPipeline,
        transformer=transformer(in_channels=48, out_channels=48),
        vae=vae_of_the_5b(),
        scheduler=unipc(),
        expand_timesteps=True,
    )
    return made, call(image=picture(1, 32, 32), height=32)


@example("WanVideoToVideoPipeline", kind="begins from a video")
def video_to_video() -> Made:
    made = pipeline(
        diffusers.WanVideoToVideoPipeline,
        transformer=transformer(),
        scheduler=diffusers.UniPCMultistepScheduler(flow_shift=3.0),
    )
    return made, call(video=clip(1, 9), num_inference_steps=4, num_frames=None)


def vace_transformer() -> Any:
    return transformer(
        diffusers.WanVACETransformer3DModel,
        num_layers=3,
        vace_layers=[0, 2],
        vace_in_channels=96,
    )


@example("WanVACEPipeline", kind="control by a video and a mask")
def vace() -> Made:
    made = pipeline(diffusers.WanVACEPipeline, transformer=vace_transformer())
    masks = [one.convert("L") for one in clip(20, 9)]
    return made, call(video=clip(1, 9), mask=masks, reference_images=[picture(40)])


@example("WanAnimatePipeline", kind="pose and face videos")
def animate() -> Made:
    made = pipeline(
        diffusers.WanAnimatePipeline,
        transformer=transformer(
            diffusers.WanAnimateTransformer3DModel,
            in_channels=36,
            latent_channels=16,
            image_dim=8,
            motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=16,
            face_encoder_hidden_dim=16,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        ),
        image_encoder=clip_encoder(8),
        image_processor=clip_processor(8),
    )
    return made, call(
        image=picture(1),
        pose_video=clip(10, 9),
        face_video=clip(30, 9, 16, 16),
        segment_frame_length=9,
        prev_segment_conditioning_frames=1,
        num_frames=None,
    )


@example("LucyEditPipeline", kind="edits a video")
def lucy_edit() -> Made:
    made = pipeline(diffusers.LucyEditPipeline, transformer=transformer(in_channels=32))
    return made, call(video=clip(1, 9))


def skyreels(**changed: Any) -> Any:
    return transformer(diffusers.SkyReelsV2Transformer3DModel, **changed)


@example("SkyReelsV2Pipeline")
def skyreels_text() -> Made:
    made = pipeline(
        diffusers.SkyReelsV2Pipeline, transformer=skyreels(), scheduler=unipc()
    )
    return made, call()


@example("SkyReelsV2ImageToVideoPipeline", kind="a picture, CLIP")
def skyreels_image() -> Made:
    made = pipeline(
        diffusers.SkyReelsV2ImageToVideoPipeline,
        transformer=skyreels(in_channels=36, image_dim=8),
        scheduler=unipc(),
        image_encoder=clip_encoder(8),
        image_processor=clip_processor(8),
    )
    return made, call(image=picture(1))


@example("SkyReelsV2DiffusionForcingPipeline", kind="chunks that overlap")
def skyreels_forcing() -> Made:
    made = pipeline(
        diffusers.SkyReelsV2DiffusionForcingPipeline,
        transformer=skyreels(),
        scheduler=unipc(),
    )
    return made, call(
        num_frames=17, base_num_frames=9, overlap_history=5, addnoise_condition=20
    )


@example("SkyReelsV2DiffusionForcingImageToVideoPipeline", kind="a picture")
def skyreels_forcing_image() -> Made:
    made = pipeline(
        diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline,
        transformer=skyreels(),
        scheduler=unipc(),
    )
    return made, call(image=picture(1))


@example("SkyReelsV2DiffusionForcingVideoToVideoPipeline", kind="goes on from a video")
def skyreels_forcing_video() -> Made:
    made = pipeline(
        diffusers.SkyReelsV2DiffusionForcingVideoToVideoPipeline,
        transformer=skyreels(),
        scheduler=unipc(),
    )
    return made, call(
        video=clip(1, 7), num_frames=17, base_num_frames=5, overlap_history=3
    )
