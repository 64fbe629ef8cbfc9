"""Where the weights of each component go.

Every stored weight matches exactly one rule; the session refuses anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tpuport.core.tracing.context import AttentionPolicy
from tpuport.core.weights.sharding import ShardRule
from tpuport.core.weights.tensor_parallel import (
    ROW,
    Rules,
    column,
    replicated,
    row,
    where_there_are,
)

ATTENTION = AttentionPolicy(batch="dp", heads="tp", sequence="sp")

Whole = Literal["attention", "outputs"] | None

_DUAL = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."
_REFINER = r"context_embedder\.token_refiner\.refiner_blocks\.\d+\."


def _attention_output(layers: str, whole: Whole) -> Rules:
    """The last layers of attention, with their biases."""
    if whole is None:
        return row(layers)
    return replicated(
        layers, note="whole: attention is gathered over tp, half the traffic of a sum"
    )


def _mlp_output(layers: str, whole: Whole, note: str = "") -> Rules:
    """The last layers of feed-forwards, with their biases."""
    if whole != "outputs":
        return row(layers, note=note)
    return replicated(
        layers,
        note="whole: the hidden layer is gathered over tp; nothing is summed",
    )


def _modulation(layers: str, whole: Whole) -> Rules:
    """The adaLN layers, whose split the video's hidden states take over.

    Split by output they split the hidden states over tp, which are gathered before
    every attention and feed-forward. Split by input they leave them whole.
    """
    if whole == "attention":
        return row(layers, note="adaLN; leaves the hidden states whole")
    return column(layers, note="adaLN; splits the hidden states as well")


def _shared(whole: Whole) -> Rules:
    """Both forms: what is before the blocks, blocks of two streams, the end."""
    return (
        *replicated(
            r"x_embedder\.proj",
            r"context_embedder\.time_text_embed\.(timestep|text)_embedder\.linear_[12]",
            r"context_embedder\.proj_in",
            "proj_out",
        ),
        *where_there_are(
            *column(_REFINER + r"attn\.to_[qkv]"),
            *row(_REFINER + r"attn\.to_out\.0"),
            *column(_REFINER + r"ff\.net\.0\.proj"),
            *row(_REFINER + r"ff\.net\.2"),
            *_modulation(_REFINER + r"norm_out\.linear", whole),
            *replicated(_REFINER + "norm[12]"),
        ),
        *column(_DUAL + r"attn\.(to_[qkv]|add_[qkv]_proj)", note="heads over tp"),
        *_attention_output(_DUAL + r"attn\.(to_out\.0|to_add_out)", whole),
        *replicated(
            _DUAL + r"attn\.norm_(added_)?[qk]",
            note="per head dim, the same for every head",
        ),
        *column(_DUAL + r"ff(_context)?\.net\.0\.proj"),
        *_mlp_output(_DUAL + r"ff(_context)?\.net\.2", whole),
        *_modulation(_DUAL + r"norm1(_context)?\.linear", whole),
        *_modulation(r"norm_out\.linear", whole),
    )


def transformer_15(*, whole: Whole = None) -> Rules:
    """Rules for ``HunyuanVideo15Transformer3DModel``.

    Args:
        whole: what else each device holds whole, at the price of memory.
            ``"attention"``: the last layer of every attention, and the hidden states
            between blocks, so that attention is gathered once instead of gathered and
            summed. ``"outputs"``: the last layers of attention and of feed-forward, as
            hand-written ports have it, so that nothing is summed; but the hidden layer
            of the feed-forward, four times as wide, is gathered.
    """
    return (
        *_shared(whole),
        *replicated(
            r"image_embedder\.(norm_in|norm_out|linear_[12])",
            r"context_embedder_2\.(norm|linear_[123])",
            r"time_embed\.timestep_embedder\.linear_[12]",
        ),
        *replicated(
            r"time_embed\.timestep_embedder_r\.linear_[12]",
            optional=True,
            note="step-distilled checkpoints",
        ),
        *replicated("cond_type_embed", leaves="weight"),
    )


def transformer_13b(*, whole: Whole = None) -> Rules:
    """Rules for ``HunyuanVideoTransformer3DModel``; see :func:`transformer_15`."""
    return (
        *_shared(whole),
        *replicated(r"time_text_embed\.(timestep|text)_embedder\.linear_[12]"),
        *replicated(
            r"time_text_embed\.guidance_embedder\.linear_[12]",
            optional=True,
            note="checkpoints that take the guidance scale as an input",
        ),
        *where_there_are(
            *column(_SINGLE + r"attn\.to_[qkv]", note="heads over tp"),
            *replicated(_SINGLE + r"attn\.norm_[qk]"),
            *column(_SINGLE + "proj_mlp"),
            *_mlp_output(
                _SINGLE + "proj_out",
                whole,
                note="on attention and feed-forward, which are added up by themselves",
            ),
            *_modulation(_SINGLE + r"norm\.linear", whole),
        ),
    )


TRANSFORMER_15 = transformer_15()
TRANSFORMER_13B = transformer_13b()

LAYOUTS_15: Mapping[str, Rules] = {
    "replicated-attention": transformer_15(whole="attention"),
    "replicated-out": transformer_15(whole="outputs"),
}
LAYOUTS_13B: Mapping[str, Rules] = {
    "replicated-attention": transformer_13b(whole="attention"),
    "replicated-out": transformer_13b(whole="outputs"),
}


def _decoder_only_language_model(*, bias: bool) -> Rules:
    """Llama and its kin; ``bias`` is that of q, k and v."""
    layer = r"layers\.\d+\."
    return (
        ShardRule(
            pattern=r"embed_tokens\.weight",
            spec=ROW,
            note="by feature: a lookup by id stays local for any vocabulary size",
        ),
        *column(layer + r"self_attn\.[qkv]_proj", bias=bias, note="heads over tp"),
        *row(layer + r"self_attn\.o_proj", bias=False),
        *column(layer + r"mlp\.(gate|up)_proj", bias=False),
        *row(layer + r"mlp\.down_proj", bias=False),
        *replicated(
            layer + r"(input|post_attention)_layernorm", "norm", leaves="weight"
        ),
    )


LLAMA = _decoder_only_language_model(bias=False)

QWEN = _decoder_only_language_model(bias=True)
"""28 heads on 4: from tp = 8 the weights are split within heads, and attention runs
whole on every device. Exact all the same; an encoder runs once a video."""

BYT5: Rules = replicated(
    "shared",
    r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.[qkvo]",
    r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias",
    r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.(wi_[01]|wo)",
    r"encoder\.(block\.\d+\.layer\.[01]\.layer_norm|final_layer_norm)",
    leaves="weight",
    note="6 heads, 0.2 billion parameters: not worth it",
)

_LAYER = r"encoder\.layers\.\d+\."

CLIP: Rules = replicated(
    r"embeddings\.(token|position)_embedding",
    _LAYER + r"(self_attn\.([qkv]|out)_proj|mlp\.fc[12]|layer_norm[12])",
    "final_layer_norm",
    note="12 heads, 0.1 billion parameters: not worth it",
)

SIGLIP: Rules = (
    *replicated(r"embeddings\.(patch|position)_embedding"),
    *column(_LAYER + r"self_attn\.[qkv]_proj", note="heads over tp"),
    *row(_LAYER + r"self_attn\.out_proj"),
    *column(_LAYER + r"mlp\.fc1"),
    *row(_LAYER + r"mlp\.fc2"),
    *replicated(_LAYER + "layer_norm[12]", "post_layernorm"),
    *replicated(
        "head",
        leaves=r"(probe|attention\.in_proj_(weight|bias)"
        r"|(attention\.out_proj|layernorm|mlp\.fc[12])\.(weight|bias))",
        optional=True,
        note="the pooled output, which the pipeline does not use",
    ),
)

_VAE = r"(encoder|decoder)\."
_VAE_BLOCK = r"(mid_block|(down|up)_blocks\.\d+)\."
_ATTENTION = r"mid_block\.attentions\.\d+\."

VAE_15: Rules = (
    *replicated(
        r"conv_(in|out)\.conv",
        _VAE_BLOCK + r"(resnets\.\d+\.conv[12]|(down|up)samplers\.\d+\.conv)\.conv",
        _ATTENTION + "(to_[qkv]|proj_out)",
        within=_VAE,
    ),
    *replicated(
        _VAE_BLOCK + r"resnets\.\d+\.conv_shortcut",
        within=_VAE,
        optional=True,
        note="where the channels of a block change, in no published checkpoint",
    ),
    *replicated(
        _VAE_BLOCK + r"resnets\.\d+\.norm[12]",
        _ATTENTION + "norm",
        "norm_out",
        within=_VAE,
        leaves="gamma",
    ),
)

VAE_13B: Rules = (
    *replicated(
        r"conv_(in|out)\.conv",
        _VAE_BLOCK + r"resnets\.\d+\.((conv[12]|conv_shortcut)\.conv|norm[12])",
        _VAE_BLOCK + r"(down|up)samplers\.\d+\.conv\.conv",
        "conv_norm_out",
        within=_VAE,
    ),
    *replicated(
        _ATTENTION + r"(group_norm|to_[qkv]|to_out\.0)",
        within=_VAE,
        optional=True,
        note="off where mid_block_add_attention is false",
    ),
    *replicated("(post_)?quant_conv"),
)
