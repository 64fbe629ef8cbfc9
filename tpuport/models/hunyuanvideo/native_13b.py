"""The transformer of HunyuanVideo (13B) written for the chip, with upstream's weights.

The first blocks have weights for the video and for the text, see
:mod:`tpuport.models.hunyuanvideo.native`. The later blocks have one set of weights for
all tokens and run on the joint sequence with the text in its places.

Letters: B batch, L tokens of the joint sequence, N video tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.core.layers import joint_sequence as joint
from tpuport.core.layers import text_and_video as streams
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.text_and_video import Stream, parameters, refuse_kwargs
from tpuport.core.spec.component import NativeForm
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.tracing.patching import Patch
from tpuport.core.weights.transforms import WeightTransform
from tpuport.models.hunyuanvideo.native import (
    HALVES,
    begin,
    double_block,
    finish,
    halves,
    modulation,
)
from tpuport.models.hunyuanvideo.patches import VideoGrid, named
from tpuport.models.hunyuanvideo.patches_13b import MODULE
from tpuport.patches.diffusers import diffusers_patch


def _single_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """The text goes past it: it is in the joint sequence by then."""

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
        tokens = Stream.of(sequence, first)
        x, turn = active.arrays((hidden_states, tables))
        shift, scale, gate = modulation(sequence, self.norm, temb, first_temb, 3)
        y = tokens.norm(self.norm.norm, x, shift, scale)
        hidden = tokens.hidden(self.proj_mlp, y)
        attended = joint.attend(
            sequence,
            tokens.turned(attn.to_q, attn.norm_q, y, attn.heads, turn),
            tokens.turned(attn.to_k, attn.norm_k, y, attn.heads, turn),
            tokens.heads(attn.to_v, y, attn.heads),
            x.dtype,
            kv_lengths=active.arrays(lengths).astype(jnp.int32)
            + (sequence.length - sequence.text),
        )
        # One layer for attention and feed-forward side by side: the product of each
        # with its columns, added up.
        weight, bias = parameters(self.proj_out)
        width = weight.shape[1] - hidden.shape[2]
        update = joint.from_heads(sequence, attended, weight[:, :width], None)
        update = update.astype(jnp.float32) + joint.dense(
            sequence, hidden, weight[:, width:], bias, row_parallel=True
        )
        out: torch.Tensor = active.tensors(tokens.add(x, update, gate))
        return out, encoder_hidden_states

    return forward


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        pooled_projections: torch.Tensor,
        guidance: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        refuse_kwargs(options.get("attention_kwargs"))
        grid = VideoGrid.of(self, hidden_states, **options)
        # The second is for conditioning that puts an image in the first frame.
        temb, first_temb = self.time_text_embed(timestep, pooled_projections, guidance)
        tokens = self.context_embedder(
            encoder_hidden_states, timestep, encoder_attention_mask
        )
        # As integers: 256 + 1 is 256 in bfloat16, which pipelines cast the mask to.
        lengths = encoder_attention_mask.int().sum(dim=1)
        sequence, video, text, tables = begin(self, hidden_states, tokens, grid.rotary)
        _, rows, columns = grid.counts
        first = 0 if first_temb is None else rows * columns
        given = (temb, lengths, sequence, tables, first_temb, first)
        for block in self.transformer_blocks:
            video, text = block(video, text, *given)
        active = sequence.active
        x, words = active.arrays((video, text))
        video = active.tensors(sequence.split(streams.put_text(sequence, x, words, 1)))
        for block in self.single_transformer_blocks:
            video, text = block(video, text, *given)
        return grid.output(finish(self, sequence, video, temb, grid))

    return named(original, forward)


_REASON = (
    "text put into the padded sequence for attention alone, no rotary pairs, no turned "
    "arrays around attention"
)


def _block(name: str, class_name: str, replacement: Callable[..., Any]) -> Patch:
    return diffusers_patch(
        f"hunyuanvideo-native-{name}",
        f"{MODULE}:{class_name}.forward",
        replacement,
        _REASON,
        wraps=True,
    )


TRANSFORMER_13B = NativeForm(
    patches=(
        diffusers_patch(
            "hunyuanvideo-native-forward",
            f"{MODULE}:HunyuanVideoTransformer3DModel.forward",
            _forward,
            "one padded sequence, split over the mesh: of the video through the "
            "double blocks, with the text through the single ones",
            wraps=True,
        ),
        _block("block", "HunyuanVideoTransformerBlock", double_block),
        _block(
            "first-frame-block",
            "HunyuanVideoTokenReplaceTransformerBlock",
            double_block,
        ),
        _block("single-block", "HunyuanVideoSingleTransformerBlock", _single_block),
        _block(
            "first-frame-single-block",
            "HunyuanVideoTokenReplaceSingleTransformerBlock",
            _single_block,
        ),
    ),
    transforms=(
        HALVES,
        WeightTransform(
            pattern=r"single_transformer_blocks\.\d+\.attn\.(to|norm)_[qk]"
            r"\.(weight|bias)",
            apply=halves,
            reason=HALVES.reason,
            rows="attention_head_dim",
            needed=lambda config: config["num_single_layers"] > 0,
        ),
    ),
    split=ForwardSplit(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        head=("hidden_states",),
    ),
)
