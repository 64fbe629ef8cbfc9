"""The transformer of CogVideoX on one joint sequence, with upstream's weights.

Letters: B batch, L tokens with padding, E width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.layers import joint_sequence as joint
from tpuport.core.layers import token_norms
from tpuport.core.layers.feed_forward import feed_forward
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.spec.component import NativeForm
from tpuport.core.tracing.context import current
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.weights.transforms import WeightTransform, to_halves
from tpuport.patches.diffusers import diffusers_patch


def _block_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        sequence: JointSequence,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        active = sequence.active
        x = active.arrays(hidden_states)
        turned = None if tables is None else active.arrays(tables)
        x = _attention(
            self, sequence, x, _modulation(self.norm1, sequence, temb), turned
        )

        shift, scale, gate = _modulation(self.norm2, sequence, temb)
        y = _norm(self.norm2, sequence, x, shift, scale)
        y = _feed_forward(self.ff, sequence, y)
        x = joint.gated(sequence, x, y, text=gate[0], video=gate[1])
        out: torch.Tensor = active.tensors(x)
        return out

    return forward


def _feed_forward(ff: Any, sequence: JointSequence, y: jax.Array) -> jax.Array:
    """The feed-forward part; another activation than every checkpoint's is torch's."""
    arrays = sequence.active.arrays
    first, _, last = ff.net[:3]
    if type(first).__name__ != "GELU":
        return sequence.active.arrays(ff(sequence.active.tensors(y)))

    def parameters(linear: Any) -> tuple[jax.Array, jax.Array | None]:
        bias = None if linear.bias is None else arrays(linear.bias)
        return arrays(linear.weight), bias

    return feed_forward(
        sequence,
        y,
        parameters(first.proj),
        parameters(last),
        tanh=first.approximate == "tanh",
    )


Pair = tuple["jax.Array", "jax.Array"]
"""For text tokens, and for video tokens."""


def _modulation(
    norm: Any, sequence: JointSequence, temb: torch.Tensor
) -> tuple[Pair, Pair, Pair]:
    """Shift, scale and gate, each for text and for video, float32 [B, E]."""
    arrays = sequence.active.arrays
    linear = norm.linear
    bias = None if linear.bias is None else arrays(linear.bias)
    values = joint.dense(sequence, arrays(norm.silu(temb)), arrays(linear.weight), bias)
    parts = jnp.split(values, 6, axis=1)
    shift, scale, gate, text_shift, text_scale, text_gate = parts
    return (text_shift, shift), (text_scale, scale), (text_gate, gate)


def _norm(
    norm: Any, sequence: JointSequence, x: jax.Array, shift: Pair, scale: Pair
) -> jax.Array:
    arrays = sequence.active.arrays
    out = token_norms.modulated_norm(
        sequence,
        x,
        weight=None if norm.norm.weight is None else arrays(norm.norm.weight),
        bias=None if norm.norm.bias is None else arrays(norm.norm.bias),
        eps=norm.norm.eps,
        text=(shift[0], scale[0]),
        video=(shift[1], scale[1]),
    )
    # Once, not within every projection that reads it.
    return jax.lax.optimization_barrier(sequence.split(out))


def _attention(
    block: Any,
    sequence: JointSequence,
    x: jax.Array,
    modulation: tuple[Pair, Pair, Pair],
    tables: Pair | None,
) -> jax.Array:
    """``x`` and what attention adds to it."""
    arrays = sequence.active.arrays
    attn = block.attn1
    shift, scale, gate = modulation
    y = _norm(block.norm1, sequence, x, shift, scale)
    head_dim = attn.to_q.weight.shape[0] // attn.heads

    def heads(linear: Any) -> jax.Array:
        bias = None if linear.bias is None else arrays(linear.bias)
        return joint.to_heads(sequence, y, arrays(linear.weight), bias, head_dim)

    def turned(linear: Any, norm: Any) -> jax.Array:
        given = None
        if norm is not None:
            weight, bias = (
                None if vector is None else arrays(vector)
                for vector in (norm.weight, norm.bias)
            )
            given = token_norms.HeadNorm(weight, bias, norm.eps)
        return token_norms.turned(sequence, heads(linear), given, tables, x.dtype)

    q, k = turned(attn.to_q, attn.norm_q), turned(attn.to_k, attn.norm_k)
    out = joint.attend(sequence, q, k, heads(attn.to_v), x.dtype)
    linear = attn.to_out[0]
    bias = None if linear.bias is None else arrays(linear.bias)
    y = joint.from_heads(sequence, out, arrays(linear.weight), bias)
    return joint.gated(sequence, x, y, text=gate[0], video=gate[1])


def _last(
    model: Any, sequence: JointSequence, x: jax.Array, temb: torch.Tensor
) -> jax.Array:
    """The norms after the blocks and the projection to patches, [B, L, patch]."""
    arrays = sequence.active.arrays
    norm, out = model.norm_final, model.norm_out

    def given(vector: Any) -> jax.Array | None:
        return None if vector is None else arrays(vector)

    temb = arrays(out.silu(temb))
    values = joint.dense(
        sequence, temb, arrays(out.linear.weight), given(out.linear.bias)
    )
    shift, scale = jnp.split(values, 2, axis=1)
    y = token_norms.layer_norm(x, given(norm.weight), given(norm.bias), norm.eps)
    y = token_norms.layer_norm(
        y, given(out.norm.weight), given(out.norm.bias), out.norm.eps
    )
    y = (y * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)
    # Once, not within the projection, with which the compiler is long at work.
    y = jax.lax.optimization_barrier(y)
    linear = model.proj_out
    y = joint.dense(sequence, y, arrays(linear.weight), given(linear.bias))
    return y.astype(x.dtype)


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

        if attention_kwargs:
            raise NotImplementedError(
                "the native blocks take no attention_kwargs, got "
                f"{', '.join(attention_kwargs)}; run with blocks='upstream'"
            )
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
            pattern=r"transformer_blocks\.\d+\.attn1\.to_[qk]\.(weight|bias)",
            apply=_halves,
            reason="rotary pairs as halves of the head dim",
        ),
        WeightTransform(
            pattern=r"transformer_blocks\.\d+\.attn1\.norm_[qk]\.(weight|bias)",
            apply=_halves,
            reason="the norms of the same elements",
        ),
    ),
    split=ForwardSplit(blocks=("transformer_blocks",), state=("hidden_states",)),
)
