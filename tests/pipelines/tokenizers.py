"""Small tokenizers of every kind that the text encoders of pipelines want."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tpuport.core.pipelines import stand_in
from tpuport.models.hunyuanvideo import demo_tokenizers


def t5_tokenizer() -> Any:
    """For T5 and UMT5: a piece for each letter."""
    return stand_in.tokenizer("T5Tokenizer")


def clip_tokenizer() -> Any:
    """For CLIP: lower-case words of made-up sentences."""
    return _read(demo_tokenizers.write_clip_tokenizer)


def llama_tokenizer() -> Any:
    """For Llama 3, with the turns of HunyuanVideo's template."""
    return _read(demo_tokenizers.write_llama_tokenizer)


def qwen_tokenizer() -> Any:
    """For Qwen 2 and 2.5: turns may be text, or lists of parts with text."""
    tokenizer = _read(demo_tokenizers.write_qwen_tokenizer)
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = demo_tokenizers.CHAT_TEMPLATE.replace(
        "message.content",
        "(message.content if message.content is string else "
        "message.content | map(attribute='text') | join)",
    )
    return tokenizer


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


def _read(write: Callable[[Path], None]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "tokenizer")
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


def qwen_words_tokenizer(*sentences: str) -> Any:
    """For Qwen: bytes, and one token for each word of the ``sentences``."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    learner = trainers.BpeTrainer(
        vocab_size=4096,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator(sentences, learner)
    learnt = json.loads(words.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=learnt["vocab"], merges=[tuple(pair) for pair in learnt["merges"]]
    )
    marks = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    pads = ("<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks, *pads]})
    tokenizer.chat_template = demo_tokenizers.CHAT_TEMPLATE
    return tokenizer
