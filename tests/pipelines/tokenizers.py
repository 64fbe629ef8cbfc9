"""Small tokenizers of every kind that the text encoders of pipelines want."""

from __future__ import annotations

import inspect
import re
from typing import Any

import diffusers
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

from tpuport.core.pipelines import stand_in


def t5_tokenizer() -> Any:
    """For T5 and UMT5: a piece for each letter."""
    return stand_in.tokenizer("T5Tokenizer")


def clip_tokenizer() -> Any:
    """For CLIP: a piece for each letter."""
    return stand_in.tokenizer("CLIPTokenizer")


def llama_tokenizer() -> Any:
    """For Llama 3, with the words of HunyuanVideo's template and of prompts."""
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"]
    texts = re.split(r"<[^>]*>|{}", template)
    return stand_in.tokenizer("LlamaTokenizer", [*texts, "a panda plays a guitar"])


def qwen_tokenizer(*texts: str) -> Any:
    """For Qwen 2 and 2.5, with words: turns may be text, or lists of parts with text.

    Args:
        texts: whose words are tokens; by default those of HunyuanVideo-1.5's template.
    """
    function = diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    template = inspect.signature(function).parameters["system_message"].default
    return stand_in.tokenizer("Qwen2Tokenizer", texts or [template])


def qwen_config(tokenizer: Any, **changed: Any) -> dict[str, Any]:
    """The config of a small language model of Qwen's for the tokenizer."""
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "mrope_section": [1, 1, 2],
            "rope_type": "default",
            "rope_theta": 1e6,
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return config | changed


def gemma_tokenizer() -> Any:
    """For Gemma: one token a letter, and bytes for the rest."""
    return stand_in.tokenizer("GemmaTokenizer")
