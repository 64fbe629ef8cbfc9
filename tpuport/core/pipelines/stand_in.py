"""A pipeline's folder made from configs alone: for plans, and for small trials.

The folder is in the layout that ``save_pretrained`` writes. Tokenizers stand in for the
published ones: a token is a letter, or a word of the texts that the configs name. Their
texts have other token counts, which matters only where a pipeline does not pad its
prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
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

from tpuport.core.pipelines.folder import library_named, without_bars
from tpuport.errors import PluginError

#: Pieces with a meaning of their own in each kind of vocabulary.
_T5 = ("<pad>", "</s>", "<unk>")
_CLIP = ("<|startoftext|>", "<|endoftext|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_QWEN = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<pad>", "<image>"),
)

#: Turns of text, or of parts with text, as Qwen was trained on.
_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + "
    "(message.content if message.content is string else "
    "message.content | map(attribute='text') | join) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: How Llama 3 cuts a text into words.
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_configs(folder: Path, configs: Mapping[str, Any]) -> None:
    """Write a folder without weights.

    Args:
        folder: empty.
        configs: ``model_index``, and the config of each component that has one. Of a
            tokenizer it may have ``texts``: see :func:`tokenizer`.

    Raises:
        PluginError: a component has neither a config nor a tokenizer that can be made.
    """
    index = configs["model_index"]
    _write(folder / "model_index.json", index)
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or None in entry:
            continue
        library, class_name = entry
        place = folder / name
        place.mkdir(parents=True)
        if "Tokenizer" in class_name:
            tokenizer(class_name, **configs.get(name, {})).save_pretrained(place)
        elif name in configs:
            config = {"_class_name": class_name, **configs[name]}
            _write(place / _file_of(class_name), config)
        elif library == "diffusers" and "Scheduler" in class_name:
            getattr(diffusers, class_name)().save_pretrained(place)
        else:
            raise PluginError(f"there is no config of {name}, a {class_name}")


def write_random(folder: Path, configs: Mapping[str, Any]) -> None:
    """Write a folder with random weights, which only small configs are for.

    Args:
        folder: empty.
        configs: as of :func:`write_configs`.

    Raises:
        PluginError: as of :func:`write_configs`.
        ValueError: a class takes no such config; names the component.
    """
    write_configs(folder, configs)
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(0)
        for name, entry in configs["model_index"].items():
            if name not in configs or not isinstance(entry, list):
                continue
            cls = class_of(*entry)
            if not issubclass(cls, torch.nn.Module):
                continue
            try:
                if hasattr(cls, "from_config"):
                    module = cls.from_config(dict(configs[name]))
                else:
                    module = cls(cls.config_class(**configs[name]))
            except Exception as error:  # upstream's, of a config that is none
                raise ValueError(f"{name}, a {entry[1]}: {error}") from error
            # Zeros hide all that comes before them, and ones of a norm that it counts.
            for weight in module.parameters():
                if (weight == weight.flatten()[0]).all():
                    noise = torch.randn_like(weight) / 10
                    weight.data += noise
            module.save_pretrained(folder / name)


def class_of(library: str, name: str) -> Any:
    """The class that an index names.

    Raises:
        PluginError: there is none.
    """
    found = getattr(library_named(library), name, None)
    if not isinstance(found, type):
        raise PluginError(f"there is no class {name} in {library}")
    return found


def tokenizer(class_name: str, texts: Sequence[str] = ()) -> Any:
    """A tokenizer of a class of transformers, with a token for each letter.

    Args:
        texts: whose words are tokens too, of a tokenizer of Llama or Qwen.

    Raises:
        PluginError: no stand-in is known for the class.
    """
    letters = [chr(code) for code in range(33, 127)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kind = class_name.removesuffix("Fast").removesuffix("Tokenizer")
    if kind == "ByT5":
        return transformers.ByT5Tokenizer()
    if kind in ("T5", "UMT5"):
        pieces = [(piece, 0.0) for piece in _T5] + [
            (one, -3.0) for one in ("▁", *letters)
        ]
        return transformers.T5Tokenizer(vocab=pieces)
    if kind == "CLIP":
        words = [*alphabet, *(f"{one}</w>" for one in alphabet), *_CLIP]
        made = transformers.CLIPTokenizer(vocab=_numbered(words), merges=[])
        made.model_max_length = 77
        return made
    if kind == "Llama":
        return _llama(texts)
    if kind == "Gemma":
        others = [f"<0x{byte:02X}>" for byte in range(256)]
        words = [*_GEMMA, "▁", *letters, *others]
        return transformers.GemmaTokenizer(vocab=_numbered(words), merges=[])
    if kind.startswith("Qwen"):
        splitter = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
        merges = _merges(splitter, texts)
        known = _numbered([*alphabet, *map("".join, merges)])
        made = transformers.Qwen2Tokenizer(vocab=known, merges=merges)
        made.add_special_tokens({"additional_special_tokens": list(_QWEN)})
        made.chat_template = _TURNS
        return made
    raise PluginError(
        f"there is no stand-in for a {class_name}; give --weights a folder, in which "
        "the tokenizer is"
    )


def _merges(splitter: Any, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of pieces to join, under which every word of the texts is one token."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(vocab_size=8192, min_frequency=1, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    pairs = json.loads(learner.to_str())["model"]["merges"]
    return [(first, second) for first, second in pairs]


def _llama(texts: Sequence[str]) -> Any:
    """A tokenizer of bytes and words in Llama 3's form; marks have ids 0 to 6."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    merges = _merges(splitter, texts)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = _numbered([*_LLAMA, *alphabet, *map("".join, merges)])
    backend = Tokenizer(models.BPE(vocab=words, merges=merges))
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in _LLAMA]
    )
    start, end = _LLAMA[:2]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A",
        pair=f"{start} $A {start} $B",
        special_tokens=[(start, words[start])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=start, eos_token=end, pad_token="<pad>"
    )


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _file_of(class_name: str) -> str:
    if "Scheduler" in class_name:
        return "scheduler_config.json"
    if "Guidance" in class_name:
        return "guider_config.json"
    processor = class_name.endswith(("Processor", "FeatureExtractor"))
    return "preprocessor_config.json" if processor else "config.json"


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
