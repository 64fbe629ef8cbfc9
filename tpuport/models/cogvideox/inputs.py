"""What the stages of CogVideoX start from: token ids, noise, shapes, scaled latents.

Used by the stages and by the same stages in upstream's code: both start from the
same numbers. Legend: B videos of a batch, Lt text tokens, T/Y/X latent frames, rows and
columns, C latent channels.
"""

from __future__ import annotations

from typing import Any

import torch

from tpuport.core.enums import Task
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage_work import StageContext, tell_lost
from tpuport.core.weights import tokenizers
from tpuport.core.weights.checkpoint import Checkpoint

MAX_TEXT_TOKENS = 226
"""The default of upstream's pipeline, ``max_sequence_length``."""


def text_tokens(ctx: StageContext) -> int:
    """Lt: asked for, or the limit of the transformer's config.

    A limit of 224, as 1.5 was trained with, counts as 226: upstream's pipeline does not
    look at the config and takes 226 for every checkpoint.
    """
    asked = ctx.request.options.get("max_sequence_length")
    if asked:
        return int(asked)
    # The stage may run where only the text encoder lies.
    present = (ctx.checkpoint.folder / "transformer" / "config.json").is_file()
    config = ctx.checkpoint.config("transformer") if present else {}
    limit = int(config.get("max_text_seq_length", MAX_TEXT_TOKENS))
    return MAX_TEXT_TOKENS if limit == 224 else limit


def require_tokenizer(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tokenizer has no vocabulary, or a damaged one.

    transformers would fall back to one of special tokens alone, and encode any prompt.

    Raises:
        WeightsError, ArtifactError: a file is missing or damaged.
    """
    checkpoint.upstream_class("tokenizer")
    checkpoint.require("tokenizer/spiece.model", "tokenizer/tokenizer.json")
    load_tokenizer(checkpoint)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a checkpoint, from its files alone."""
    return tokenizers.load_tokenizer(checkpoint, "tokenizer", "T5Tokenizer")


def tokenize(ctx: StageContext, prompts: tuple[str, ...]) -> torch.Tensor:
    """Token ids of shape [len(prompts), Lt]; says what a prompt over the limit lost."""
    limit = text_tokens(ctx)
    tokenizer = load_tokenizer(ctx.checkpoint)
    tokenizers.tell_unknown(ctx.say, tokenizer, prompts)
    for text in dict.fromkeys(prompts):
        whole = tokenizer(text).input_ids
        if len(whole) > limit:
            lost = tokenizer.decode(whole[limit - 1 : -1], skip_special_tokens=True)
            tell_lost(ctx.say, len(whole), limit, lost)
    ids: torch.Tensor = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=limit,
        truncation=True,
        add_special_tokens=True,
        return_tensors="pt",
    ).input_ids
    return ids


def chunk_lengths(frames: int, each: int) -> list[int]:
    """Frames per chunk of ``each``: what is left over is in the first, as upstream."""
    rest = [each] * (max(frames // each, 1) - 1)
    return [frames - sum(rest), *rest]


def latent_shape(
    request: Request, checkpoint: Checkpoint
) -> tuple[int, int, int, int, int]:
    """[B, T, C, Y, X] of a batch, with T padded to a multiple of ``patch_size_t``.

    Half of the channels that an image-to-video transformer takes are the image's.
    """
    config = checkpoint.config("transformer")
    spatial, temporal = vae_strides(checkpoint)
    frames = (request.num_frames - 1) // temporal + 1
    channels = int(config.get("in_channels", 16))
    return (
        request.batch_size,
        frames + padding_frames(request, checkpoint),
        channels // 2 if request.task == Task.IMAGE else channels,
        request.height // spatial,
        request.width // spatial,
    )


def padding_frames(request: Request, checkpoint: Checkpoint) -> int:
    """Latent frames added in front so that ``patch_size_t`` divides T."""
    patch = checkpoint.config("transformer").get("patch_size_t")
    if patch is None:
        return 0
    _, temporal = vae_strides(checkpoint)
    return -((request.num_frames - 1) // temporal + 1) % int(patch)


def vae_strides(checkpoint: Checkpoint) -> tuple[int, int]:
    """Pixels per latent in space and in time, from the VAE's config."""
    config = checkpoint.config("vae")
    blocks = config.get("block_out_channels", (128, 256, 256, 512))
    return 2 ** (len(blocks) - 1), int(config.get("temporal_compression_ratio", 4))


def initial_latents(
    ctx: StageContext, generators: list[torch.Generator]
) -> torch.Tensor:
    """The initial noise: given, or drawn as ``CogVideoXPipeline.prepare_latents`` does.

    The draw is in the dtype of the embeddings, since a generator gives other numbers in
    bfloat16 than in float32.
    """
    given = ctx.inputs.get("initial_latents")
    if given is not None:
        return given
    return draw_noise(ctx, generators)


def draw_noise(ctx: StageContext, generators: list[torch.Generator]) -> torch.Tensor:
    """Noise of the shape of the latents, in the dtype of the embeddings."""
    shape = latent_shape(ctx.request, ctx.checkpoint)
    return ctx.noise(shape, ctx.inputs["prompt_embeds"].dtype, generators)


def scaling_factor(checkpoint: Checkpoint) -> float:
    """What the VAE's latents are multiplied by for the transformer."""
    return float(checkpoint.config("vae").get("scaling_factor", 1.15258426))


def latents_for_vae(ctx: StageContext) -> torch.Tensor:
    """[B, C, T, Y, X], padding cut off and scaled back."""
    padding = padding_frames(ctx.request, ctx.checkpoint)
    latents = ctx.inputs["latents"].float()[:, padding:]
    return 1 / scaling_factor(ctx.checkpoint) * latents.permute(0, 2, 1, 3, 4)
