"""Kandinsky 5, and Kandinsky 6 with sound and as an upscaler."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, picture
from tests.pipelines.tokenizers import clip_tokenizer, qwen_tokenizer


def qwen(vocabulary: int) -> Any:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [2, 2, 4],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )


def clip_text(vocabulary: int) -> Any:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            projection_dim=16,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
        )
    )


def vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        block_out_channels=[8, 8, 8, 8],
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )


def transformer(kind: Any, **changed: Any) -> Any:
    config: dict[str, Any] = {
        "in_visual_dim": 16,
        "out_visual_dim": 16,
        "in_text_dim": 32,
        "in_text_dim2": 16,
        "time_dim": 16,
        "model_dim": 16,
        "ff_dim": 32,
        "num_text_blocks": 2,
        "num_visual_blocks": 2,
        "axes_dims": (2, 2, 4),
    }
    return kind(**config | changed)


def pipeline(kind: Any, **components: Any) -> Any:
    tokenizer = qwen_tokenizer("Describe the video in detail.")
    tokenizer_2 = clip_tokenizer()
    usual: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": qwen(len(tokenizer)),
        "tokenizer_2": tokenizer_2,
        "text_encoder_2": clip_text(len(tokenizer_2)),
        "vae": vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return kind(**usual | components)


def call(**changed: Any) -> dict[str, Any]:
    """The prompt stands behind the hundreds of tokens of upstream's template."""
    usual: dict[str, Any] = {
        "prompt": "a panda plays a guitar",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "max_sequence_length": 768,
    }
    return usual | changed


@example("Kandinsky5T2VPipeline")
def text_to_video() -> Made:
    made = pipeline(
        diffusers.Kandinsky5T2VPipeline,
        transformer=transformer(
            diffusers.Kandinsky5Transformer3DModel, visual_cond=False
        ),
    )
    return made, call()


@example("Kandinsky5I2VPipeline", kind="a picture")
def image_to_video() -> Made:
    made = pipeline(
        diffusers.Kandinsky5I2VPipeline,
        transformer=transformer(
            diffusers.Kandinsky5Transformer3DModel, visual_cond=True
        ),
    )
    return made, call(image=picture(1, 32, 32), num_frames=17)


@example("Kandinsky6TI2VAPipeline", kind="a picture, video with sound")
def sound() -> Made:
    made = pipeline(
        diffusers.Kandinsky6TI2VAPipeline,
        transformer=transformer(
            diffusers.Kandinsky6Transformer3DModel,
            in_audio_dim=4,
            out_audio_dim=4,
            model_dim_a=16,
            time_dim_a=16,
            ff_dim_a=32,
            axes_dims_a=(2, 2, 4),
            visual_token_type_num_embeddings=2,
        ),
        audio_vae=diffusers.MMAudioVAE(
            mel_bins=8, latent_channels=4, hidden_channels=16, layers_per_block=1
        ),
        vocoder=diffusers.MMAudioVocoder(
            num_mels=8,
            upsample_initial_channel=16,
            upsample_rates=(4, 2),
            upsample_kernel_sizes=(8, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
    )
    return made, call(image=picture(1, 32, 32))


@example("Kandinsky6SRPipeline", kind="an upscaler: tiles, sparse attention")
def upscaler() -> Made:
    made = diffusers.Kandinsky6SRPipeline(
        transformer=diffusers.Kandinsky6SRTransformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            time_dim=16,
            model_dim=16,
            ff_dim=32,
            num_visual_blocks=2,
            axes_dims=(2, 2, 4),
            nabla_threshold=1.0,  # every block: torch on a CPU leaves none out
            tile_sizes=((64, 64),),
        ),
        vae=diffusers.Kandinsky6SRVAE(
            latent_channels=4,
            encoder_block_out_channels=(32, 32, 32),
            decoder_block_out_channels=(32, 32, 32),
            layers_per_block=1,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    return made, {
        "video": clip(1, 5, 64, 32),
        "resolution_scale": 2,
        "num_inference_steps": 2,
    }
