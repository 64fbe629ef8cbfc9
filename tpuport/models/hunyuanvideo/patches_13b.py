"""Patches on the transformer of HunyuanVideo (13B).

Upstream's attention masks the keys of padded text; here the number of valid keys does.
The number is taken once per call, and the blocks hand it on in place of the mask.
Upstream counts the valid text tokens and takes that many from the front, so a mask must
have them first, as its pipelines' masks do; this is kept as it is.

Legend: B batch, H heads, D head dim, L text tokens, N video tokens, C channels, T/Y/X
latent frames/rows/columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpuport.core.tracing.patching import Patch
from tpuport.models.hunyuanvideo.patches import (
    VideoGrid,
    attend_heads,
    with_lora_scale,
)
from tpuport.models.hunyuanvideo.vae_patches import VAE_13B
from tpuport.patches.diffusers import MODULATED_NORMS, diffusers_patch


def attend_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """In place of ``dispatch_attention_fn``, as this model calls it.

    Args:
        query: of shape [B, L, H, D], as are ``key`` and ``value``.
        key: see ``query``.
        value: see ``query``.
        attn_mask: how many keys are valid, integers of shape [B]; ``None`` for all.
        options: upstream's others, which must be off: dropout, causality, a backend of
            diffusers or its context parallelism.

    Returns:
        [B, L, H, D] in the dtype of ``query``.

    Raises:
        NotImplementedError: one of ``options`` is on.
        ValueError: ``attn_mask`` has another shape: a mask of tokens belongs to the
            patched forward, which makes the lengths.
    """
    asked = sorted(name for name, option in options.items() if option)
    if asked:
        raise NotImplementedError(
            f"the patched attention of HunyuanVideo has no {', '.join(asked)}; leave "
            "them at their defaults, and choose a kernel and a mesh in tpuport"
        )
    if attn_mask is not None and attn_mask.ndim != 1:
        raise ValueError(
            "the patched attention takes the number of valid keys, of shape "
            f"[{query.shape[0]}], for attn_mask; got one of shape {[*attn_mask.shape]}"
        )
    return attend_heads(query, key, value, attn_mask)


def _single_block(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of ``HunyuanVideoSingleTransformerBlock.forward``, see there.

    The output layer takes attention and feed-forward side by side. Its product with
    each is added up here: the same products, summed in another order.
    """
    video = hidden_states.shape[1]
    joined = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    normed, gate = self.norm(joined, emb=temb)
    mlp = self.act_mlp(self.proj_mlp(normed))
    attention = torch.cat(
        self.attn(
            hidden_states=normed[:, :video],
            encoder_hidden_states=normed[:, video:],
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        ),
        dim=1,
    )
    width = attention.shape[2]
    weight = self.proj_out.weight
    out = F.linear(attention, weight[:, :width]) + F.linear(mlp, weight[:, width:])
    joined = joined + gate.unsqueeze(1) * (out + self.proj_out.bias)
    return joined[:, :video], joined[:, video:]


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_attention_mask: torch.Tensor,
    pooled_projections: torch.Tensor,
    guidance: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """In place of ``HunyuanVideoTransformer3DModel.forward``, see there.

    The last arguments are those of :meth:`VideoGrid.of`.
    """
    grid = VideoGrid.of(self, hidden_states, **options)
    temb, first_frame_temb = self.time_text_embed(
        timestep, pooled_projections, guidance
    )
    video = self.x_embedder(hidden_states)
    text = self.context_embedder(
        encoder_hidden_states, timestep, encoder_attention_mask
    )
    # As integers: 256 + 1 is 256 in bfloat16, which pipelines cast the mask to.
    lengths = encoder_attention_mask.int().sum(dim=1) + video.shape[1]
    # The last two are for image conditioning that replaces the first frame.
    _, rows, columns = grid.counts
    conditions = (temb, lengths, grid.rotary, first_frame_temb, rows * columns)
    for block in (*self.transformer_blocks, *self.single_transformer_blocks):
        video, text = block(video, text, *conditions)
    video = self.proj_out(self.norm_out(video, temb))
    return grid.output(grid.unpatchify(video))


MODULE = "models.transformers.transformer_hunyuan_video"

TRANSFORMER_13B: tuple[Patch, ...] = (
    diffusers_patch(
        "hunyuanvideo-attention",
        f"{MODULE}:dispatch_attention_fn",
        attend_tokens,
        "hands a mask of the padded text's keys to every block, with which no "
        "fused kernel runs; the number of valid keys says the same",
    ),
    diffusers_patch(
        "hunyuanvideo-single-block-output",
        f"{MODULE}:HunyuanVideoSingleTransformerBlock.forward",
        _single_block,
        "joins attention and feed-forward to five times the width before the "
        "output layer, 3.7 GB at 720p with 129 frames; over tp it has to be gathered, "
        "because both parts are split by themselves",
    ),
    diffusers_patch(
        "hunyuanvideo-forward",
        f"{MODULE}:HunyuanVideoTransformer3DModel.forward",
        with_lora_scale(_forward),
        "makes the mask of keys that the patched attention takes as lengths",
        wraps=True,
    ),
)
"""For the transformer; they belong together, forward hands lengths to the attention."""

PATCHES = (MODULATED_NORMS[1], *TRANSFORMER_13B, *VAE_13B)
"""Beside the standard ones."""
