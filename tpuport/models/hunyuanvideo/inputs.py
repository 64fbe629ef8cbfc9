"""What the encoders of HunyuanVideo start from: token ids, masks, pixels.

Host side only: plain torch tensors and tokenizers, no jax. Templates, crop lengths and
limits are read from diffusers' own code, so that they are upstream's.
Legend: R rows (prompts), L tokens, B videos of a batch, Y rows and X columns of pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

from tpuport.core.files.sources import to_images
from tpuport.core.files.typed import read_json
from tpuport.core.spec.stage_work import StageContext, tell_lost
from tpuport.core.weights import tokenizers
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import WeightsError

Say = Callable[[str], None]

FEATURE_EXTRACTOR = "feature_extractor/preprocessor_config.json"
"""The config of the image processor."""


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """How upstream's 1.5 pipelines ask Qwen about a prompt.

    Attributes:
        system_message: the first turn.
        crop_start: tokens in front of the prompt, cut off the states.
        max_length: tokens kept after the crop.
    """

    system_message: str
    crop_start: int
    max_length: int


def _default(function: Any, parameter: str) -> Any:
    """What upstream's function takes where it is not told."""
    return inspect.signature(function).parameters[parameter].default


def chat_template() -> ChatTemplate:
    """The template of ``HunyuanVideo15Pipeline._get_mllm_prompt_embeds``."""
    from diffusers import HunyuanVideo15Pipeline

    function = HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    return ChatTemplate(
        system_message=_default(function, "system_message"),
        crop_start=_default(function, "crop_start"),
        max_length=_default(function, "tokenizer_max_length"),
    )


# ------------------------------------------------------------------ checkpoint


def _require_bpe(checkpoint: Checkpoint, folder: str) -> None:
    """Refuse a BPE tokenizer without vocabulary.

    transformers would make one of special tokens alone, and encode any prompt.
    """
    for name in ("vocab.json", "merges.txt"):
        checkpoint.require(f"{folder}/{name}", f"{folder}/tokenizer.json")


def require_tokenizers_15(checkpoint: Checkpoint) -> None:
    """Refuse a 1.5 checkpoint without what its tokenizers are made of.

    Raises:
        WeightsError: Qwen's vocabulary or chat template, or ByT5's config is missing.
    """
    _require_bpe(checkpoint, "tokenizer")
    checkpoint.require("tokenizer/tokenizer_config.json")
    config = checkpoint.folder / "tokenizer" / "tokenizer_config.json"
    read = read_json(config, WeightsError, "download the file again")
    if not isinstance(read, dict) or not read.get("chat_template"):
        checkpoint.require("tokenizer/chat_template.jinja")
    # Bytes need no vocabulary; an empty folder would still be a broken download.
    checkpoint.require("tokenizer_2/tokenizer_config.json")
    load_tokenizer(checkpoint, "tokenizer", "Qwen2Tokenizer")
    load_tokenizer(checkpoint, "tokenizer_2", "ByT5Tokenizer")


def require_tokenizers_13b(checkpoint: Checkpoint) -> None:
    """Refuse a 13b checkpoint without the vocabularies of its tokenizers.

    Raises:
        WeightsError: Llama's ``tokenizer.json`` or CLIP's vocabulary is missing.
    """
    checkpoint.require("tokenizer/tokenizer.json")
    _require_bpe(checkpoint, "tokenizer_2")
    load_tokenizer(checkpoint, "tokenizer", "LlamaTokenizerFast")
    load_tokenizer(checkpoint, "tokenizer_2", "CLIPTokenizer")


def load_tokenizer(checkpoint: Checkpoint, folder: str, class_name: str) -> Any:
    """A tokenizer of ``transformers`` from the files of a checkpoint alone.

    A Llama tokenizer is read by ``PreTrainedTokenizerFast``, that is, as its
    ``tokenizer.json`` says: HunyuanVideo's is of Llama 3 and splits bytes, but
    ``LlamaTokenizerFast`` of transformers 5 splits as SentencePiece whatever the file
    says and drops all spaces. https://github.com/huggingface/transformers/issues/45488
    """
    if class_name.startswith("LlamaTokenizer"):
        class_name = "PreTrainedTokenizerFast"
    return tokenizers.load_tokenizer(checkpoint, folder, class_name)


def load_feature_extractor(checkpoint: Checkpoint) -> Any:
    """The SigLIP image processor of a checkpoint, from its files alone."""
    checkpoint.require(FEATURE_EXTRACTOR)
    return tokenizers.load_processor(
        checkpoint, "feature_extractor", "SiglipImageProcessor"
    )


# ----------------------------------------------------------------------- token


def _tell_lost(
    say: Say,
    tokenizer: Any,
    text: str,
    prompt: str,
    limit: int,
    *,
    crop: int = 0,
    special: bool = True,
    ends: int = 0,
    reader: str = "",
) -> None:
    """Say what a tokenizer cuts off the end of ``prompt`` within ``text``.

    Args:
        limit: tokens that are read, after the first ``crop``.
        special: whether special tokens are added to the text.
        ends: how many of the tokens that are read end whatever was cut.
        reader: as :func:`tpuport.core.spec.stage_work.tell_lost` takes it.
    """
    spans = tokenizer(
        text,
        add_special_tokens=special,
        return_offsets_mapping=True,
        verbose=False,
    ).offset_mapping
    if len(spans) <= crop + limit:
        return
    start = text.rfind(prompt)
    end = start + len(prompt) if start >= 0 else len(text)
    if lost := text[spans[crop + limit - ends][0] : end]:
        tell_lost(say, len(spans) - crop, limit, lost, reader)


