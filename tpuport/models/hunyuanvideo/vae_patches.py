"""Patches of the two HunyuanVideo autoencoders.

Both attend over all latent frames in their middle block, every token to its own frame
and the frames before. Upstream builds a mask of all tokens by all tokens; here the
frame of a token says what it sees. If devices split the picture, each has the queries
of its part, and the keys and values of the whole picture are gathered.

The autoencoder of 1.5 looks back in time only and is decoded chunk by chunk. Its causal
convolutions keep the last two frames of their input, its attention the keys and values
of all frames so far. Only the first chunk has the first frame, which upsampling in time
treats by itself.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns, L = T * Y * X tokens, H
heads, D head dim; t/y/x frames, rows, columns of the queries, of a chunk and a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from tpuport.core.layers.attention_lengths import length_attention
from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.tracing.chunk_state import current_chunk
from tpuport.core.tracing.context import Active, OpContext, current
from tpuport.core.tracing.patching import Patch
from tpuport.patches.diffusers import diffusers_patch
from tpuport.patches.valid_tokens import attend

# ------------------------------------------------------------------- attention


def _attend_15(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideo15AttnBlock.forward`` of [B, C, T, Y, X]."""
    normed = self.norm(x)
    query, key, value = (layer(normed) for layer in (self.to_q, self.to_k, self.to_v))
    return self.proj_out(_attend_by_frames(self, query, key, value, heads=1)) + x


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
    out = _attend_by_frames(attention, query, key, value, heads=attention.heads)
    out = attention.to_out[0](out.flatten(2).transpose(1, 2))
    return (out + tokens) / attention.rescale_output_factor


def _attend_by_frames(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Attention of [B, H * D, t, y, x] to the frames of each query and before it."""
    active, chunk = _active(), current_chunk()
    if active is None or (chunk is None and active.context.space is None):
        per_frame = query.shape[3] * query.shape[4]
        tokens = [
            x.unflatten(1, (heads, -1)).flatten(3).transpose(2, 3)
            for x in (query, key, value)
        ]
        out = attend(tokens[0], tokens[1], tokens[2], frame_tokens=per_frame)
        return out.transpose(2, 3).reshape(query.shape)
    start: Any = 0
    if chunk is not None:
        start = chunk.start
        key = chunk.with_all_before(module, "keys", key)
        value = chunk.with_all_before(module, "values", value)
    context = active.context
    q, k, v = (active.arrays(x) for x in (query, key, value))
    picture = q
    if context.space is not None:
        k, v = (context.space.gather(x, (3, 4)) for x in (k, v))
    out = _frame_by_frame(context, q, k, v, heads, start)
    if context.space is not None:
        mark = Mark(name="attention", dims=(3, 4), given=(3, 4))
        out = marked(mark, out, picture)
    found: torch.Tensor = active.tensors(out)
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
    start: Any,
) -> jax.Array:
    """Attention of [B, H * D, t, y, x] to [B, H * D, T, Y, X]: no array has L x L.

    Args:
        start: the frame of the keys that the first one of the queries is.
    """
    batch, _, frames, rows, columns = query.shape
    per_frame = key.shape[3] * key.shape[4]
    k, v = (
        jnp.swapaxes(x.reshape(batch, heads, x.shape[1] // heads, -1), 2, 3)
        for x in (key, value)
    )
    q = query.reshape(batch, heads, -1, frames, rows * columns)
    ends = (start + jnp.arange(frames, dtype=jnp.int32) + 1) * per_frame
    # As many queries as keys are one frame: neighbours of a window they are not.
    alone = k.shape[2] if k.shape[2] == rows * columns else None

    def one_frame(frame: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, end = frame
        lengths = jnp.broadcast_to(end, (batch,))
        return length_attention(context, q, k, v, lengths, alone)

    out = jax.lax.map(one_frame, (jnp.transpose(q, (3, 0, 1, 4, 2)), ends))
    return jnp.transpose(out, (1, 2, 4, 0, 3)).reshape(query.shape)


# ---------------------------------------------------------------------- chunks


def _causal_convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    """In a chunk, the frames before it are those of the chunk before."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        chunk = current_chunk()
        if chunk is None:
            return original(self, hidden_states)
        *around, before, after = self.time_causal_padding
        mode = self.pad_mode
        x = chunk.with_frames_before(self, hidden_states, before, mode)
        return self.conv(F.pad(x, (*around, 0, after), mode=mode))

    return forward


def _upsample(original: Callable[..., Any]) -> Callable[..., Any]:
    """A chunk that is not the first has no frame that stands for itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        chunk = current_chunk()
        if chunk is None or chunk.is_first or not self.add_temporal_upsample:
            return original(self, x)
        spread = self._dcae_upsample_rearrange
        shortcut = spread(x, r1=2, r2=2, r3=2)
        shortcut = shortcut.repeat_interleave(repeats=self.repeats, dim=1)
        return spread(self.conv(x), r1=2, r2=2, r3=2) + shortcut

    return forward


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
    diffusers_patch(
        "hunyuanvideo15-vae-convolution-in-chunks",
        _MODULE_15 + ":HunyuanVideo15CausalConv3d.forward",
        _causal_convolution,
        "it repeats the first frame of whatever it is given; a later chunk of a "
        "video goes on from the frames of the chunk before",
        wraps=True,
    ),
    diffusers_patch(
        "hunyuanvideo15-vae-upsampling-in-chunks",
        _MODULE_15 + ":HunyuanVideo15Upsample.forward",
        _upsample,
        "it makes one frame of the first and two of every other; a later chunk "
        "of a video has no first one",
        wraps=True,
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo15``."""

VAE_13B: tuple[Patch, ...] = (
    diffusers_patch(
        "hunyuanvideo-vae-frame-causal-attention",
        "models.autoencoders.autoencoder_kl_hunyuan_video"
        ":HunyuanVideoMidBlock3D.forward",
        _mid_block_13b,
        "the attention mask has B x L x L entries: 20 GB for five latent frames "
        "of 720x1280 in one tile",
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo``."""
