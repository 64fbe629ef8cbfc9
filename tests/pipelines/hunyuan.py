"""HunyuanVideo, and models with its blocks."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines.animatediff import clip_text
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip_processor, picture
from tests.pipelines.tokenizers import llama_tokenizer, qwen_config, qwen_tokenizer

CALL: dict[str, Any] = {
    "prompt": "a panda plays a guitar",
    "height": 16,
    "width": 32,
    "num_frames": 9,
    "num_inference_steps": 2,
    "guidance_scale": 4.5,
}
BEFORE = "<|start_header_id|>system<|end_header_id|>\n\n{}Describe the video:<|eot_id|>"
BEFORE += "\n\n<|start_header_id|>user<|end_header_id|>\n\n"
AFTER = "{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
SEEN = 4
"""Tokens of a picture in the language model."""


def llama_config(tokenizer: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_hidden_layers=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def texts(tokenizer: Any, text_encoder: Any) -> dict[str, Any]:
    """Both tokenizers and encoders; the second ones are CLIP's."""
    second = clip_text(8)
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "tokenizer_2": second["tokenizer"],
        "text_encoder_2": second["text_encoder"],
    }


def llama_texts() -> dict[str, Any]:
    tokenizer = llama_tokenizer()
    return texts(tokenizer, transformers.LlamaModel(llama_config(tokenizer)))


def template(tokenizer: Any, picture: str = "") -> dict[str, Any]:
    """A short template of prompts, in the form of upstream's own."""
    before = BEFORE.replace("{}", picture)
    return {
        "template": before + AFTER,
        "crop_start": len(tokenizer(before).input_ids),
    }


SIZES: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}


def transformer(**changed: Any) -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(**SIZES | changed)


def vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)


def siglip(width: int) -> dict[str, Any]:
    """Siglip's encoder of pictures of 16 pixels, and its processor."""
    return {
        "image_encoder": transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(
                hidden_size=width,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=4,
            )
        ),
        "feature_extractor": transformers.SiglipImageProcessor(
            size={"height": 16, "width": 16}
        ),
    }


@example("HunyuanVideoPipeline", kind="two text encoders, padded text", gate=True)
def hunyuan() -> Made:
    pipeline = diffusers.HunyuanVideoPipeline(
        **llama_texts(), transformer=transformer(), vae=vae(), scheduler=scheduler()
    )
    call = {
        **CALL,
        "negative_prompt": "blurry",
        "true_cfg_scale": 3.0,
        "max_sequence_length": 16,
        "prompt_template": template(pipeline.tokenizer),
    }
    return pipeline, call


@example("HunyuanSkyreelsImageToVideoPipeline", kind="from a picture")
def skyreels() -> Made:
    pipeline = diffusers.HunyuanSkyreelsImageToVideoPipeline(
        **llama_texts(),
        transformer=transformer(in_channels=8, guidance_embeds=True),
        vae=vae(),
        scheduler=scheduler(),
    )
    call = {
        **CALL,
        "image": picture(0),
        "negative_prompt": "blurry",
        "max_sequence_length": 16,
        "prompt_template": template(pipeline.tokenizer),
    }
    return pipeline, call


@example("HunyuanVideoImageToVideoPipeline", kind="a language model that sees")
def hunyuan_picture() -> Made:
    tokenizer = llama_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    encoder = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=llama_config(tokenizer),
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=8,
                intermediate_size=16,
                num_attention_heads=2,
                num_hidden_layers=2,
                image_size=28,
                patch_size=14,
            ),
            pad_token_id=tokenizer.pad_token_id,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
    )
    pipeline = diffusers.HunyuanVideoImageToVideoPipeline(
        **texts(tokenizer, encoder),
        transformer=transformer(
            in_channels=2 * 4 + 1, image_condition_type="latent_concat"
        ),
        vae=vae(),
        scheduler=scheduler(),
        image_processor=clip_processor(28),
    )
    call = {
        **CALL,
        "image": picture(0),
        "negative_prompt": "blurry",
        "true_cfg_scale": 3.0,
        "max_sequence_length": 32,
        "prompt_template": {
            **template(tokenizer, "<image>\n"),
            "image_emb_len": SEEN,
            "image_emb_start": 5,
            "image_emb_end": 5 + SEEN,
        },
    }
    return pipeline, call


@example("HunyuanVideoFramepackPipeline", kind="sections, each after those before")
def framepack() -> Made:
    pipeline = diffusers.HunyuanVideoFramepackPipeline(
        **llama_texts(),
        **siglip(8),
        transformer=diffusers.HunyuanVideoFramepackTransformer3DModel(
            **SIZES | {"patch_size": 2},
            guidance_embeds=True,
            has_image_proj=True,
            image_proj_dim=8,
            has_clean_x_embedder=True,
        ),
        vae=vae(),
        scheduler=scheduler(),
    )
    call = {
        **CALL,
        "height": 32,
        "image": picture(0, 32, 32),
        "latent_window_size": 3,
        "max_sequence_length": 16,
        "prompt_template": template(pipeline.tokenizer),
    }
    return pipeline, call


def parts_15(task: str) -> dict[str, Any]:
    """The components of HunyuanVideo 1.5."""
    tokenizer = qwen_tokenizer()
    text_config = transformers.Qwen2_5_VLTextConfig(
        **qwen_config(tokenizer, num_hidden_layers=4)
    )
    second = transformers.ByT5Tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLTextModel(text_config),
        "tokenizer_2": second,
        "text_encoder_2": transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=len(second),
                d_model=32,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=4,
            )
        ),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
            task_type=task,
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "scheduler": scheduler(),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    }


CALL_15: dict[str, Any] = {
    "prompt": 'a panda writes "hello"',
    "negative_prompt": "blurry",
    "num_frames": 5,
    "num_inference_steps": 2,
}


@example(
    "HunyuanVideo15Pipeline",
    kind="text in two forms, a guider",
)
def hunyuan_15() -> Made:
    pipeline = diffusers.HunyuanVideo15Pipeline(**parts_15("t2v"))
    return pipeline, {**CALL_15, "height": 16, "width": 32}


@example(
    "HunyuanVideo15ImageToVideoPipeline",
    kind="text and picture",
)
def hunyuan_15_picture() -> Made:
    pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline(
        **parts_15("i2v"), **siglip(12)
    )
    return pipeline, {**CALL_15, "image": picture(0)}
