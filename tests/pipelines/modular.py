"""Pipelines of blocks: components are handed in, and outputs asked for by name."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.pipelines import ltx, wan
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, clip_encoder, clip_processor, picture
from tests.pipelines.tokenizers import gemma_tokenizer, t5_tokenizer


def pipeline(kind: Any, **components: Any) -> Any:
    """A pipeline of the class with its own blocks, and these components."""
    made = kind()
    made.update_components(**components)
    return made


def wan_pipeline(kind: Any, **components: Any) -> Any:
    tokenizer = t5_tokenizer()
    usual: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": wan.text_encoder(len(tokenizer)),
        "vae": wan.vae(),
        "scheduler": wan.unipc(),
    }
    return pipeline(kind, **usual | components)


def wan_call(**changed: Any) -> dict[str, Any]:
    return wan.call(guidance_scale=None, output=["videos"], **changed)


@example("WanModularPipeline", kind="blocks", gate=True)
def wan_2_1() -> Made:
    made = wan_pipeline(diffusers.WanModularPipeline, transformer=wan.transformer())
    return made, wan_call()


@example("Wan22ModularPipeline", kind="blocks, two transformers")
def wan_2_2() -> Made:
    made = wan_pipeline(
        diffusers.Wan22ModularPipeline,
        transformer=wan.transformer(),
        transformer_2=wan.transformer(),
    )
    return made, wan_call(num_inference_steps=3)


@example("WanImage2VideoModularPipeline", kind="blocks, a picture, CLIP")
def wan_image() -> Made:
    made = wan_pipeline(
        diffusers.WanImage2VideoModularPipeline,
        transformer=wan.transformer(in_channels=36, image_dim=8),
        image_encoder=clip_encoder(8),
        image_processor=clip_processor(8),
    )
    return made, wan_call(image=picture(1))


@example("Wan22Image2VideoModularPipeline", kind="blocks, two transformers, a picture")
def wan_image_2_2() -> Made:
    made = wan_pipeline(
        diffusers.Wan22Image2VideoModularPipeline,
        transformer=wan.transformer(in_channels=36),
        transformer_2=wan.transformer(in_channels=36),
    )
    return made, wan_call(image=picture(1), num_inference_steps=3)


@example("Wan22VaceModularPipeline", kind="blocks, control by a video and a mask")
def wan_vace() -> Made:
    made = wan_pipeline(
        diffusers.Wan22VaceModularPipeline,
        transformer=wan.vace_transformer(),
        transformer_2=wan.vace_transformer(),
    )
    masks = [one.convert("L") for one in clip(20, 9)]
    return made, wan_call(video=clip(1, 9), mask=masks, num_inference_steps=3)


@example("LTXModularPipeline", kind="blocks")
def ltx_1() -> Made:
    tokenizer = t5_tokenizer()
    made = pipeline(
        diffusers.LTXModularPipeline,
        tokenizer=tokenizer,
        text_encoder=ltx.text_encoder(len(tokenizer)),
        transformer=ltx.transformer(),
        vae=ltx.vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    return made, ltx.call(guidance_scale=None, output=["videos"])


def ltx_2_pipeline(kind: Any, **components: Any) -> Any:
    tokenizer = gemma_tokenizer()
    usual: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": ltx.gemma(len(tokenizer)),
        "connectors": ltx.connectors(),
        "transformer": ltx.transformer_2(),
        "vae": ltx.vae_2(),
        "audio_vae": ltx.audio_vae(),
        "vocoder": ltx.vocoder(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    return pipeline(kind, **usual | components)


@example("LTX2ModularPipeline", kind="blocks, video with sound")
def ltx_2() -> Made:
    made = ltx_2_pipeline(diffusers.LTX2ModularPipeline)
    call = ltx.call_2(
        guidance_scale=None,
        spatio_temporal_guidance_blocks=None,
        output=["videos", "audio"],
    )
    return made, call
