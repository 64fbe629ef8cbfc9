"""Folders of full-size configs, for the rows of docs/performance.md without a plugin.

``python -m tests.measure.folders NAME FOLDER`` writes what ``tpuport plan`` and
``tpuport compile`` read of a published checkpoint: the index, the configs of
the components, a scheduler and tokenizers. There are no weights. The tokenizers are
small ones of the tests; a prompt is filled up to the length of the pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines import ltx2

from tests.pipelines.tokenizers import (
    clip_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    t5_tokenizer,
)
from tpuport.plugins import get_port


def xxl(kind: str, vocabulary: int) -> Any:
    """The encoder of T5's or UMT5's largest size."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def wan() -> Any:
    """``Wan-AI/Wan2.1-T2V-14B-Diffusers``: the class's own defaults are the 14B's."""
    with torch.device("cpu"):  # the scheduler moves its table
        scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        )
    return diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=xxl("UMT5", 256384),
        transformer=diffusers.WanTransformer3DModel(),
        vae=diffusers.AutoencoderKLWan(),
        scheduler=scheduler,
    )


def hunyuan_video() -> Any:
    """``hunyuanvideo-community/HunyuanVideo``."""
    llama = transformers.LlamaConfig(
        vocab_size=128320,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    clip = transformers.CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        projection_dim=768,
    )
    return diffusers.HunyuanVideoPipeline(
        tokenizer=llama_tokenizer(),
        text_encoder=transformers.LlamaModel(llama),
        tokenizer_2=clip_tokenizer(),
        text_encoder_2=transformers.CLIPTextModel(clip),
        transformer=diffusers.HunyuanVideoTransformer3DModel(),
        vae=diffusers.AutoencoderKLHunyuanVideo(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def mochi() -> Any:
    """``genmo/mochi-1-preview``."""
    return diffusers.MochiPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=xxl("T5", 32128),
        transformer=diffusers.MochiTransformer3DModel(),
        vae=diffusers.AutoencoderKLMochi(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )


def ltx_2() -> Any:
    """``Lightricks/LTX-2``, 19B, with sound."""
    gemma = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=3840,
            intermediate_size=15360,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            sliding_window=1024,
        ),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=896,
            patch_size=14,
        ),
    )
    return diffusers.LTX2Pipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=transformers.Gemma3ForConditionalGeneration(gemma),
        connectors=ltx2.LTX2TextConnectors(),
        transformer=diffusers.LTX2VideoTransformer3DModel(),
        vae=diffusers.AutoencoderKLLTX2Video(),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(),
        vocoder=ltx2.LTX2Vocoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    )


def cogvideox() -> Any:
    """``THUDM/CogVideoX1.5-5B``."""
    configs = get_port("cogvideox").variant("1.5-5b").configs
    return diffusers.CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=xxl("T5", 32128),
        transformer=_of(diffusers.CogVideoXTransformer3DModel, configs["transformer"]),
        vae=_of(diffusers.AutoencoderKLCogVideoX, configs["vae"]),
        scheduler=diffusers.CogVideoXDPMScheduler(
            snr_shift_scale=1.0,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def _of(kind: Any, config: Any) -> Any:
    return kind.from_config({k: v for k, v in config.items() if k[0] != "_"})


MODELS: dict[str, Callable[[], Any]] = {
    "cogvideox1.5-5b": cogvideox,
    "wan2.1-14b": wan,
    "hunyuanvideo-13b": hunyuan_video,
    "mochi": mochi,
    "ltx-2": ltx_2,
}


def write(name: str, folder: Path) -> None:
    """Write the folder of a model of ``MODELS``; no number of a weight is made."""
    with torch.device("meta"):
        pipeline = MODELS[name]()
    pipeline.save_config(folder)
    for part, component in pipeline.components.items():
        if isinstance(component, transformers.PreTrainedModel):
            component.config.save_pretrained(folder / part)
        elif isinstance(component, diffusers.ModelMixin):
            component.save_config(folder / part)
        elif component is not None:
            component.save_pretrained(folder / part)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
