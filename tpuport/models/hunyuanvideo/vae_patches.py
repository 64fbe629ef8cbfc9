"""Patches of the two HunyuanVideo autoencoders.

Both attend over all latent frames in their middle block, every token to its own frame
and those before. Upstream builds a mask of all tokens by all tokens for it; here the
frame of a token says it.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns, L = T * Y * X tokens, H
heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpuport.core.patching import Patch

if TYPE_CHECKING:
    import torch


def _attend_15(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideo15AttnBlock.forward`` of [B, C, T, Y, X]."""
    from tpuport.patches.attention import attend

    _, channels, frames, rows, columns = x.shape
    normed = self.norm(x)
    query, key, value = (
        layer(normed).flatten(2).transpose(1, 2).unsqueeze(1)
        for layer in (self.to_q, self.to_k, self.to_v)
    )
    out = attend(query, key, value, frame_tokens=rows * columns)
    out = out.squeeze(1).transpose(1, 2)
    return self.proj_out(out.reshape(-1, channels, frames, rows, columns)) + x


def _mid_block_13b(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideoMidBlock3D.forward`` of [B, C, T, Y, X]."""
    hidden_states = self.resnets[0](hidden_states)
    for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
        if attention is not None:
            frames, rows, columns = hidden_states.shape[2:]
            tokens = hidden_states.permute(0, 2, 3, 4, 1).flatten(1, 3)
            tokens = _attend_13b(attention, tokens, rows * columns)
            hidden_states = tokens.unflatten(1, (frames, rows, columns))
            hidden_states = hidden_states.permute(0, 4, 1, 2, 3)
        hidden_states = resnet(hidden_states)
    return hidden_states


def _attend_13b(attention: Any, tokens: torch.Tensor, per_frame: int) -> torch.Tensor:
    """The ``Attention`` of the middle block on [B, L, C]."""
    from tpuport.patches.attention import attend

    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    query, key, value = (
        layer(normed).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    out = attend(query, key, value, frame_tokens=per_frame)
    out = attention.to_out[0](out.transpose(1, 2).flatten(2))
    return (out + tokens) / attention.rescale_output_factor


_UPSTREAM = "diffusers>=0.42,<0.43"
_SOURCE = (
    "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/"
    "autoencoders/"
)

VAE_15: tuple[Patch, ...] = (
    Patch(
        name="hunyuanvideo15-vae-frame-causal-attention",
        target="diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15"
        ":HunyuanVideo15AttnBlock.forward",
        replacement=_attend_15,
        reason="the mask is filled row by row in a Python loop, an operation a token, "
        "and has L x L entries; its batch dim meets the heads, so that more than one "
        "video fails",
        upstream=_UPSTREAM,
        link=_SOURCE + "autoencoder_kl_hunyuanvideo15.py",
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo15``."""

VAE_13B: tuple[Patch, ...] = (
    Patch(
        name="hunyuanvideo-vae-frame-causal-attention",
        target="diffusers.models.autoencoders.autoencoder_kl_hunyuan_video"
        ":HunyuanVideoMidBlock3D.forward",
        replacement=_mid_block_13b,
        reason="the attention mask has B x L x L entries: 20 GB for five latent frames "
        "of 720x1280 in one tile",
        upstream=_UPSTREAM,
        link=_SOURCE + "autoencoder_kl_hunyuan_video.py",
    ),
)
"""For a port with ``AutoencoderKLHunyuanVideo``."""
