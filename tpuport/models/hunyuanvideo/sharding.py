"""Where the weights of each component go.

torch stores Linear weights as [out, in]: a column-parallel layer splits dim 0 and its
bias, a row-parallel layer splits dim 1 and keeps its bias whole. Every stored weight
matches exactly one rule; the session refuses anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tpuport.core.tracing.context import AttentionPolicy
from tpuport.core.weights.sharding import ShardRule

ATTENTION = AttentionPolicy(batch="dp", heads="tp", sequence="sp")

COLUMN = ("tp", None)
ROW = (None, "tp")

Rules = tuple[ShardRule, ...]
Whole = Literal["attention", "outputs"] | None


def _column(
    layers: str, *, bias: bool = True, optional: bool = False, note: str = ""
) -> Rules:
    """Layers whose outputs are split, so their biases as well."""
    weight = ShardRule(
        pattern=layers + r"\.weight", spec=COLUMN, optional=optional, note=note
    )
    if not bias:
        return (weight,)
    return (
        weight,
        ShardRule(pattern=layers + r"\.bias", spec=("tp",), optional=optional),
    )


def _row(layers: str, *, bias: bool = True, note: str = "") -> Rules:
    """Layers whose inputs are split and whose outputs are summed over tp."""
    weight = ShardRule(pattern=layers + r"\.weight", spec=ROW, note=note)
    if not bias:
        return (weight,)
    return (weight, ShardRule(pattern=layers + r"\.bias", spec=()))


def _whole(names: str, *, optional: bool = False, note: str = "") -> Rules:
    """Weights that every device holds."""
    return (ShardRule(pattern=names, spec=(), optional=optional, note=note),)


def _where_there_are(*rules: ShardRule) -> Rules:
    """Rules of blocks that a legal config may have none of."""
    return tuple(replace(rule, optional=True) for rule in rules)


_DUAL = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."
_REFINER = r"context_embedder\.token_refiner\.refiner_blocks\.\d+\."


def _attention_output(layers: str, whole: Whole) -> Rules:
    """The last layers of attention, with their biases."""
    if whole is None:
        return _row(layers)
    return _whole(
        layers + r"\.(weight|bias)",
        note="whole: attention is gathered over tp, half the traffic of a sum",
    )


def _mlp_output(layers: str, whole: Whole, note: str = "") -> Rules:
    """The last layers of feed-forwards, with their biases."""
    if whole != "outputs":
        return _row(layers, note=note)
    return _whole(
        layers + r"\.(weight|bias)",
        note="whole: the hidden layer is gathered over tp, and nothing is summed",
    )


def _modulation(layers: str, whole: Whole) -> Rules:
    """The adaLN layers, whose split the video's hidden states take over.

    Split by output they split the hidden states over tp, which are gathered before
    every attention and feed-forward. Split by input they leave them whole.
    """
    if whole == "attention":
        return _row(layers, note="adaLN; leaves the hidden states whole")
    return _column(layers, note="adaLN; splits the hidden states as well")


def _dual_blocks(whole: Whole) -> Rules:
    """Blocks with one stream for the video and one for the text."""
    return (
        *_column(_DUAL + r"attn\.(to_[qkv]|add_[qkv]_proj)", note="heads over tp"),
        *_attention_output(_DUAL + r"attn\.(to_out\.0|to_add_out)", whole),
        *_whole(
            _DUAL + r"attn\.norm_(added_)?[qk]\.(weight|bias)",
            note="per head dim, the same for every head",
        ),
        *_column(_DUAL + r"ff(_context)?\.net\.0\.proj"),
        *_mlp_output(_DUAL + r"ff(_context)?\.net\.2", whole),
        *_modulation(_DUAL + r"norm1(_context)?\.linear", whole),
    )


def _embedders(whole: Whole) -> Rules:
    """What comes before the blocks, the text refiner included, and what comes after."""
    return (
        *_whole(r"x_embedder\.proj\.(weight|bias)"),
        *_whole(
            r"context_embedder\.time_text_embed\.(timestep|text)_embedder"
            r"\.linear_[12]\.(weight|bias)"
        ),
        *_whole(r"context_embedder\.proj_in\.(weight|bias)"),
        *_where_there_are(
            *_column(_REFINER + r"attn\.to_[qkv]"),
            *_row(_REFINER + r"attn\.to_out\.0"),
            *_column(_REFINER + r"ff\.net\.0\.proj"),
            *_row(_REFINER + r"ff\.net\.2"),
            *_modulation(_REFINER + r"norm_out\.linear", whole),
            *_whole(_REFINER + r"norm[12]\.(weight|bias)"),
        ),
        *_modulation(r"norm_out\.linear", whole),
        *_whole(r"proj_out\.(weight|bias)"),
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
        *_embedders(whole),
        *_whole(r"image_embedder\.(norm_in|norm_out|linear_[12])\.(weight|bias)"),
        *_whole(r"context_embedder_2\.(norm|linear_[123])\.(weight|bias)"),
        *_whole(r"time_embed\.timestep_embedder\.linear_[12]\.(weight|bias)"),
        *_whole(
            r"time_embed\.timestep_embedder_r\.linear_[12]\.(weight|bias)",
            optional=True,
            note="step-distilled checkpoints",
        ),
        *_whole(r"cond_type_embed\.weight"),
        *_dual_blocks(whole),
    )


def transformer_13b(*, whole: Whole = None) -> Rules:
    """Rules for ``HunyuanVideoTransformer3DModel``; see :func:`transformer_15`."""
    return (
        *_embedders(whole),
        *_whole(
            r"time_text_embed\.(timestep|text)_embedder\.linear_[12]\.(weight|bias)"
        ),
        *_whole(
            r"time_text_embed\.guidance_embedder\.linear_[12]\.(weight|bias)",
            optional=True,
            note="checkpoints that take the guidance scale as an input",
        ),
        *_dual_blocks(whole),
        *_where_there_are(
            *_column(_SINGLE + r"attn\.to_[qkv]", note="heads over tp"),
            *_whole(_SINGLE + r"attn\.norm_[qk]\.(weight|bias)"),
            *_column(_SINGLE + r"proj_mlp"),
            *_mlp_output(
                _SINGLE + r"proj_out",
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
        *_column(layer + r"self_attn\.[qkv]_proj", bias=bias, note="heads over tp"),
        *_row(layer + r"self_attn\.o_proj", bias=False),
        *_column(layer + r"mlp\.(gate|up)_proj", bias=False),
        *_row(layer + r"mlp\.down_proj", bias=False),
        *_whole(
            r"(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight",
        ),
    )


LLAMA = _decoder_only_language_model(bias=False)

QWEN = _decoder_only_language_model(bias=True)
"""28 heads on 4: from tp = 8 the weights are split within heads, and attention runs
whole on every device. Exact all the same; an encoder runs once a video."""

BYT5: Rules = (
    *_whole(r"shared\.weight", note="6 heads, 0.2 billion parameters: not worth it"),
    *_whole(r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.[qkvo]\.weight"),
    *_whole(
        r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight"
    ),
    *_whole(r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.(wi_[01]|wo)\.weight"),
    *_whole(r"encoder\.(block\.\d+\.layer\.[01]\.layer_norm|final_layer_norm)\.weight"),
)

CLIP: Rules = (
    *_whole(
        r"embeddings\.(token|position)_embedding\.weight",
        note="12 heads, 0.1 billion parameters: not worth it",
    ),
    *_whole(r"encoder\.layers\.\d+\.self_attn\.([qkv]|out)_proj\.(weight|bias)"),
    *_whole(r"encoder\.layers\.\d+\.mlp\.fc[12]\.(weight|bias)"),
    *_whole(r"(encoder\.layers\.\d+\.layer_norm[12]|final_layer_norm)\.(weight|bias)"),
)

_VISION = r"encoder\.layers\.\d+\."

SIGLIP: Rules = (
    *_whole(r"embeddings\.patch_embedding\.(weight|bias)"),
    *_whole(r"embeddings\.position_embedding\.weight"),
    *_column(_VISION + r"self_attn\.[qkv]_proj", note="heads over tp"),
    *_row(_VISION + r"self_attn\.out_proj"),
    *_column(_VISION + r"mlp\.fc1"),
    *_row(_VISION + r"mlp\.fc2"),
    *_whole(r"(encoder\.layers\.\d+\.layer_norm[12]|post_layernorm)\.(weight|bias)"),
    *_whole(
        r"head\.(probe|attention\.in_proj_(weight|bias)"
        r"|(attention\.out_proj|layernorm|mlp\.fc[12])\.(weight|bias))",
        optional=True,
        note="the pooled output, which the pipeline does not use",
    ),
)

_VAE = r"(encoder|decoder)\."
_VAE_BLOCK = _VAE + r"(mid_block|(down|up)_blocks\.\d+)\."
_VAE_RESNET = _VAE_BLOCK + r"resnets\.\d+\."
_VAE_ATTENTION = _VAE + r"mid_block\.attentions\.\d+\."

VAE_15: Rules = (
    *_whole(_VAE + r"conv_(in|out)\.conv\.(weight|bias)"),
    *_whole(_VAE_RESNET + r"conv[12]\.conv\.(weight|bias)"),
    *_whole(
        _VAE_RESNET + r"conv_shortcut\.(weight|bias)",
        optional=True,
        note="where the channels of a block change, in no published checkpoint",
    ),
    *_whole(_VAE_RESNET + r"norm[12]\.gamma"),
    *_whole(_VAE_BLOCK + r"(down|up)samplers\.\d+\.conv\.conv\.(weight|bias)"),
    *_whole(_VAE_ATTENTION + r"(to_[qkv]|proj_out)\.(weight|bias)"),
    *_whole(_VAE_ATTENTION + r"norm\.gamma"),
    *_whole(_VAE + r"norm_out\.gamma"),
)

VAE_13B: Rules = (
    *_whole(_VAE + r"conv_(in|out)\.conv\.(weight|bias)"),
    *_whole(_VAE_RESNET + r"(conv[12]|conv_shortcut)\.conv\.(weight|bias)"),
    *_whole(_VAE_RESNET + r"norm[12]\.(weight|bias)"),
    *_whole(_VAE_BLOCK + r"(down|up)samplers\.\d+\.conv\.conv\.(weight|bias)"),
    *_whole(
        _VAE_ATTENTION + r"(group_norm|to_[qkv]|to_out\.0)\.(weight|bias)",
        optional=True,
        note="off where mid_block_add_attention is false",
    ),
    *_whole(_VAE + r"conv_norm_out\.(weight|bias)"),
    *_whole(r"(post_)?quant_conv\.(weight|bias)"),
)
