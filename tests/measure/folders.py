"""Folders of full-size configs, for the rows of docs/performance.md without a plugin.

``python -m tests.measure.folders NAME FOLDER`` writes what ``tpuport plan`` and
``tpuport compile`` read of a published checkpoint: the index, the configs of
the components, a scheduler and tokenizers. There are no weights. The tokenizers are
small ones of the tests; a prompt is filled up to the length of the pipeline. Models
with a plugin need no folder: ``tpuport plan --model NAME --variant NAME``.
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

from tests.pipelines.parts import gemma_tokenizer, t5_tokenizer


def mochi() -> Any:
    """``genmo/mochi-1-preview``."""
    text = transformers.T5Config(
        vocab_size=32128,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    return diffusers.MochiPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=transformers.T5EncoderModel(text),
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


MODELS: dict[str, Callable[[], Any]] = {"mochi": mochi, "ltx-2": ltx_2}


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
