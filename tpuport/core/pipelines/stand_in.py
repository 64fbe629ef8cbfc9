"""A pipeline's folder made from configs alone: for plans, and for small trials.

The folder is in the layout that ``save_pretrained`` writes. Tokenizers stand in for the
published ones: a token is a letter. Their texts have other token counts, which matters
only where a pipeline does not pad its prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers

from tpuport.errors import PluginError

#: Pieces with a meaning of their own in each kind of vocabulary.
_T5 = ("<pad>", "</s>", "<unk>")
_CLIP = ("<|startoftext|>", "<|endoftext|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_configs(folder: Path, configs: Mapping[str, Any]) -> None:
    """Write a folder without weights.

    Args:
        folder: empty.
        configs: ``model_index``, and the config of each component that has one.

    Raises:
        PluginError: a component has neither a config nor a tokenizer that can be made.
    """
    index = configs["model_index"]
    _write(folder / "model_index.json", index)
    for name, entry in index.items():
        if not isinstance(entry, list) or None in entry:
            continue
        library, class_name = entry
        place = folder / name
        place.mkdir(parents=True)
        if name in configs:
            config = {"_class_name": class_name, **configs[name]}
            _write(place / _file_of(class_name), config)
        elif "Tokenizer" in class_name:
            tokenizer(class_name).save_pretrained(place)
        elif library == "diffusers" and "Scheduler" in class_name:
            getattr(diffusers, class_name)().save_pretrained(place)
        else:
            raise PluginError(f"there is no config of {name}, a {class_name}")


def write_random(folder: Path, configs: Mapping[str, Any], seed: int = 0) -> None:
    """Write a folder with random weights, which only small configs are for.

    Args:
        folder: empty.
        configs: as of :func:`write_configs`.
        seed: of the weights.

    Raises:
        PluginError: as of :func:`write_configs`.
    """
    write_configs(folder, configs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, entry in configs["model_index"].items():
            if name not in configs or not isinstance(entry, list):
                continue
            library, class_name = entry
            cls = getattr(
                {"transformers": transformers}.get(library, diffusers), class_name
            )
            if not issubclass(cls, torch.nn.Module):
                continue
            if hasattr(cls, "from_config"):
                module = cls.from_config(dict(configs[name]))
            else:
                module = cls(cls.config_class(**configs[name]))
            module.save_pretrained(folder / name)


def tokenizer(class_name: str) -> Any:
    """A tokenizer of a class of transformers, with a token for each letter.

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
        return transformers.CLIPTokenizer(vocab=_numbered(words), merges=[])
    if kind in ("Gemma", "Llama"):
        others = [f"<0x{byte:02X}>" for byte in range(256)]
        words = [*_GEMMA, "▁", *letters, *others]
        return transformers.GemmaTokenizer(vocab=_numbered(words), merges=[])
    if kind.startswith("Qwen"):
        made = transformers.Qwen2Tokenizer(vocab=_numbered(alphabet), merges=[])
        made.add_special_tokens({"additional_special_tokens": list(_QWEN)})
        return made
    raise PluginError(
        f"there is no stand-in for a {class_name}; give --weights a folder, in which "
        "the tokenizer is"
    )


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _file_of(class_name: str) -> str:
    """The file that holds the config of a class."""
    if "Scheduler" in class_name:
        return "scheduler_config.json"
    processor = class_name.endswith(("Processor", "FeatureExtractor"))
    return "preprocessor_config.json" if processor else "config.json"


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
