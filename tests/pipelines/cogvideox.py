"""CogVideoX, and models with its blocks."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, picture
from tests.pipelines.tokenizers import t5_tokenizer

CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "negative_prompt": "blurry",
    "height": 16,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": 16,
}


def t5_text(width: int = 32, kind: str = "T5") -> dict[str, Any]:
    """The tokenizer of T5 or UMT5, and an encoder of two layers."""
    tokenizer = t5_tokenizer()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": getattr(transformers, f"{kind}EncoderModel")(config),
    }


def transformer(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 2,
        "sample_frames": 9,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    }
    return diffusers.CogVideoXTransformer3DModel(**config | changed)


def vae() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )


def scheduler() -> Any:
    return diffusers.CogVideoXDPMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
    )


@example("CogVideoXPipeline", kind="caches of frames in the autoencoder", gate=True)
def cogvideox() -> Made:
    pipeline = diffusers.CogVideoXPipeline(
        **t5_text(), transformer=transformer(), vae=vae(), scheduler=scheduler()
    )
    return pipeline, {**CALL, "num_frames": 9}


@example("CogVideoXImageToVideoPipeline", kind="from a picture")
def cogvideox_picture() -> Made:
    pipeline = diffusers.CogVideoXImageToVideoPipeline(
        **t5_text(),
        transformer=transformer(in_channels=8, use_learned_positional_embeddings=True),
        vae=vae(),
        scheduler=scheduler(),
    )
    return pipeline, {**CALL, "num_frames": 9, "image": picture(0)}


@example("CogVideoXVideoToVideoPipeline", kind="from a video")
def cogvideox_video() -> Made:
    pipeline = diffusers.CogVideoXVideoToVideoPipeline(
        **t5_text(), transformer=transformer(), vae=vae(), scheduler=scheduler()
    )
    return pipeline, {**CALL, "video": clip(0, 9), "strength": 0.9}


@example("CogVideoXFunControlPipeline", kind="a video as control")
def cogvideox_control() -> Made:
    pipeline = diffusers.CogVideoXFunControlPipeline(
        **t5_text(),
        transformer=transformer(in_channels=8),
        vae=vae(),
        scheduler=diffusers.DDIMScheduler(),
    )
    return pipeline, {**CALL, "control_video": clip(0, 9)}


@example("AllegroPipeline", kind="an autoencoder in tiles")
def allegro() -> Made:
    allegro_vae = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    # Upstream decodes whole tiles alone, and zeros where none fits.
    allegro_vae.enable_tiling()
    allegro_vae.kernel, allegro_vae.stride = (8, 16, 16), (8, 16, 8)
    pipeline = diffusers.AllegroPipeline(
        **t5_text(),
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=32,
        ),
        vae=allegro_vae,
        scheduler=diffusers.DDIMScheduler(),
    )
    return pipeline, {**CALL, "num_frames": 8, "clean_caption": False}


@example("LattePipeline", kind="layers over space and over frames in turn")
def latte() -> Made:
    from tests.pipelines.animatediff import picture_vae

    pipeline = diffusers.LattePipeline(
        **t5_text(),
        transformer=diffusers.LatteTransformer3DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            video_length=5,
        ),
        vae=picture_vae(),
        scheduler=diffusers.DDIMScheduler(),
    )
    call = {**CALL, "video_length": 5, "clean_caption": False}
    del call["max_sequence_length"]
    return pipeline, call
