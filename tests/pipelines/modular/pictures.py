"""Pipelines of blocks that make pictures: families that have no classic video class."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.animatediff import clip_text, picture_vae, unet_xl
from tests.pipelines.cogvideox import t5_text
from tests.pipelines.cosmos import qwen_text
from tests.pipelines.example import Made, example
from tests.pipelines.modular.videos import pipeline
from tests.pipelines.tokenizers import qwen_tokenizer

CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "output": ["images"],
}


def euler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def second(parts: dict[str, Any], number: int = 2) -> dict[str, Any]:
    """A tokenizer and an encoder, by the names of the second (third) ones."""
    return {f"{name}_{number}": part for name, part in parts.items()}


def wide_vae(channels: int) -> Any:
    return picture_vae(
        latent_channels=channels,
        shift_factor=0.06,
        scaling_factor=1.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def qwen_3(kind: Any = transformers.Qwen3Model, layers: int = 2) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return {"tokenizer": tokenizer, "text_encoder": kind(config)}


@example("FluxModularPipeline", kind="blocks, a picture")
def flux() -> Made:
    made = pipeline(
        diffusers.FluxModularPipeline,
        **clip_text(8),
        **second(t5_text()),
        vae=wide_vae(1),
        scheduler=euler(),
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=8,
            axes_dims_rope=[4, 4, 8],
        ),
    )
    return made, CALL | {"max_sequence_length": 16}


@example("StableDiffusion3ModularPipeline", kind="blocks, a picture, three encoders")
def stable_diffusion_3() -> Made:
    made = pipeline(
        diffusers.StableDiffusion3ModularPipeline,
        **clip_text(8, pooled=True),
        **second(clip_text(8, pooled=True)),
        **second(t5_text(), 3),
        vae=wide_vae(4),
        scheduler=euler(),
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            out_channels=4,
        ),
    )
    return made, CALL | {"negative_prompt": "blurry", "max_sequence_length": 16}


@example("StableDiffusionXLModularPipeline", kind="blocks, a picture, a UNet")
def stable_diffusion_xl() -> Made:
    made = pipeline(
        diffusers.StableDiffusionXLModularPipeline,
        **clip_text(8),
        **second(clip_text(8, pooled=True)),
        vae=picture_vae(),
        unet=unet_xl(),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    return made, CALL | {"negative_prompt": "blurry"}


@example("ZImageModularPipeline", kind="blocks, a picture, lists of pictures inside")
def z_image() -> Made:
    made = pipeline(
        diffusers.ZImageModularPipeline,
        **qwen_3(),
        vae=wide_vae(16),
        scheduler=euler(),
        transformer=diffusers.ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=16,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            qk_norm=True,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    )
    for name in ("x_pad_token", "cap_pad_token"):  # upstream leaves them unset
        getattr(made.transformer, name).data.normal_()
    return made, CALL | {"max_sequence_length": 16}


@example(
    "Flux2KleinModularPipeline", kind="blocks, a picture, layers of a language model"
)
def flux_2() -> Made:
    made = pipeline(
        diffusers.Flux2KleinModularPipeline,
        **qwen_3(transformers.Qwen3ForCausalLM),
        vae=diffusers.AutoencoderKLFlux2(
            sample_size=32,
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(4,),
            layers_per_block=1,
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        scheduler=euler(),
        transformer=diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=[4, 4, 4, 4],
            guidance_embeds=False,
        ),
    )
    return made, CALL | {"max_sequence_length": 16, "text_encoder_out_layers": (1,)}


@example("QwenImageModularPipeline", kind="blocks, a picture, padded text")
def qwen_image() -> Made:
    made = pipeline(
        diffusers.QwenImageModularPipeline,
        **qwen_text(),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        scheduler=euler(),
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    )
    return made, CALL | {"negative_prompt": "blurry", "max_sequence_length": 16}
