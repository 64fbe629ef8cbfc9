"""What the encoders of HunyuanVideo read, against what upstream's pipelines pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpuport.core.spec.stage_work import SHOWN
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import WeightsError
from tpuport.models.hunyuanvideo import inputs

PROMPTS = ['a red fox holds "HELLO" and “world”', "", "a giant panda plays guitar"]


@pytest.fixture(scope="module")
def demo_15(hunyuanvideo_folders: dict[str, Path]) -> Checkpoint:
    return Checkpoint(hunyuanvideo_folders["1.5"], "demo")


@pytest.fixture(scope="module")
def demo_13b(hunyuanvideo_folders: dict[str, Path]) -> Checkpoint:
    return Checkpoint(hunyuanvideo_folders["13b"], "demo")


class Recorder:
    """Stands in for an encoder and keeps what it is called with."""

    dtype = torch.float32
    config = SimpleNamespace(d_model=4)

    def __init__(self) -> None:
        self.calls: list[dict[str, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, **given: Any) -> Any:
        self.calls.append({"input_ids": input_ids, **given})
        states = torch.zeros(*input_ids.shape, 4)

        class Output(tuple):
            hidden_states = (states,) * 3
            pooler_output = states[:, 0]

        return Output((states,))


#: Far over every limit, in words that can be told apart.
LONG = " ".join(f"fox {i}" for i in range(700))


@pytest.mark.parametrize(
    "prompts",
    [[""], ["a red fox"], ["a red fox runs", "{braces} and <tags>\n", LONG]],
    ids=["empty", "one", "three"],
)
def test_token_ids_are_those_upstream_encodes(
    demo_15: Checkpoint, demo_13b: Checkpoint, prompts: list[str]
) -> None:
    from diffusers import HunyuanVideo15Pipeline, HunyuanVideoPipeline
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import (
        DEFAULT_PROMPT_TEMPLATE,
    )

    seen = Recorder()
    chat = inputs.load_tokenizer(demo_15, "tokenizer", "Qwen2Tokenizer")
    HunyuanVideo15Pipeline._get_mllm_prompt_embeds(seen, chat, prompts, "cpu")
    ids, mask = inputs.chat_ids(chat, prompts)
    assert ids.shape == (len(prompts), 1108)
    assert torch.equal(ids, seen.calls[-1]["input_ids"])
    assert torch.equal(mask, seen.calls[-1]["attention_mask"])

    quoted = [f'a sign says "{p}"' for p in prompts]
    bytes_ = inputs.load_tokenizer(demo_15, "tokenizer_2", "ByT5Tokenizer")
    seen = Recorder()
    _, upstream_mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
        bytes_, seen, quoted, "cpu"
    )
    ids, mask, has_glyph = inputs.glyph_ids(bytes_, quoted)
    assert ids.shape == (len(prompts), 256)
    encoded = [call["input_ids"] for call in seen.calls]
    assert torch.equal(ids[has_glyph], torch.cat([ids[:0], *encoded]))
    assert torch.equal(mask, upstream_mask)
    assert torch.equal(has_glyph, upstream_mask.bool().any(dim=1))

    llama = inputs.load_tokenizer(demo_13b, "tokenizer", "LlamaTokenizerFast")
    clip = inputs.load_tokenizer(demo_13b, "tokenizer_2", "CLIPTokenizer")
    seen = Recorder()
    pipe: Any = SimpleNamespace(
        tokenizer=llama, text_encoder=seen, tokenizer_2=clip, text_encoder_2=seen
    )
    given = {"device": "cpu", "dtype": torch.float32}
    HunyuanVideoPipeline._get_llama_prompt_embeds(
        pipe, prompts, DEFAULT_PROMPT_TEMPLATE, **given
    )
    ids, mask = inputs.llama_ids(llama, prompts)
    assert ids.shape == (len(prompts), 351)
    assert torch.equal(ids, seen.calls[-1]["input_ids"])
    assert torch.equal(mask, seen.calls[-1]["attention_mask"])
    HunyuanVideoPipeline._get_clip_prompt_embeds(pipe, prompts, **given)
    ids = inputs.clip_ids(clip, prompts)
    assert ids.shape == (len(prompts), 77)
    assert torch.equal(ids, seen.calls[-1]["input_ids"])


def _said_by(
    name: str, demo_15: Checkpoint, demo_13b: Checkpoint, prompt: str
) -> tuple[list[str], str]:
    """What was said about a prompt, and the part of it that was kept."""
    said: list[str] = []
    if name == "qwen":
        tokenizer = inputs.load_tokenizer(demo_15, "tokenizer", "Qwen2Tokenizer")
        ids = inputs.chat_ids(tokenizer, [prompt], said.append)[0][0, 108:]
    elif name == "byt5":
        tokenizer = inputs.load_tokenizer(demo_15, "tokenizer_2", "ByT5Tokenizer")
        ids = inputs.glyph_ids(tokenizer, [f'"{prompt}"'], said.append)[0][0]
    elif name == "llama":
        tokenizer = inputs.load_tokenizer(demo_13b, "tokenizer", "LlamaTokenizerFast")
        ids = inputs.llama_ids(tokenizer, [prompt], say=said.append)[0][0, 95:]
    else:
        tokenizer = inputs.load_tokenizer(demo_13b, "tokenizer_2", "CLIPTokenizer")
        ids = inputs.clip_ids(tokenizer, [prompt], said.append)[0]
    return said, tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "words", "limit"),
    [("qwen", 1000, 1000), ("byt5", 55, 256), ("llama", 260, 256), ("clip", 80, 77)],
    ids=["qwen", "byt5", "llama", "clip"],
)
def test_what_a_long_prompt_loses_is_said(
    demo_15: Checkpoint, demo_13b: Checkpoint, name: str, words: int, limit: int
) -> None:
    # Every word is one token of the trained vocabularies, and five bytes.
    prompt = " ".join(["cat", "star"][i % 2] for i in range(words)) + " sunset"
    said, kept = _said_by(name, demo_15, demo_13b, prompt)
    (warning,) = said
    assert f"limit of {limit}" in warning
    lost = warning.rpartition("cut off: ")[2].strip("'")
    assert lost
    joined = (kept + lost).replace(" ", "")
    whole = f'Text "{prompt}". ' if name == "byt5" else prompt
    assert joined == whole.replace(" ", "")
    assert _said_by(name, demo_15, demo_13b, "a short prompt")[0] == []


def test_a_long_lost_part_is_shortened(
    demo_15: Checkpoint, demo_13b: Checkpoint
) -> None:
    ((warning,), _) = _said_by("qwen", demo_15, demo_13b, LONG)
    assert warning.endswith("…'")
    assert len(warning) < SHOWN + 150


# ----------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["tokenizer/tokenizer.json", "tokenizer/vocab.json"], "tokenizer/vocab.json"),
        (["tokenizer/tokenizer.json", "tokenizer/merges.txt"], "tokenizer/merges.txt"),
        (["tokenizer/chat_template.jinja"], "chat_template"),
        (["tokenizer_2/tokenizer_config.json"], "tokenizer_2/tokenizer_config.json"),
    ],
    ids=["vocabulary", "merges", "template", "bytes"],
)
def test_a_15_checkpoint_without_tokenizer_files_is_refused(
    demo_15: Checkpoint, tmp_path: Path, gone: list[str], named: str
) -> None:
    copy = _tokenizers(demo_15, tmp_path)
    inputs.require_tokenizers_15(copy)
    for name in gone:
        (copy.folder / name).unlink()
    with pytest.raises(WeightsError, match=named):
        inputs.require_tokenizers_15(copy)


@pytest.mark.parametrize(
    "gone",
    ["tokenizer/tokenizer.json", "tokenizer_2/vocab.json", "tokenizer_2/merges.txt"],
)
def test_a_13b_checkpoint_without_tokenizer_files_is_refused(
    demo_13b: Checkpoint, tmp_path: Path, gone: str
) -> None:
    copy = _tokenizers(demo_13b, tmp_path)
    inputs.require_tokenizers_13b(copy)
    (copy.folder / gone).unlink()
    with pytest.raises(WeightsError, match=gone):
        inputs.require_tokenizers_13b(copy)


def test_a_checkpoint_without_image_processor_is_refused(
    demo_15: Checkpoint, demo_13b: Checkpoint
) -> None:
    inputs.load_feature_extractor(demo_15)
    with pytest.raises(WeightsError, match=r"preprocessor_config\.json"):
        inputs.load_feature_extractor(demo_13b)


@pytest.mark.parametrize(
    "gone",
    [["tokenizer.json"], ["vocab.json", "merges.txt", "added_tokens.json"]],
    ids=["vocab.json", "tokenizer.json"],
)
def test_qwens_tokenizer_may_lie_in_either_form(
    demo_15: Checkpoint, tmp_path: Path, gone: list[str]
) -> None:
    copy = _tokenizers(demo_15, tmp_path)
    for name in gone:
        (copy.folder / "tokenizer" / name).unlink()
    inputs.require_tokenizers_15(copy)
    ids = [
        inputs.chat_ids(
            inputs.load_tokenizer(checkpoint, "tokenizer", "Qwen2Tokenizer"), PROMPTS
        )[0]
        for checkpoint in (demo_15, copy)
    ]
    assert torch.equal(*ids)


def test_a_chat_template_may_lie_in_the_tokenizers_config(
    demo_15: Checkpoint, tmp_path: Path
) -> None:
    copy = _tokenizers(demo_15, tmp_path)
    template = copy.folder / "tokenizer" / "chat_template.jinja"
    path = copy.folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": template.read_text()}))
    template.unlink()
    inputs.require_tokenizers_15(copy)
    tokenizer = inputs.load_tokenizer(copy, "tokenizer", "Qwen2Tokenizer")
    assert "<|im_start|>user" in tokenizer.decode(
        inputs.chat_ids(tokenizer, ["a fox"])[0][0]
    )


def _tokenizers(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A copy of a checkpoint's small files."""
    copy = folder / "copy"
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(checkpoint.folder / name, copy / name)
    shutil.copy(checkpoint.folder / "model_index.json", copy)
    return Checkpoint(copy, "copy")
