"""The transformer of HunyuanVideo-1.5 written for the chip, with upstream's weights.

The video is in the joint sequence that attention runs on, split over the mesh, and has
places there for the text; the text has weights of its own and is whole on every device.

Letters: B batch, L tokens of the joint sequence, T text tokens, N video tokens,
E width, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.layers import joint_sequence as joint
from tpuport.core.layers import text_and_video as streams
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.text_and_video import (
    Pair,
    Stream,
    parameters,
    refuse_kwargs,
)
from tpuport.core.spec.component import NativeForm
from tpuport.core.tracing.context import current
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.weights.transforms import WeightTransform, to_halves
from tpuport.models.hunyuanvideo.patches import (
    MODULE,
    VideoGrid,
    named,
    text_tokens,
)
from tpuport.patches.diffusers import diffusers_patch


def modulation(
    sequence: JointSequence,
    norm: Any,
    temb: torch.Tensor,
    marked: torch.Tensor | None,
    parts: int,
) -> list[Pair]:
    """The ``parts`` values [B, E] of an adaLN layer, of ``marked`` and of ``temb``."""

    def values(condition: torch.Tensor) -> Any:
        given = current().arrays(condition)
        active = jax.nn.silu(given.astype(jnp.float32)).astype(given.dtype)
        found = joint.dense(
            sequence, active, *parameters(norm.linear), row_parallel=True
        )
        return jnp.split(found, parts, axis=1)

    others = values(temb)
    first = others if marked is None else values(marked)
    return list(zip(first, others, strict=True))


def double_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """A block with weights for the video and for the text, of either form."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        lengths: torch.Tensor,
        sequence: JointSequence,
        tables: tuple[torch.Tensor, torch.Tensor],
        first_temb: torch.Tensor | None = None,
        first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        active, attn = sequence.active, self.attn
        video = Stream.of(sequence, first)
        words = Stream.of(streams.text_alone(sequence))
        x, text = active.arrays((hidden_states, encoder_hidden_states))
        turn = active.arrays(tables)

        values = modulation(sequence, self.norm1, temb, first_temb, 6)
        text_values = modulation(sequence, self.norm1_context, temb, None, 6)
        y = video.norm(self.norm1.norm, x, values[0], values[1])
        z = words.norm(self.norm1_context.norm, text, text_values[0], text_values[1])
        out, text_out = streams.attend_streams(
            sequence,
            (
                video.turned(attn.to_q, attn.norm_q, y, attn.heads, turn),
                video.turned(attn.to_k, attn.norm_k, y, attn.heads, turn),
                video.heads(attn.to_v, y, attn.heads),
            ),
            (
                words.turned(attn.add_q_proj, attn.norm_added_q, z, attn.heads),
                words.turned(attn.add_k_proj, attn.norm_added_k, z, attn.heads),
                words.heads(attn.add_v_proj, z, attn.heads),
            ),
            active.arrays(lengths),
            x.dtype,
        )
        x = video.add(x, video.output(attn.to_out[0], out), values[2])
        text = words.add(text, words.output(attn.to_add_out, text_out), text_values[2])

        y = video.norm(self.norm2, x, values[3], values[4])
        x = video.add(x, video.feed_forward(self.ff, y), values[5])
        z = words.norm(self.norm2_context, text, text_values[3], text_values[4])
        text = words.add(text, words.feed_forward(self.ff_context, z), text_values[5])
        found: tuple[torch.Tensor, torch.Tensor] = active.tensors((x, text))
        return found

    return forward


def begin(
    model: Any,
    latents: torch.Tensor,
    text: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> tuple[JointSequence, torch.Tensor, torch.Tensor, Any]:
    """The joint sequence, the state of the first block and the rotary tables.

    Args:
        model: the upstream transformer.
        latents: of the video, [B, C, T, Y, X].
        text: tokens [B, T, E], those that count first.
        rotary: cos and sin of the video, [N, D].
    """
    active = current()
    weight, bias = parameters(model.x_embedder.proj)
    # A product of tokens, not a convolution: each device embeds its own.
    x = joint.patches(active.arrays(latents), weight.shape[2:])
    sequence = JointSequence.of(
        active,
        text=text.shape[1],
        length=x.shape[1] + text.shape[1],
        batch=x.shape[0],
        heads=model.config.num_attention_heads,
        head_dim=model.config.attention_head_dim,
        text_first=False,
    )
    tables = joint.rotary_tables(sequence, *active.arrays(tuple(rotary)))
    weight = weight.reshape(weight.shape[0], -1)
    x = joint.dense(sequence, sequence.pad(x), weight, bias).astype(x.dtype)
    words = sequence.whole(active.arrays(text))
    return sequence, active.tensors(x), active.tensors(words), active.tensors(tables)


def finish(
    model: Any,
    sequence: JointSequence,
    video: torch.Tensor,
    temb: torch.Tensor,
    grid: VideoGrid,
) -> torch.Tensor:
    """The output [B, C, T, Y, X] from the joint sequence after the last block."""
    active, tokens = sequence.active, Stream.of(sequence)
    x = active.arrays(video)
    scale, shift = modulation(sequence, model.norm_out, temb, None, 2)
    y = tokens.norm(model.norm_out.norm, x, shift, scale)
    # Tokens are brought together when they are narrow.
    out = joint.dense(sequence, y, *parameters(model.proj_out)).astype(x.dtype)
    out = sequence.whole(out)[:, : sequence.length - sequence.text]
    return grid.unpatchify(active.tensors(out))


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
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
        refuse_kwargs(options.get("attention_kwargs"))
        grid = VideoGrid.of(self, hidden_states, **options)
        temb = self.time_embed(timestep, timestep_r=timestep_r)
        tokens, lengths = text_tokens(
            self,
            timestep,
            (encoder_hidden_states, encoder_attention_mask),
            (encoder_hidden_states_2, encoder_attention_mask_2),
            image_embeds,
        )
        sequence, video, text, tables = begin(self, hidden_states, tokens, grid.rotary)
        for block in self.transformer_blocks:
            video, text = block(video, text, temb, lengths, sequence, tables)
        return grid.output(finish(self, sequence, video, temb, grid))

    return named(original, forward)


def halves(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a projection to heads, or of a norm of heads, in the order of halves."""
    return to_halves(tensor, int(config["attention_head_dim"]))


#: Text keys meet video queries, so theirs are in the same order.
HALVES = WeightTransform(
    pattern=r"transformer_blocks\.\d+\.attn"
    r"\.(to_[qk]|add_[qk]_proj|norm_(added_)?[qk])\.(weight|bias)",
    apply=halves,
    reason="rotary pairs as halves of the head dim",
    rows="attention_head_dim",
)


TRANSFORMER_15 = NativeForm(
    patches=(
        diffusers_patch(
            "hunyuanvideo15-native-forward",
            f"{MODULE}:HunyuanVideo15Transformer3DModel.forward",
            _forward,
            "video in one padded sequence with room for the text, split over "
            "the mesh, through all blocks; text whole on every device",
            wraps=True,
        ),
        diffusers_patch(
            "hunyuanvideo15-native-block",
            f"{MODULE}:HunyuanVideo15TransformerBlock.forward",
            double_block,
            "text put into the padded sequence for attention alone, no rotary "
            "pairs, no turned arrays around attention",
            wraps=True,
        ),
    ),
    transforms=(HALVES,),
    split=ForwardSplit(blocks=("transformer_blocks",), head=("hidden_states",)),
)