def chat_ids(
    tokenizer: Any, prompts: Sequence[str], say: Say = _silent
) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen's tokens of prompts: ids and mask, of shape [R, crop_start + max_length].

    The same as ``HunyuanVideo15Pipeline._get_mllm_prompt_embeds`` gives its encoder;
    ``say`` is told what a prompt over the limit lost.
    """
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
        format_text_input,
    )

    template = chat_template()
    for prompt in dict.fromkeys(prompts):
        (turns,) = format_text_input([prompt], template.system_message)
        text = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        _tell_lost(
            say,
            tokenizer,
            text,
            turns[-1]["content"],
            template.max_length,
            crop=template.crop_start,
            special=False,
        )
    batch = tokenizer.apply_chat_template(
        format_text_input(list(prompts), template.system_message),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        padding="max_length",
        max_length=template.crop_start + template.max_length,
        truncation=True,
        return_tensors="pt",
    )
    return batch.input_ids, batch.attention_mask


def glyph_ids(
    tokenizer: Any, prompts: Sequence[str], say: Say = _silent
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ByT5's tokens of the texts that prompts quote.

    Returns:
        ids and mask of shape [R, 256], and [R]: whether a prompt quotes anything. A
        row that does not is padding with an empty mask; upstream leaves its encoder
        out and gives zero states, as :func:`.encoders.byt5_states` does. Source:
        ``HunyuanVideo15Pipeline._get_byt5_prompt_embeds``.
    """
    from diffusers import HunyuanVideo15Pipeline
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
        extract_glyph_texts,
    )

    function = HunyuanVideo15Pipeline._get_byt5_prompt_embeds
    length = int(_default(function, "tokenizer_max_length"))
    texts = [extract_glyph_texts(prompt) for prompt in prompts]
    ids = torch.full((len(texts), length), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for text in dict.fromkeys(t for t in texts if t is not None):
        whole = tokenizer(text, verbose=False).input_ids
        lost = tokenizer.decode(whole[length - 1 : -1], skip_special_tokens=True)
        if lost and len(whole) > length:
            tell_lost(say, len(whole), length, lost, " for quoted texts")
    for row, text in enumerate(texts):
        if text is not None:
            batch = tokenizer(
                text,
                padding="max_length",
                max_length=length,
                truncation=True,
                add_special_tokens=True,
                return_tensors="pt",
            )
            ids[row], mask[row] = batch.input_ids[0], batch.attention_mask[0]
    has_glyph = torch.tensor([text is not None for text in texts])
    return ids, mask, has_glyph


def llama_crop() -> int:
    """Tokens of the 13b prompt template in front of the prompt, cut off the states."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    return int(pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["crop_start"])


def llama_ids(
    tokenizer: Any,
    prompts: Sequence[str],
    max_sequence_length: int = 256,
    say: Say = _silent,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's tokens of prompts: ids and mask, [R, llama_crop() + max_sequence_length].

    The same as ``HunyuanVideoPipeline._get_llama_prompt_embeds`` gives its encoder with
    the default template.
    """
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"]
    length = llama_crop() + max_sequence_length
    for prompt in dict.fromkeys(prompts):
        text, crop = template.format(prompt), llama_crop()
        _tell_lost(say, tokenizer, text, prompt, max_sequence_length, crop=crop)
    batch = tokenizer(
        [template.format(prompt) for prompt in prompts],
        max_length=length,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
        return_attention_mask=True,
    )
    return batch.input_ids, batch.attention_mask


def clip_ids(
    tokenizer: Any, prompts: Sequence[str], say: Say = _silent
) -> torch.Tensor:
    """CLIP's tokens of prompts, of shape [R, 77].

    The same as ``HunyuanVideoPipeline._get_clip_prompt_embeds`` gives its encoder.
    """
    from diffusers import HunyuanVideoPipeline

    function = HunyuanVideoPipeline._get_clip_prompt_embeds
    length = int(_default(function, "max_sequence_length"))
    reader = " of the pooled encoder"
    for prompt in dict.fromkeys(prompts):
        # The last token kept is the end-of-text token.
        _tell_lost(say, tokenizer, prompt, prompt, length, ends=1, reader=reader)
    ids: torch.Tensor = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


# ----------------------------------------------------------------------- image


def image_pixels(feature_extractor: Any, images: Sequence[Image]) -> torch.Tensor:
    """Pixels for SigLIP, [len(images), 3, height, width], float32.

    ``images`` are already cropped to the video's size, as upstream hands them to
    ``HunyuanVideo15ImageToVideoPipeline._get_image_embeds``.
    """
    pixels: torch.Tensor = feature_extractor.preprocess(
        images=list(images), do_resize=True, return_tensors="pt", do_convert_rgb=True
    ).pixel_values
    return pixels


def image_processor() -> Any:
    """The image processor of ``HunyuanVideo15ImageToVideoPipeline``."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import (
        HunyuanVideo15ImageProcessor,
    )

    return HunyuanVideo15ImageProcessor(
        vae_scale_factor=16, do_resize=False, do_convert_rgb=True
    )


def fitted_images(ctx: StageContext) -> list[Image]:
    """The images of a batch, scaled and cropped about the centre to the video's size.

    One where all videos start from the same image, else one for each.
    """
    request = ctx.request
    sources = request.sources[request.slice(ctx.batch)]
    pixels = ctx.inputs["image"][: 1 if len(set(sources)) == 1 else None]
    return [
        image_processor().resize(
            image, height=request.height, width=request.width, resize_mode="crop"
        )
        for image in to_images(pixels)
    ]


def condition_pixels(pictures: Sequence[Image]) -> torch.Tensor:
    """[len(pictures), 3, 1, Y, X] in [-1, 1] for the autoencoder."""
    pixels: torch.Tensor = image_processor().preprocess(
        list(pictures), height=pictures[0].height, width=pictures[0].width
    )
    return pixels.unsqueeze(2)
