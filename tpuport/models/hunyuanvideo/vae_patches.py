"""Patches of the two HunyuanVideo autoencoders.

Both attend over all latent frames in their middle block, every token to its own frame
and the frames before. Upstream builds a mask of all tokens by all tokens; here the
frame of a token says what it sees. If devices split the picture, each has the queries
of its part, and the keys and values of the whole picture are gathered.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns, L = T * Y * X tokens, H
heads, D head dim; t/y/x frames, rows, columns of the queries of a device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.tracing.context import Active, OpContext, current
from tpuport.core.tracing.patching import Patch
from tpuport.models.hunyuanvideo.vae_chunks import DECODER
from tpuport.models.hunyuanvideo.vae_convolutions import ENLARGE, convolutions
from tpuport.patches.diffusers import diffusers_patch
from tpuport.patches.valid_tokens import attend, length_attention

# ------------------------------------------------------------------- attention


def _attend_15(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideo15AttnBlock.forward`` of [B, C, T, Y, X]."""
    normed = self.norm(x)
    query, key, value = (layer(normed) for layer in (self.to_q, self.to_k, self.to_v))
    return self.proj_out(_attend_by_frames(query, key, value, heads=1)) + x


def _mid_block_13b(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideoMidBlock3D.forward`` of [B, C, T, Y, X]."""
    hidden_states = self.resnets[0](hidden_states)
    for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
        if attention is not None:
            size = hidden_states.shape[2:]
            tokens = hidden_states.permute(0, 2, 3, 4, 1).flatten(1, 3)
            tokens = _attend_13b(attention, tokens, size)
            hidden_states = tokens.unflatten(1, size).permute(0, 4, 1, 2, 3)
        hidden_states = resnet(hidden_states)
    return hidden_states


def _attend_13b(
    attention: Any, tokens: torch.Tensor, size: tuple[int, int, int]
) -> torch.Tensor:
    """The ``Attention`` of the middle block on [B, L, C], of frames, rows, columns.

    Its norm takes them as a picture, which where it is split is known as one: the same
    groups of the same numbers.
    """
    normed = attention.group_norm(tokens.transpose(1, 2).unflatten(2, size))
    normed = normed.flatten(2).transpose(1, 2)
    query, key, value = (
        layer(normed).transpose(1, 2).unflatten(2, size)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    out = _attend_by_frames(query, key, value, heads=attention.heads)
    out = attention.to_out[0](out.flatten(2).transpose(1, 2))
    return (out + tokens) / attention.rescale_output_factor


def _attend_by_frames(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Attention of [B, H * D, t, y, x] to the frames of each query and before it."""
    active = _active()
    space = None if active is None else active.context.space
    if active is None or space is None:
        per_frame = query.shape[3] * query.shape[4]
        tokens = [
            x.unflatten(1, (heads, -1)).flatten(3).transpose(2, 3)
            for x in (query, key, value)
        ]
        out = attend(tokens[0], tokens[1], tokens[2], frame_tokens=per_frame)
        return out.transpose(2, 3).reshape(query.shape)
    q, k, v = (active.arrays(x) for x in (query, key, value))
    k, v = (space.gather(x, (3, 4)) for x in (k, v))
    out = _frame_by_frame(active.context, q, k, v, heads)
    mark = Mark(name="attention", dims=(3, 4), given=(3, 4))
    found: torch.Tensor = active.tensors(marked(mark, out, q))
    return found


def _active() -> Active | None:
    """What is being traced; ``None`` in plain torch."""
    try:
        return current()
    except RuntimeError:
        return None


def _frame_by_frame(
    context: OpContext,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
) -> jax.Array:
    """Attention of [B, H * D, t, y, x] to [B, H * D, T, Y, X]: no array has L x L."""
    batch, _, frames, rows, columns = query.shape
    per_frame = key.shape[3] * key.shape[4]
    k, v = (
        jnp.swapaxes(x.reshape(batch, heads, x.shape[1] // heads, -1), 2, 3)
        for x in (key, value)
    )
    q = query.reshape(batch, heads, -1, frames, rows * columns)
    ends = (jnp.arange(frames, dtype=jnp.int32) + 1) * per_frame
    # As many queries as keys are one frame: neighbours of a window they are not.
    alone = k.shape[2] if k.shape[2] == rows * columns else None

    def one_frame(frame: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, end = frame
        lengths = jnp.broadcast_to(end, (batch,))
        return length_attention(context, q, k, v, lengths, alone)

    out = jax.lax.map(one_frame, (jnp.transpose(q, (3, 0, 1, 4, 2)), ends))
    return jnp.transpose(out, (1, 2, 4, 0, 3)).reshape(query.shape)


_MODULE_13B = "models.autoencoders.autoencoder_kl_hunyuan_video"
_MODULE_15 = "models.autoencoders.autoencoder_kl_hunyuanvideo15"

VAE_15: tuple[Patch, ...] = (
    diffusers_patch(
        "hunyuanvideo15-vae-frame-causal-attention",
        _MODULE_15 + ":HunyuanVideo15AttnBlock.forward",
        _attend_15,
        "the mask is filled row by row in a Python loop, an operation a token, "
        "and has L x L entries; its batch dim meets the heads, so that more than one "
        "video fails",
    ),
    DECODER,
    ENLARGE,
    *convolutions(
        "hunyuanvideo15",
        _MODULE_15 + ":HunyuanVideo15CausalConv3d",
        _MODULE_15 + ":HunyuanVideo15ResnetBlock",
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo15``."""

VAE_13B: tuple[Patch, ...] = (
    diffusers_patch(
        "hunyuanvideo-vae-frame-causal-attention",
        _MODULE_13B + ":HunyuanVideoMidBlock3D.forward",
        _mid_block_13b,
        "the attention mask has B x L x L entries: 20 GB for five latent frames "
        "of 720x1280 in one tile",
    ),
    *convolutions(
        "hunyuanvideo",
        _MODULE_13B + ":HunyuanVideoCausalConv3d",
        _MODULE_13B + ":HunyuanVideoResnetBlockCausal3D",
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo``."""
