"""Tokenizers of a checkpoint: read from its files alone, and found to know letters.

transformers makes a tokenizer of whatever it finds: of a damaged vocabulary one of
special tokens alone, that turns every prompt into unknown tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from tpuport.core.files.typed import checked, read_json
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.configs import building
from tpuport.errors import WeightsError, damaged, quoted

_REMEDY = "download the file again"
_LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"


def load_processor(checkpoint: Checkpoint, folder: str, class_name: str) -> Any:
    """A tokenizer or image processor of ``transformers`` from a checkpoint's folder.

    Args:
        class_name: of ``transformers``.

    Raises:
        WeightsError: the class that ``model_index.json`` names does not exist, or no
            ``class_name`` is made of the files.
    """
    checkpoint.upstream_class(folder)
    cls = getattr(importlib.import_module("transformers"), class_name)
    path = checkpoint.folder / folder
    with building(class_name, checkpoint.named(folder, "")):
        return cls.from_pretrained(path, local_files_only=True)


def load_tokenizer(checkpoint: Checkpoint, folder: str, class_name: str) -> Any:
    """A tokenizer of a checkpoint; loaded once.

    Raises:
        WeightsError: as :func:`load_processor`; or a file is damaged: the message
            names the file; or a special token is not in the vocabulary.
        ArtifactError: a field of a file has another type than transformers reads.
    """
    key = (folder, class_name)
    return checkpoint.kept(key, lambda: _load(checkpoint, folder, class_name))


def _load(checkpoint: Checkpoint, folder: str, class_name: str) -> Any:
    path = checkpoint.folder / folder
    holds = []
    for file in sorted(path.iterdir()):
        if kind := _TYPES.get(file.name):
            found = read_json(file, WeightsError, _REMEDY)
            checked(kind, found, file, _REMEDY, extra="ignore")
        read = _READERS.get(file.name)
        if read is not None:
            with building("vocabulary", checkpoint.named(folder, file.name)):
                holds.append(read(str(file)))
    tokenizer = load_processor(checkpoint, folder, class_name)
    for role, token in tokenizer.special_tokens_map.items():
        if holds and isinstance(token, str) and not any(has(token) for has in holds):
            raise damaged(
                f"{checkpoint.named(folder, '')}: {role} is {quoted(token)}, which is "
                "not in the vocabulary",
                "the folder",
            )
    # A config that cannot be may be found by its first use alone.
    with building(class_name, checkpoint.named(folder, "")):
        tokenizer(["a", _LETTERS], padding=True, truncation=True, max_length=9)
        unknown = all_unknown(tokenizer, tokenizer(_LETTERS).input_ids)
    if unknown:
        found = ", ".join(sorted(p.name for p in path.iterdir() if p.name in _READERS))
        raise damaged(
            f"{checkpoint.named(folder, found or '')}: the tokenizer knows no letter",
            "the folder",
        )
    return tokenizer


_Token = str | dict[str, Any] | None


class _Tokens(TypedDict, total=False):
    """The special tokens, as a text or as the fields of an ``AddedToken``."""

    bos_token: _Token
    cls_token: _Token
    eos_token: _Token
    mask_token: _Token
    pad_token: _Token
    sep_token: _Token
    unk_token: _Token
    additional_special_tokens: list[str | dict[str, Any]] | None


#: What transformers takes each file of a tokenizer for, and does not check.
_TYPES: dict[str, Any] = {
    "added_tokens.json": dict[str, int],
    "special_tokens_map.json": _Tokens,
    "tokenizer_config.json": _Tokens,
    "vocab.json": dict[str, int],
}


def _read_sentencepiece(file: str) -> Callable[[str], bool]:
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    read = SentencePieceProcessor()
    read.LoadFromFile(file)
    # The parser of transformers is stricter.
    proto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
    proto.FromString(Path(file).read_bytes())
    return lambda token: read.IdToPiece(read.PieceToId(token)) == token


def _read_fast(file: str) -> Callable[[str], bool]:
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(file)
    return lambda token: read.token_to_id(token) is not None


#: What reads each file with a vocabulary to its end, and tells which tokens it has.
_READERS: dict[str, Callable[[str], Callable[[str], bool]]] = {
    "spiece.model": _read_sentencepiece,
    "tokenizer.json": _read_fast,
}


def all_unknown(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether no token is of the text: all are unknown, special or blanks."""
    left = set(ids) - {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    tokens = tokenizer.convert_ids_to_tokens(sorted(left))
    return not any(token.strip("▁Ġ ") for token in tokens)


def tell_unknown(
    say: Callable[[str], None], tokenizer: Any, prompts: Sequence[str]
) -> None:
    """Warn of prompts that the tokenizer reads nothing of."""
    for prompt in dict.fromkeys(prompts):
        ids = tokenizer(prompt, verbose=False).input_ids
        if prompt.strip() and all_unknown(tokenizer, ids):
            say(
                f"WARNING: {type(tokenizer).__name__} knows no word of the prompt "
                f"{prompt[:60]!r}: every token is unknown, and the video will not be "
                "of it; write the prompt in a language and script of the model"
            )
