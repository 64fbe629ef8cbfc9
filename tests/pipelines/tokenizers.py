"""Small tokenizers of every kind that the text encoders of pipelines want."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import transformers

from tpuport.models.cogvideox.demo import write_tokenizer


def t5_tokenizer() -> Any:
    """For T5 and UMT5: a sentencepiece model of a few dozen pieces."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "tokenizer")
        return transformers.AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")


def gemma_tokenizer() -> Any:
    """For Gemma: one token a letter, and bytes for the rest."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    letters = [chr(code) for code in range(33, 127)]
    others = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = (*special, "▁", *letters, *others)
    return transformers.GemmaTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[]
    )
