"""A damaged tokenizer is refused by its file; a prompt of unknown tokens is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.tokenizers import tell_unknown
from tpuport.errors import TpuportError, WeightsError
from tpuport.models.cogvideox.inputs import load_tokenizer, require_tokenizer

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "first four bytes": lambda data: b"\xff" * 4 + data[4:],
    "four bytes": lambda data: data[:100] + b"\xff" * 4 + data[104:],
    # A model that parses: letters are renamed, so that none is known.
    "no letters": lambda data: bytes(
        0x41 + (byte - 0x61) % 8 if 0x61 <= byte <= 0x7A else byte for byte in data
    ),
    "grown": lambda data: data + b"grown",
    # sentencepiece reads this, and the parser of transformers does not.
    "grown by a group": lambda data: data + bytes.fromhex("8d85b582608dee43a3"),
}


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer alone, to be damaged."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    shutil.copy(demo_folder / "model_index.json", made)
    shutil.copytree(demo_folder / "tokenizer", made / "tokenizer")
    return made


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_vocabulary_is_named(folder: Path, name: str) -> None:
    file = folder / "tokenizer/spiece.model"
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    with pytest.raises(WeightsError, match=r"tokenizer/spiece\.model") as caught:
        require_tokenizer(Checkpoint(folder, "here"))
    assert "tiktoken" not in str(caught.value)
    assert "download" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer_config.json", "[]", "has no usable content"),
        ("tokenizer_config.json", '{"pad_token": ', "is not JSON, or is cut short"),
        ("tokenizer_config.json", '{"pad_token": 5}', "has no usable pad_token"),
        ("special_tokens_map.json", '{"unk_token": 5}', "has no usable unk_token"),
        ("added_tokens.json", "[1]", "has no usable content"),
        ("added_tokens.json", '{"<new>": "1"}', "has no usable <new>"),
        ("vocab.json", '{"a": 0', "is not JSON, or is cut short"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(
    folder: Path, name: str, text: str, said: str
) -> None:
    (folder / "tokenizer" / name).write_text(text)
    with pytest.raises(TpuportError, match=rf"tokenizer/{name}: {said}") as caught:
        require_tokenizer(Checkpoint(folder, "here"))
    assert str(caught.value).endswith("; download the file again")


def alter(folder: Path, file: str, **values: object) -> None:
    path = folder / "tokenizer" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_config_that_fails_in_use_is_found_before_the_stage(folder: Path) -> None:
    alter(folder, "tokenizer_config.json", model_max_length={})
    with pytest.raises(WeightsError, match="here: tokenizer/ does not build a T5Token"):
        require_tokenizer(Checkpoint(folder, "here"))


@pytest.mark.parametrize("role", ["pad_token", "unk_token"])
@pytest.mark.parametrize("token", ["", "no such word"])
def test_a_special_token_is_of_the_vocabulary(
    folder: Path, role: str, token: str
) -> None:
    """transformers would make a new token of the word, or take the unknown one."""
    alter(folder, "special_tokens_map.json", **{role: token})
    with pytest.raises(WeightsError, match=f"{role} is '{token}', which is not in"):
        require_tokenizer(Checkpoint(folder, "here"))


def test_a_prompt_of_unknown_tokens_is_told(demo_folder: Path) -> None:
    tokenizer = load_tokenizer(Checkpoint(demo_folder, "here"))
    said: list[str] = []
    tell_unknown(said.append, tokenizer, ["a red fox", "", "снег", "снег"])
    assert len(said) == 1
    assert "WARNING: T5Tokenizer knows no word of the prompt 'снег'" in said[0]
