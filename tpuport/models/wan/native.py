"""The transformer of Wan on one padded sequence, with upstream's weights.

Letters: B batch, L video tokens with padding, N without, T text tokens, I of an image,
E width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.plugin import (
    ForwardSplit,
    JointSequence,
    NativeForm,
    Stream,
    WeightTransform,
    current,
    diffusers_patch,
    parameters,
    refuse_kwargs,
    to_halves,
)
from tpuport.plugin import joint_sequence as joint


def _modulation(table: jax.Array, temb: jax.Array) -> list[jax.Array]:
    """Parts of ``table`` [1, P, E] and ``temb`` [B, P, E] or [B, L, P, E], float32."""
    values = table.astype(jnp.float32) + temb.astype(jnp.float32)
    return [values[..., part, :] for part in range(table.shape[1])]


def _block_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        sequence: JointSequence,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        active, tokens = sequence.active, Stream.of(sequence)
        attn, cross = self.attn1, self.attn2
        x, others, turn = active.arrays((hidden_states, encoder_hidden_states, tables))
        parts = _modulation(*active.arrays((self.scale_shift_table, temb)))
        shift, scale, gate, ff_shift, ff_scale, ff_gate = ((p, p) for p in parts)

        y = tokens.norm(self.norm1, x, shift, scale)
        q = tokens.turned(attn.to_q, attn.norm_q, y, attn.heads, turn)
        linears = attn.to_k, attn.to_v, attn.to_out[0], cross.to_k, cross.to_v
        q, (to_k, to_v, to_out, *held) = tokens.behind(q, *linears)
        out = joint.attend(
            sequence,
            q,
            tokens.turned(to_k, attn.norm_k, y, attn.heads, turn),
            tokens.heads(to_v, y, attn.heads),
            x.dtype,
        )
        x = tokens.add_output(x, to_out, out, gate)

        y = tokens.norm(self.norm2, x)
        out = _cross_attention(cross, held, sequence, y, others)
        x = tokens.add_output(x, cross.to_out[0], out)

        y = tokens.norm(self.norm3, x, ff_shift, ff_scale)
        x = tokens.add_feed_forward(x, self.ffn, y, ff_gate)
        found: torch.Tensor = active.tensors(x)
        return found

    return forward


def _cross_attention(
    attn: Any, held: list[Any], sequence: JointSequence, y: jax.Array, others: jax.Array
) -> jax.Array:
    """Attention of ``y`` [B, L, E] on text [B, T, E], and on an image's I before it.

    ``held`` are the layers of the text's keys and values.
    """
    tokens, (to_k, to_v) = Stream.of(sequence), held
    q = tokens.turned(attn.to_q, attn.norm_q, y, attn.heads)

    def attended(k: Any, norm: Any, v: Any, those: jax.Array) -> jax.Array:
        words = Stream.whole(sequence, those.shape[1])
        keys = words.turned(k, norm, those, attn.heads)
        values = words.heads(v, those, attn.heads)
        return joint.attend_others(sequence, q, keys, values, y.dtype)

    if attn.add_k_proj is None:
        return attended(to_k, attn.norm_k, to_v, others)
    first = others.shape[1] - 512  # upstream's own number of text tokens
    image, text = others[:, :first], others[:, first:]
    found = attended(to_k, attn.norm_k, to_v, text)
    return found + attended(attn.add_k_proj, attn.norm_added_k, attn.add_v_proj, image)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        refuse_kwargs(attention_kwargs)
        active, patch = current(), self.config.patch_size
        batch, _, *sizes = hidden_states.shape
        counts = [size // p for size, p in zip(sizes, patch, strict=True)]
        weight, bias = parameters(self.patch_embedding)
        # A product of tokens, not a convolution: each device embeds its own.
        x = joint.patches(active.arrays(hidden_states), weight.shape[2:])
        sequence = JointSequence.of(
            active,
            text=0,
            length=x.shape[1],
            batch=batch,
            heads=self.config.num_attention_heads,
            head_dim=self.config.attention_head_dim,
        )
        cos, sin = (t[0, :, 0] for t in active.arrays(self.rope(hidden_states)))
        tables = active.tensors(joint.rotary_tables(sequence, cos, sin))
        weight = weight.reshape(weight.shape[0], -1)
        x = joint.dense(sequence, sequence.pad(x), weight, bias).astype(x.dtype)

        each = None
        if timestep.ndim == 2:  # one for each token, 2.2 5B
            each = sequence.padded
            padding = (0, each - timestep.shape[1])
            timestep = torch.nn.functional.pad(timestep, padding).flatten()
        temb, projected, text, image = self.condition_embedder(
            timestep, encoder_hidden_states, encoder_hidden_states_image, each
        )
        if each is not None:  # each device its own
            split = map(sequence.split, active.arrays((temb, projected)))
            temb, projected = active.tensors(tuple(split))
        projected = projected.unflatten(-1, (6, -1))
        if image is not None:
            text = torch.concat([image, text], dim=1)
        y = active.tensors(x)
        for block in self.blocks:
            y = block(y, text, projected, sequence, tables)

        x, temb, table = active.arrays((y, temb, self.scale_shift_table))
        shift, scale = ((p, p) for p in _modulation(table, temb[..., None, :]))
        x = Stream.of(sequence).norm(self.norm_out, x, shift, scale)
        # Tokens are brought together once they are narrow.
        out = joint.dense(sequence, x, *parameters(self.proj_out)).astype(x.dtype)
        out = sequence.whole(out)[:, : sequence.length]
        out = out.reshape(batch, *counts, *patch, -1).transpose(0, 7, 1, 4, 2, 5, 3, 6)
        whole = [n * p for n, p in zip(counts, patch, strict=True)]
        found = active.tensors(out.reshape(batch, -1, *whole))
        return Transformer2DModelOutput(sample=found) if return_dict else (found,)

    return forward


_MODULE = "models.transformers.transformer_wan"

TRANSFORMER = NativeForm(
    patches=(
        diffusers_patch(
            "wan-native-forward",
            f"{_MODULE}:WanTransformer3DModel.forward",
            _forward,
            "video in one padded sequence, split over the mesh, through all blocks; "
            "text whole on every device",
            wraps=True,
        ),
        diffusers_patch(
            "wan-native-block",
            f"{_MODULE}:WanTransformerBlock.forward",
            _block_forward,
            "no rotary pairs, no turned arrays around attention, norms by kernels",
            wraps=True,
        ),
    ),
    transforms=(
        WeightTransform(
            pattern=r"blocks\.\d+\.attn1\.(to|norm)_[qk]\.(weight|bias)",
            apply=lambda rows, config: to_halves(rows, config["attention_head_dim"]),
            reason="rotary pairs as halves of the head dim",
            rows="attention_head_dim",
        ),
    ),
    split=ForwardSplit(blocks=("blocks",), state=("hidden_states",)),
    fits=lambda config: config.get("qk_norm") == "rms_norm_across_heads",
)
