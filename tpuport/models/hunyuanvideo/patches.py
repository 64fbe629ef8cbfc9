"""Patches on the transformer of HunyuanVideo-1.5.

Text carries no rotary embedding, so the order of its keys is free: valid tokens go to
the front once per call, and every attention takes the number of valid keys in place of
a mask of S x S. Padded tokens still pass through the blocks as queries, as they do
upstream; what becomes of them reaches no valid token and is cut off with the text.

Legend: B batch, H heads, D head dim, L text tokens (of all three kinds together unless
said), N video tokens, S = N + L, C channels, T/Y/X latent frames/rows/columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.core.tracing.patching import Patch
from tpuport.models.hunyuanvideo.vae_patches import VAE_15
from tpuport.patches.diffusers import MODULATED_NORMS, diffusers_patch
from tpuport.patches.valid_tokens import attend, valid_first

# Rows of `cond_type_embed`.
TEXT, GLYPHS, IMAGE = 0, 1, 2


def _heads(attn: Any, x: torch.Tensor) -> torch.Tensor:
    """[B, L, H D] as [B, L, H, D]."""
    return x.unflatten(2, (attn.heads, -1))


def attend_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [B, L, H, D], in the dtype of the query.

    Args:
        lengths: how many keys are valid, integers of shape [B]; ``None`` for all.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, key_lengths=lengths).transpose(1, 2)


def _joint_attention(
    self: Any,
    attn: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In place of ``HunyuanVideo15AttnProcessor2_0.__call__``.

    Args:
        self: the processor.
        attn: the upstream attention module, whose weights are used.
        hidden_states: video tokens [B, N, C], all of them valid.
        encoder_hidden_states: text tokens [B, L, C], valid ones first.
        attention_mask: how many text tokens are valid, integers of shape [B]; ``None``
            for all.
        image_rotary_emb: cos and sin of the video tokens, [N, D] each.

    Returns:
        Video [B, N, C] and text [B, L, C].

    Raises:
        ValueError: ``attention_mask`` has another shape: a mask of tokens belongs to
            the patched forward, which makes the lengths.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    if attention_mask is not None and attention_mask.ndim != 1:
        raise ValueError(
            "the patched attention takes the number of valid text tokens, of shape "
            f"[{hidden_states.shape[0]}], for attention_mask; got one of shape "
            f"{[*attention_mask.shape]}. Order the tokens with "
            "tpuport.patches.valid_tokens.valid_first, which counts them."
        )
    query = attn.norm_q(_heads(attn, attn.to_q(hidden_states)))
    key = attn.norm_k(_heads(attn, attn.to_k(hidden_states)))
    value = _heads(attn, attn.to_v(hidden_states))
    if image_rotary_emb is not None:
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
    if encoder_hidden_states is None:
        # Upstream leaves out the projection here, too.
        return attend_heads(query, key, value, None).flatten(2, 3), None

    text_query = _heads(attn, attn.add_q_proj(encoder_hidden_states))
    text_key = _heads(attn, attn.add_k_proj(encoder_hidden_states))
    text_value = _heads(attn, attn.add_v_proj(encoder_hidden_states))
    if attn.norm_added_q is not None:
        text_query = attn.norm_added_q(text_query)
    if attn.norm_added_k is not None:
        text_key = attn.norm_added_k(text_key)
    count = hidden_states.shape[1]
    out = attend_heads(
        torch.cat([query, text_query], dim=1),
        torch.cat([key, text_key], dim=1),
        torch.cat([value, text_value], dim=1),
        None if attention_mask is None else attention_mask + count,
    ).flatten(2, 3)
    project, drop = attn.to_out
    return drop(project(out[:, :count])), attn.to_add_out(out[:, count:])


def text_tokens(
    model: Any,
    timestep: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    glyphs: tuple[torch.Tensor | None, torch.Tensor | None],
    image: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the video attends to besides itself, valid tokens first.

    Args:
        model: the upstream transformer.
        timestep: [B].
        text: of the language model, [B, Lt, Ct], and its mask [B, Lt] of any dtype.
        glyphs: of ByT5, [B, Lg, Cg], and its mask [B, Lg] of any dtype; Lg may be 0.
        image: [B, Li, Ci]; ``None`` and Li = 0 mean text to video, and so do, as
            upstream has it, zeros in the whole batch.

    Returns:
        [B, L, C] with L = Li + Lg + Lt: valid image, glyph and text tokens in
        upstream's order, then zeros; and the number of valid tokens, integers [B].

    Raises:
        ValueError: there are no glyphs, or no mask of them.
    """
    words, mask = text
    drawn, drawn_mask = glyphs
    if drawn is None or drawn_mask is None:
        raise ValueError(
            "HunyuanVideo-1.5 needs encoder_hidden_states_2 and "
            "encoder_attention_mask_2; without a text to draw pass zero tokens"
        )

    def kind(tokens: torch.Tensor, row: int) -> torch.Tensor:
        index = torch.full((1,), row, dtype=torch.long, device=tokens.device)
        return tokens + model.cond_type_embed(index)

    tokens = [
        kind(model.context_embedder_2(drawn), GLYPHS),
        kind(model.context_embedder(words, timestep, mask), TEXT),
    ]
    masks = [drawn_mask.bool(), mask.bool()]
    if image is not None and image.shape[1]:
        tokens.insert(0, kind(model.image_embedder(image), IMAGE))
        masks.insert(0, (image != 0).any().expand(*image.shape[:2]))
    joined, lengths = valid_first(torch.cat(tokens, dim=1), torch.cat(masks, dim=1))
    index = torch.arange(joined.shape[1], device=joined.device)
    # Zeros in place of whatever padding holds: the weight of a NaN is NaN.
    padding = (index >= lengths[:, None])[:, :, None]
    return joined.masked_fill(padding, 0.0), lengths


