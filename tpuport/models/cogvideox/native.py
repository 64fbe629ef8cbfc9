"""The transformer of CogVideoX on one joint sequence, with upstream's weights.

Letters: B batch, L tokens with padding, E width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.layers.text_and_video import Pair
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
    token_norms,
)
from tpuport.plugin import joint_sequence as joint


def _block_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        sequence: JointSequence,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        active, attn = sequence.active, self.attn1
        tokens = Stream(sequence, sequence)
        x = active.arrays(hidden_states)
        turn = None if tables is None else active.arrays(tables)

        shift, scale, gate = _modulation(self.norm1, sequence, temb)
        y = tokens.norm(self.norm1.norm, x, shift, scale)
        attended = joint.attend(
            sequence,
            tokens.turned(attn.to_q, attn.norm_q, y, attn.heads, turn),
            tokens.turned(attn.to_k, attn.norm_k, y, attn.heads, turn),
            tokens.heads(attn.to_v, y, attn.heads),
            x.dtype,
        )
        x = tokens.add(x, tokens.output(attn.to_out[0], attended), gate)

        shift, scale, gate = _modulation(self.norm2, sequence, temb)
        y = tokens.norm(self.norm2.norm, x, shift, scale)
        if type(self.ff.net[0]).__name__ == "GELU":
            y = tokens.feed_forward(self.ff, y)
        else:
            # Another activation than every checkpoint's is torch's.
            y = active.arrays(self.ff(active.tensors(y)))
        out: torch.Tensor = active.tensors(tokens.add(x, y, gate))
        return out

    return forward


def _modulation(
    norm: Any, sequence: JointSequence, temb: torch.Tensor
) -> tuple[Pair, Pair, Pair]:
    """Shift, scale and gate, each for text and for video, float32 [B, E]."""
    given = sequence.active.arrays(norm.silu(temb))
    values = joint.dense(sequence, given, *parameters(norm.linear))
    parts = jnp.split(values, 6, axis=1)
    shift, scale, gate, text_shift, text_scale, text_gate = parts
    return (text_shift, shift), (text_scale, scale), (text_gate, gate)


def _last(
    model: Any, sequence: JointSequence, x: jax.Array, temb: torch.Tensor
) -> jax.Array:
    """The norms after the blocks and the projection to patches, [B, L, patch]."""
    out = model.norm_out
    given = sequence.active.arrays(out.silu(temb))
    values = joint.dense(sequence, given, *parameters(out.linear))
    shift, scale = jnp.split(values, 2, axis=1)
    y = x
    for norm in (model.norm_final, out.norm):
        y = token_norms.layer_norm(y, *parameters(norm), norm.eps)
    y = (y * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)
    # Once, not within the projection, with which the compiler is long at work.
    y = jax.lax.optimization_barrier(y)
    return joint.dense(sequence, y, *parameters(model.proj_out)).astype(x.dtype)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        timestep_cond: torch.Tensor | None = None,
        ofs: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        refuse_kwargs(attention_kwargs)
        active = current()
        batch, frames, _, height, width = hidden_states.shape
        temb = self.time_embedding(
            self.time_proj(timestep).to(hidden_states.dtype), timestep_cond
        )
        if self.ofs_embedding is not None:
            temb = temb + self.ofs_embedding(self.ofs_proj(ofs).to(hidden_states.dtype))

        tokens = self.patch_embed(encoder_hidden_states, hidden_states)
        sequence = JointSequence.of(
            active,
            text=encoder_hidden_states.shape[1],
            length=tokens.shape[1],
            batch=batch,
            heads=self.config.num_attention_heads,
            head_dim=self.config.attention_head_dim,
        )
        tables = None
        if image_rotary_emb is not None:
            cos, sin = active.arrays(image_rotary_emb)
            tables = active.tensors(joint.rotary_tables(sequence, cos, sin))
        x = active.tensors(sequence.pad(active.arrays(tokens)))
        for block in self.transformer_blocks:
            x = block(hidden_states=x, temb=temb, sequence=sequence, tables=tables)
        y = _last(self, sequence, active.arrays(x), temb)
        # Tokens are brought together once they are narrow.
        y = sequence.whole(y)[:, sequence.text : sequence.length]
        p, p_t = self.config.patch_size, self.config.patch_size_t or 1
        grid = (-(-frames // p_t), height // p, width // p)
        if self.config.patch_size_t is None:
            y = y.reshape(batch, *grid, -1, p, p).transpose(0, 1, 4, 2, 5, 3, 6)
        else:
            y = y.reshape(batch, *grid, -1, p_t, p, p)
            y = y.transpose(0, 1, 5, 4, 2, 6, 3, 7)
        channels = y.shape[-5] if self.config.patch_size_t else y.shape[2]
        out = active.tensors(y.reshape(batch, grid[0] * p_t, channels, height, width))
        return Transformer2DModelOutput(sample=out) if return_dict else (out,)

    return forward


def _halves(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    if not config.get("use_rotary_positional_embeddings"):
        return tensor
    return to_halves(tensor, int(config["attention_head_dim"]))


_MODULE = "models.transformers.cogvideox_transformer_3d"

TRANSFORMER = NativeForm(
    patches=(
        diffusers_patch(
            "cogvideox-native-forward",
            f"{_MODULE}:CogVideoXTransformer3DModel.forward",
            _forward,
            "text and video tokens in one padded sequence, split over the mesh, "
            "through all blocks",
            wraps=True,
        ),
        diffusers_patch(
            "cogvideox-native-block",
            f"{_MODULE}:CogVideoXBlock.forward",
            _block_forward,
            "no joining and parting of tokens, no rotary pairs, no turned "
            "arrays around attention",
            wraps=True,
        ),
    ),
    transforms=(
        WeightTransform(
            pattern=r"transformer_blocks\.\d+\.attn1\.(to|norm)_[qk]\.(weight|bias)",
            apply=_halves,
            reason="rotary pairs as halves of the head dim",
            rows="attention_head_dim",
        ),
    ),
    split=ForwardSplit(blocks=("transformer_blocks",), state=("hidden_states",)),
)
