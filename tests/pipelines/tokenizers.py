"""Small tokenizers of every kind that the text encoders of pipelines want."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tpuport.models.cogvideox.demo import write_tokenizer
from tpuport.models.hunyuanvideo import demo_tokenizers


def t5_tokenizer() -> Any:
    """For T5 and UMT5: a sentencepiece model of a few dozen pieces."""
    return _read(write_tokenizer)


def clip_tokenizer() -> Any:
    """For CLIP: lower-case words of made-up sentences."""
    return _read(demo_tokenizers.write_clip_tokenizer)


def llama_tokenizer() -> Any:
    """For Llama 3, with the turns of HunyuanVideo's template."""
    return _read(demo_tokenizers.write_llama_tokenizer)


def qwen_tokenizer() -> Any:
    """For Qwen 2 and 2.5: turns may be text, or lists of parts with text."""
    tokenizer = _read(demo_tokenizers.write_qwen_tokenizer)
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = demo_tokenizers.CHAT_TEMPLATE.replace(
        "message.content",
        "(message.content if message.content is string else "
        "message.content | map(attribute='text') | join)",
    )
    return tokenizer


def _read(write: Callable[[Path], None]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "tokenizer")
        return transformers.AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")