@dataclass(frozen=True, slots=True)
class VideoGrid:
    """The patches of the video that a forward is given.

    Attributes:
        counts: of patches, in T, Y and X.
        patch: latent frames, rows and columns of one patch.
        rotary: cos and sin of the video tokens, [N, D] each.
        return_dict: whether the forward returns upstream's class, else a tuple.
    """

    counts: tuple[int, ...]
    patch: tuple[int, int, int]
    rotary: tuple[torch.Tensor, torch.Tensor]
    return_dict: bool

    @classmethod
    def of(
        cls,
        model: Any,
        latents: torch.Tensor,
        *,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> VideoGrid:
        """The grid of latents [B, C, T, Y, X], with the options of every forward."""
        config = model.config
        patch = (config.patch_size_t, config.patch_size, config.patch_size)
        counts = tuple(n // p for n, p in zip(latents.shape[2:], patch, strict=True))
        rotary = image_rotary_emb or model.rope(latents)
        return cls(counts, patch, rotary, return_dict)

    def unpatchify(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, N, C pt py px] as [B, C, T, Y, X]."""
        x = tokens.unflatten(2, (-1, *self.patch)).unflatten(1, self.counts)
        # B t y x C pt py px -> B C t pt y py x px
        x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def output(self, sample: torch.Tensor) -> Any:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        if self.return_dict:
            return Transformer2DModelOutput(sample=sample)
        return (sample,)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_attention_mask: torch.Tensor,
    timestep_r: torch.Tensor | None = None,
    encoder_hidden_states_2: torch.Tensor | None = None,
    encoder_attention_mask_2: torch.Tensor | None = None,
    image_embeds: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """In place of ``HunyuanVideo15Transformer3DModel.forward``, see there.

    Unlike upstream it also takes ``image_embeds`` that is ``None`` or has no tokens,
    and ``image_rotary_emb``. The last arguments are those of :meth:`VideoGrid.of`.
    """
    grid = VideoGrid.of(self, hidden_states, **options)
    temb = self.time_embed(timestep, timestep_r=timestep_r)
    video = self.x_embedder(hidden_states)
    text, lengths = text_tokens(
        self,
        timestep,
        (encoder_hidden_states, encoder_attention_mask),
        (encoder_hidden_states_2, encoder_attention_mask_2),
        image_embeds,
    )
    for block in self.transformer_blocks:
        video, text = block(video, text, temb, lengths, grid.rotary)
    video = self.proj_out(self.norm_out(video, temb))
    return grid.output(grid.unpatchify(video))


def named(
    original: Callable[..., Any], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward``, called by name whichever way ``original``'s arguments are given."""
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_position = signature.bind_partial(self, *args).arguments
        by_position.pop("self")
        return forward(self, **by_position, **kwargs)

    return call


def with_lora_scale(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a patch wraps a forward in, as upstream decorates its own: for LoRAs."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        from diffusers.utils import apply_lora_scale

        by_name = named(original, forward)
        patched: Callable[..., Any] = apply_lora_scale("attention_kwargs")(by_name)
        return patched

    return wrapped


MODULE = "models.transformers.transformer_hunyuan_video15"

TRANSFORMER_15: tuple[Patch, ...] = (
    diffusers_patch(
        "hunyuanvideo15-joint-attention",
        f"{MODULE}:HunyuanVideo15AttnProcessor2_0.__call__",
        _joint_attention,
        "every block builds a boolean mask of S x S from the outer product of "
        "the text mask, 2.6 GB at 480p with 121 frames, that no fused kernel takes; "
        "the number of valid keys says the same",
    ),
    diffusers_patch(
        "hunyuanvideo15-forward",
        f"{MODULE}:HunyuanVideo15Transformer3DModel.forward",
        with_lora_scale(_forward),
        "branches on whether image_embeds are zeros and indexes each item by a "
        "boolean mask: neither can be traced",
        wraps=True,
    ),
)
"""For the transformer; they belong together, forward hands lengths to the attention."""

PATCHES = (MODULATED_NORMS[1], *TRANSFORMER_15, *VAE_15)
"""Beside the standard ones."""
