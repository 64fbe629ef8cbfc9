"""The tokenizers of the demo checkpoints, trained on made-up sentences.

Both language models' tokenizers cut upstream's prompt template into as many tokens as
the published tokenizers do. The pipelines' fixed crop then ends right where the prompt
starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from tpuport.core.spec.demo_checkpoint import demo_sentences
from tpuport.models.hunyuanvideo.inputs import chat_template

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Turns in the form Qwen was trained on."""


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _merges(backend: Any, corpus: Sequence[str], suffix: str = "") -> list[list[str]]:
    """Byte-pair merges under which every word of ``corpus`` becomes one token.

    Args:
        backend: whose normalizer and pre-tokenizer cut the corpus.
        corpus: the sentences to train on.
        suffix: marks the last letter of a word.
    """
    marks: dict[str, Any] = {"end_of_word_suffix": suffix} if suffix else {}
    learner = Tokenizer(models.BPE(**marks))
    if backend.normalizer is not None:
        learner.normalizer = backend.normalizer
    learner.pre_tokenizer = backend.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        **marks,
    )
    learner.train_from_iterator(corpus, trainer)
    merges: list[list[str]] = json.loads(learner.to_str())["model"]["merges"]
    return merges


def _vocabulary(
    merges: Sequence[Sequence[str]], special: Sequence[str], suffix: str = ""
) -> dict[str, int]:
    """Ids of all bytes, then of the merges, then of the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    endings = [letter + suffix for letter in alphabet] if suffix else []
    tokens = [*alphabet, *endings, *map("".join, merges), *special]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def _write_bpe(
    folder: Path, vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> None:
    write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _added(ids: Mapping[str, int]) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        str(i): {"content": token, **flags, "special": True} for token, i in ids.items()
    }


def write_qwen_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of Qwen's form, with its chat template."""
    from transformers import Qwen2Tokenizer

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    turns = f"system\n{chat_template().system_message}", "user\n", "assistant\n"
    merges = _merges(Qwen2Tokenizer().backend_tokenizer, [*turns, *demo_sentences()])
    base = _vocabulary(merges, ())
    added = {token: len(base) + i for i, token in enumerate(special)}
    _write_bpe(folder, base, merges)
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {
        **roles,
        "added_tokens_decoder": _added(added),
        "bos_token": None,
        "model_max_length": 131072,
        "padding_side": "right",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", roles)
    write_json(folder / "added_tokens.json", added)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def write_byt5_tokenizer(folder: Path) -> None:
    """The tokenizer of bytes, which has no vocabulary."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(folder)


def write_llama_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of Llama 3's form, in one ``tokenizer.json``."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<pad>",
    )
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"]
    for token in special:
        template = template.replace(token, "\0")
    turns = [turn for turn in template.split("\0") if turn]
    merges = _merges(backend, [*turns, *demo_sentences()])
    backend.model = models.BPE(
        vocab=_vocabulary(merges, ()), merges=[(a, b) for a, b in merges]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    start = special[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A",
        pair=f"{start} $A {start} $B",
        special_tokens=[(start, backend.token_to_id(start))],
    )
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    roles = {
        "bos_token": start,
        "eos_token": "<|end_of_text|>",
        "pad_token": "<pad>",
    }
    config = {
        **roles,
        "model_max_length": 256,
        "padding_side": "right",
        "tokenizer_class": "LlamaTokenizer",
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", roles)


def write_clip_tokenizer(folder: Path) -> None:
    """A lower-case byte-level tokenizer of CLIP's form."""
    from transformers import CLIPTokenizer

    start, end, suffix = "<|startoftext|>", "<|endoftext|>", "</w>"
    backend = CLIPTokenizer().backend_tokenizer
    merges = _merges(backend, demo_sentences(), suffix)
    _write_bpe(folder, _vocabulary(merges, (start, end), suffix), merges)
    roles = {
        "bos_token": start,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
    }
    config = {**roles, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", roles)
