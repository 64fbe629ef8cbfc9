"""The transformer of CogVideoX on one joint sequence, with upstream's weights.

Letters: B batch, L tokens with padding, E width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tpuport.core import joint
from tpuport.core.active import current
from tpuport.core.joint import JointSequence
from tpuport.core.patching import Patch
from tpuport.core.spec import NativeForm
from tpuport.core.splitting import ForwardSplit
from tpuport.core.transforms import WeightTransform, to_halves

if TYPE_CHECKING:
    import jax
    import torch


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
        x = _attention(self, sequence, x, _modulation(self.norm1, temb), turned)

        shift, scale, gate = _modulation(self.norm2, temb)
        y = _norm(self.norm2, sequence, x, shift, scale)
        y = active.arrays(self.ff(active.tensors(sequence.split(y))))
        x = joint.gated(sequence, x, y, text=gate[0], video=gate[1])
        out: torch.Tensor = active.tensors(x)
        return out

    return forward


Pair = tuple["jax.Array", "jax.Array"]
"""For text tokens, and for video tokens."""


def _modulation(norm: Any, temb: torch.Tensor) -> tuple[Pair, Pair, Pair]:
    """Shift, scale and gate, each for text and for video, [B, E]."""
    values = norm.linear(norm.silu(temb)).chunk(6, dim=1)
    shift, scale, gate, text_shift, text_scale, text_gate = current().arrays(values)
    return (text_shift, shift), (text_scale, scale), (text_gate, gate)


def _norm(
    norm: Any, sequence: JointSequence, x: jax.Array, shift: Pair, scale: Pair
) -> jax.Array:
    arrays = sequence.active.arrays
    return joint.modulated_norm(
        sequence,
        x,
        weight=None if norm.norm.weight is None else arrays(norm.norm.weight),
        bias=None if norm.norm.bias is None else arrays(norm.norm.bias),
        eps=norm.norm.eps,
        text=(shift[0], scale[0]),
        video=(shift[1], scale[1]),
    )


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
    y = sequence.split(_norm(block.norm1, sequence, x, shift, scale))
    head_dim = attn.to_q.weight.shape[0] // attn.heads

    def heads(linear: Any) -> jax.Array:
        bias = None if linear.bias is None else arrays(linear.bias)
        return joint.to_heads(sequence, y, arrays(linear.weight), bias, head_dim)

    def turned(linear: Any, norm: Any) -> jax.Array:
        found = heads(linear)
        if norm is not None:
            # Upstream norms what the projection was rounded to.
            found = joint.head_norm(
                sequence,
                found.astype(x.dtype),
                None if norm.weight is None else arrays(norm.weight),
                None if norm.bias is None else arrays(norm.bias),
                norm.eps,
            )
        return joint.rotate(sequence, found, tables)

    q, k = turned(attn.to_q, attn.norm_q), turned(attn.to_k, attn.norm_k)
    out = joint.attend(sequence, q, k, heads(attn.to_v), x.dtype)
    linear = attn.to_out[0]
    bias = None if linear.bias is None else arrays(linear.bias)
    y = joint.from_heads(sequence, out, arrays(linear.weight), bias)
    return joint.gated(sequence, x, y, text=gate[0], video=gate[1])


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
            head_dim=self.config.attention_head_dim,
        )
        tables = None
        if image_rotary_emb is not None:
            cos, sin = active.arrays(image_rotary_emb)
            tables = active.tensors(joint.rotary_tables(sequence, cos, sin))
        x = active.tensors(sequence.pad(active.arrays(tokens)))
        for block in self.transformer_blocks:
            x = block(hidden_states=x, temb=temb, sequence=sequence, tables=tables)
        # Norms and the projection are per token: as long as they are narrow, tokens
        # are not yet brought together.
        x = self.proj_out(self.norm_out(self.norm_final(x), temb=temb))
        y = sequence.whole(active.arrays(x))[:, sequence.text : sequence.length]
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


_LINK = (
    "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"
    "models/transformers/cogvideox_transformer_3d.py"
)

TRANSFORMER = NativeForm(
    patches=(
        Patch(
            name="cogvideox-native-forward",
            target="diffusers.models.transformers.cogvideox_transformer_3d"
            ":CogVideoXTransformer3DModel.forward",
            replacement=_forward,
            wraps=True,
            reason="text and video tokens in one padded sequence, split over the mesh, "
            "through all blocks",
            upstream="diffusers>=0.42,<0.43",
            link=_LINK,
        ),
        Patch(
            name="cogvideox-native-block",
            target="diffusers.models.transformers.cogvideox_transformer_3d"
            ":CogVideoXBlock.forward",
            replacement=_block_forward,
            wraps=True,
            reason="no joining and parting of tokens, no rotary pairs, no turned arrays "
            "around attention",
            upstream="diffusers>=0.42,<0.43",
            link=_LINK,
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
