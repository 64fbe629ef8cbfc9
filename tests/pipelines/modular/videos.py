"""Pipelines of blocks that make videos: parts go in, outputs are asked for."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.pipelines import cosmos, hunyuan, ltx, others, wan
from tests.pipelines.cogvideox import t5_text
from tests.pipelines.example import Made, example
from tests.pipelines.pictures import clip, clip_encoder, clip_processor, picture
from tests.pipelines.tokenizers import gemma_tokenizer, qwen_tokenizer


def pipeline(kind: Any, **components: Any) -> Any:
    """A pipeline of the class with its own blocks, and these components."""
    made = kind()
    made.update_components(**components)
    return made


def wan_pipeline(kind: Any, **components: Any) -> Any:
    usual: dict[str, Any] = {
        **wan.umt5_text(),
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
    made = pipeline(
        diffusers.LTXModularPipeline,
        **t5_text(),
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


@example("LTX25ModularPipeline", kind="blocks, a decoder with local attention")
def ltx_25() -> Made:
    made = ltx_2_pipeline(
        diffusers.LTX25ModularPipeline,
        vae=ltx.vae_2(spatial_compression_ratio=16, temporal_compression_ratio=8),
        diffusion_decoder=ltx.diffusion_decoder(4),
    )
    call = ltx.call_2(
        guidance_scale=None,
        spatio_temporal_guidance_blocks=None,
        height=48,
        width=48,
        num_frames=9,
        output=["videos", "audio"],
    )
    return made, call


@example("EchoModularPipeline", kind="blocks, few steps, video with sound")
def echo() -> Made:
    parts = {
        name: part
        for name, part in ltx_2_pipeline(
            diffusers.LTX2ModularPipeline
        ).components.items()
        if name in diffusers.EchoModularPipeline().component_names
    }
    made = pipeline(diffusers.EchoModularPipeline, **parts)
    call = ltx.call_2(
        guidance_scale=None,
        spatio_temporal_guidance_blocks=None,
        negative_prompt=None,
        num_inference_steps=None,
        sigmas=(1.0, 0.6, 0.0),
        image=picture(1, 32, 32),
        output=["videos", "audio"],
    )
    return made, call


@example("HunyuanVideo15ModularPipeline", kind="blocks, text in two forms")
def hunyuan_15() -> Made:
    made = pipeline(diffusers.HunyuanVideo15ModularPipeline, **hunyuan.parts_15("t2v"))
    return made, hunyuan.CALL_15 | {"height": 16, "width": 32, "output": ["videos"]}


def helios_pipeline(kind: Any, scheduler: Any, **components: Any) -> Any:
    return pipeline(
        kind,
        **components,
        **t5_text(),
        transformer=others.helios_transformer(),
        vae=wan.vae(),
        scheduler=scheduler,
    )


def pyramid_call(**changed: Any) -> dict[str, Any]:
    return wan_call(
        height=64,
        width=64,
        num_frames=5,
        num_latent_frames_per_chunk=2,
        num_inference_steps=None,
        pyramid_num_inference_steps_list=[2, 2],
        **changed,
    )


@example("HeliosModularPipeline", kind="blocks, chunks with a memory of those before")
def helios() -> Made:
    made = helios_pipeline(diffusers.HeliosModularPipeline, others.helios_steps())
    return made, wan_call(num_latent_frames_per_chunk=3)


@example("HeliosPyramidModularPipeline", kind="blocks, from coarse to fine")
def helios_pyramid() -> Made:
    made = helios_pipeline(
        diffusers.HeliosPyramidModularPipeline, others.pyramid_steps()
    )
    return made, pyramid_call()


@example("HeliosPyramidDistilledModularPipeline", kind="blocks, few steps")
def helios_distilled() -> Made:
    made = helios_pipeline(
        diffusers.HeliosPyramidDistilledModularPipeline,
        diffusers.HeliosDMDScheduler(
            stage_range=[0, 0.5, 1], stages=2, gamma=0.25, use_dynamic_shifting=True
        ),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
    )
    return made, pyramid_call(negative_prompt=None)


def cosmos_pipeline(kind: Any, **components: Any) -> Any:
    parts = {**cosmos.omni_parts(), **components, "enable_safety_checker": False}
    return pipeline(kind, **parts)


def cosmos_call(**changed: Any) -> dict[str, Any]:
    changed = {"output": ["videos"], "max_sequence_length": None, **changed}
    usual = {**cosmos.OMNI_CALL, **changed}
    return {k: v for k, v in usual.items() if v is not None}


@example("Cosmos3OmniModularPipeline", kind="blocks, one model of text and video")
def cosmos_3() -> Made:
    return cosmos_pipeline(diffusers.Cosmos3OmniModularPipeline), cosmos_call()


@example("Cosmos3DistilledModularPipeline", kind="blocks, few steps")
def cosmos_3_distilled() -> Made:
    made = cosmos_pipeline(
        diffusers.Cosmos3DistilledModularPipeline,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        distilled_sigmas=[1.0, 0.5],
    )
    return made, cosmos_call(negative_prompt=None, guidance_scale=None)


def animate_pipeline(kind: Any) -> Any:
    return pipeline(
        kind,
        **wan.umt5_text(),
        vae=wan.vae(),
        scheduler=wan.euler(),
        image_encoder=clip_encoder(224, width=1280, patch=112),
        transformer=diffusers.WanAnimate2Transformer3DModel(
            patch_size=(1, 2, 2),
            text_len=16,
            in_dim=36,
            dim=48,
            ffn_dim=32,
            freq_dim=64,
            text_dim=32,
            out_dim=16,
            num_heads=2,
            num_layers=2,
            cross_attn_norm=True,
            use_img_emb=True,
        ),
    )


def animate_call(**changed: Any) -> dict[str, Any]:
    return wan_call(
        image=picture(1, 32, 32),
        driving_video=clip(10, 9, 32, 32),
        segment_frame_length=5,
        prev_segment_conditioning_frames=1,
        height=32,
        width=32,
        num_frames=None,
        **changed,
    )


@example("WanAnimate2ModularPipeline", kind="blocks, motion of a video, a cache")
def animate() -> Made:
    return animate_pipeline(diffusers.WanAnimate2ModularPipeline), animate_call()


@example("WanAnimate2DistilledModularPipeline", kind="blocks, few steps")
def animate_distilled() -> Made:
    made = animate_pipeline(diffusers.WanAnimate2DistilledModularPipeline)
    return made, animate_call(negative_prompt=None)


class QwenProcessor(transformers.Qwen3VLProcessor):
    """Without videos: their processor wants torchvision, which diffusers does not."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        ids = tokenizer.convert_tokens_to_ids
        self.image_token_id = ids("<|image_pad|>")
        self.video_token_id = ids("<|video_pad|>")
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)


@example("MiniMaxH3ModularPipeline", kind="blocks, one sequence of video and sound")
def minimax() -> Made:
    tokenizer = qwen_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 51,  # the text's state is taken after the 50th
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 8,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    made = pipeline(
        diffusers.MiniMaxH3ModularPipeline,
        tokenizer=tokenizer,
        processor=QwenProcessor(transformers.Qwen2VLImageProcessorPil(), tokenizer),
        text_encoder=transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
        ),
        transformer=diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=2,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=8,
            text_dim=8,
            freq_dim=8,
            time_embed_hidden_dim=24,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        vae=diffusers.AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            norm_num_groups=8,
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=8,
            decoder_num_register_tokens=2,
            decoder_ffn_mult=2,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        audio_vae=diffusers.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(2, 2),
            latent_dim=32,
            latent_channels=8,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(2, 2),
            decoder_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3, 7),
            resblock_dilation_sizes=((1, 3), (1, 3)),
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        scheduler=diffusers.MiniMaxH3Scheduler(),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(),
    )
    call = wan_call(
        negative_prompt=None,
        max_sequence_length=None,
        height=32,
        width=32,
        num_frames=124,
    )
    return made, call | {"output": ["videos", "audio"]}
