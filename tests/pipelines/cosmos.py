"""Cosmos: worlds from text, pictures and videos."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.controlnets import controlnet_cosmos
from diffusers.models.transformers import transformer_cosmos

from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, picture
from tests.pipelines.tokenizers import qwen_config, qwen_tokenizer
from tests.pipelines.wan import vae as wan_vae

CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "negative_prompt": "blurry",
    "height": 16,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
}


def _resize(x: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, size, mode=interpolation)


# Upstream resizes a mask with torchvision, which diffusers does not install.
for module in (controlnet_cosmos, transformer_cosmos):
    vars(module).setdefault(
        "transforms",
        SimpleNamespace(
            functional=SimpleNamespace(resize=_resize),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        ),
    )


class Unchecked(diffusers.ConfigMixin):
    """Lets everything pass: the real checker is a model of several gigabytes."""

    config_name = "config.json"

    @diffusers.configuration_utils.register_to_config
    def __init__(self) -> None:
        super().__init__()

    def to(self, *args: Any, **kwargs: Any) -> Unchecked:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def transformer(**changed: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2,
        "text_embed_dim": 32,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "patch_size": (1, 2, 2),
        "rope_scale": (2.0, 1.0, 1.0),
        "extra_pos_embed_type": "learnable",
    }
    return diffusers.CosmosTransformer3DModel(**config | changed)


def cosmos_vae() -> Any:
    return diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        scaling_factor=1.0,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def karras_steps() -> Any:
    return diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min"
    )


#: Upstream cuts frames to bytes for its guard: a level may differ. Latents tell more.
LATENTS = {"output_type": "latent"}


@example("CosmosTextToWorldPipeline", kind="wavelets in the autoencoder")
def text_to_world() -> Made:
    pipeline = diffusers.CosmosTextToWorldPipeline(
        **t5_text(),
        transformer=transformer(in_channels=4, out_channels=4),
        vae=cosmos_vae(),
        scheduler=karras_steps(),
        safety_checker=Unchecked(),
    )
    return pipeline, {**CALL, **LATENTS, "num_frames": 9}


@example("CosmosVideoToWorldPipeline", kind="from a picture")
def video_to_world() -> Made:
    pipeline = diffusers.CosmosVideoToWorldPipeline(
        **t5_text(),
        transformer=transformer(in_channels=4 + 1, out_channels=4),
        vae=cosmos_vae(),
        scheduler=karras_steps(),
        safety_checker=Unchecked(),
    )
    return pipeline, {**CALL, **LATENTS, "num_frames": 9, "image": picture(0)}


def flow_steps() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)


@example("Cosmos2TextToImagePipeline", kind="one picture", gate=True)
def text_to_image() -> Made:
    pipeline = diffusers.Cosmos2TextToImagePipeline(
        **t5_text(),
        transformer=transformer(),
        vae=wan_vae(),
        scheduler=flow_steps(),
        safety_checker=Unchecked(),
    )
    return pipeline, {**CALL, **LATENTS}


@example("Cosmos2VideoToWorldPipeline", kind="from a video")
def video_to_world_2() -> Made:
    pipeline = diffusers.Cosmos2VideoToWorldPipeline(
        **t5_text(),
        transformer=transformer(in_channels=16 + 1),
        vae=wan_vae(),
        scheduler=flow_steps(),
        safety_checker=Unchecked(),
    )
    return pipeline, {**CALL, **LATENTS, "num_frames": 9, "video": clip(0, 9)}


def qwen_text(width: int = 16) -> dict[str, Any]:
    """Qwen 2.5's tokenizer, and its language model of two layers that sees."""
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen2_5_VLConfig(
        text_config=qwen_config(tokenizer, hidden_size=width),
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
        },
        tie_word_embeddings=False,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
    }


@example("Cosmos2_5_PredictBasePipeline", kind="all layers of a language model")
def predict() -> Made:
    pipeline = diffusers.Cosmos2_5_PredictBasePipeline(
        **qwen_text(),
        transformer=transformer(in_channels=16 + 1),
        vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(),
        safety_checker=Unchecked(),
    )
    return pipeline, {**CALL, "num_frames": 9, "video": clip(0, 9)}


@example("Cosmos2_5_TransferPipeline", kind="a control net in blocks")
def transfer() -> Made:
    shared = {
        "img_context_dim_in": 32,
        "img_context_dim_out": 32,
    }
    controlnet = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=2,
        in_channels=16 + 1 + 1,
        latent_channels=16 + 1 + 1,
        model_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        patch_size=(1, 2, 2),
        max_size=(4, 32, 32),
        rope_scale=(2.0, 1.0, 1.0),
        extra_pos_embed_type="learnable",
        use_crossattn_projection=False,
        **shared,
    )
    pipeline = diffusers.Cosmos2_5_TransferPipeline(
        **qwen_text(),
        transformer=transformer(
            in_channels=16 + 1,
            controlnet_block_every_n=1,
            img_context_num_tokens=4,
            **shared,
        ),
        controlnet=controlnet,
        vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(),
        safety_checker=Unchecked(),
    )
    call = {
        **CALL,
        "controls": clip(0, 5),
        "num_frames": 5,
        "num_frames_per_chunk": 5,
    }
    return pipeline, call


def omni_parts() -> dict[str, Any]:
    """The components of Cosmos 3."""
    tokenizer = qwen_tokenizer()
    return {
        "transformer": diffusers.Cosmos3OmniTransformer(
            head_dim=16,
            hidden_size=32,
            intermediate_size=32,
            latent_channel=16,
            latent_patch_size=1,
            num_attention_heads=2,
            num_hidden_layers=2,
            num_key_value_heads=1,
            patch_latent_dim=16,
            rope_axes_dim=[4, 2, 2],
            vocab_size=len(tokenizer) + 8,
        ),
        "text_tokenizer": tokenizer,
        "vae": wan_vae(),
        "scheduler": diffusers.UniPCMultistepScheduler(),
    }


OMNI_CALL: dict[str, Any] = {
    **{name: value for name, value in CALL.items() if name != "max_sequence_length"},
    "num_frames": 5,
    "use_system_prompt": False,
    "add_resolution_template": False,
    "add_duration_template": False,
}


@example("Cosmos3OmniPipeline", kind="one model of text and video", gate=True)
def omni() -> Made:
    pipeline = diffusers.Cosmos3OmniPipeline(
        **omni_parts(), enable_safety_checker=False
    )
    return pipeline, dict(OMNI_CALL)
