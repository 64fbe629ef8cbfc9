"""Where the weights of each component go.

Every stored weight matches exactly one rule; the session refuses anything else.
"""

from __future__ import annotations

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

_BLOCK = r"transformer_blocks\.\d+\."
_QKV = _BLOCK + r"attn1\.to_[qkv]"

TRANSFORMER: Rules = (
    *column(_QKV, bias=False, note="heads over tp"),
    ShardRule(pattern=_QKV + r"\.bias", spec=("tp",), optional=True),
    *row(_BLOCK + r"attn1\.to_out\.0", note="sums over tp"),
    *replicated(
        _BLOCK + r"attn1\.norm_[qk]", note="per head dim, the same for every head"
    ),
    *column(_BLOCK + r"ff\.net\.0\.proj"),
    *row(_BLOCK + r"ff\.net\.2"),
    *column(
        _BLOCK + r"norm[12]\.linear",
        note="adaLN, 2.4 of 5.6 billion parameters of 1.5-5b with ff",
    ),
    *column(r"norm_out\.linear"),
    *replicated(_BLOCK + r"norm[12]\.norm", "norm_final", r"norm_out\.norm"),
    *replicated(
        r"patch_embed\.(proj|text_proj)",
        note="convolution in 1.0, linear in 1.5; small in both",
    ),
    *replicated(
        "patch_embed",
        leaves="pos_embedding",
        optional=True,
        note="learned positions, stored by image-to-video checkpoints only",
    ),
    *replicated(r"time_embedding\.linear_[12]", "proj_out"),
    *replicated(
        r"ofs_embedding\.linear_[12]", optional=True, note="1.5 image to video"
    ),
)

_LAYER = r"encoder\.block\.\d+\.layer\."

TEXT_ENCODER: Rules = (
    ShardRule(
        pattern=r"shared\.weight",
        spec=ROW,
        note="by feature: a lookup by id stays local for any vocabulary size",
    ),
    *column(_LAYER + r"0\.SelfAttention\.[qkv]", bias=False),
    *row(_LAYER + r"0\.SelfAttention\.o", bias=False),
    ShardRule(
        pattern=r"encoder\.block\.0\.layer\.0\.SelfAttention"
        r"\.relative_attention_bias\.weight",
        spec=ROW,
        note="[buckets, heads]",
    ),
    *column(_LAYER + r"1\.DenseReluDense\.wi(_[01])?", bias=False),
    *row(_LAYER + r"1\.DenseReluDense\.wo", bias=False),
    *replicated(
        _LAYER + r"[01]\.layer_norm", r"encoder\.final_layer_norm", leaves="weight"
    ),
)

_CODER = "(encoder|decoder)"
_VAE_BLOCK = rf"{_CODER}\.(mid_block|(down|up)_blocks\.\d+)\."
_SPATIAL_NORM = r"(norm_layer|conv_[yb]\.conv)"

VAE: Rules = (
    *replicated(_CODER + r"\.conv_(in|out)\.conv"),
    *replicated(r"resnets\.\d+\.conv[12]\.conv", within=_VAE_BLOCK),
    *replicated(
        r"resnets\.\d+\.conv_shortcut(\.conv)?", within=_VAE_BLOCK, optional=True
    ),
    *replicated(
        _VAE_BLOCK + r"resnets\.\d+\.norm[12]",
        r"encoder\.norm_out",
        note="plain group norm, in the encoder",
    ),
    *replicated(
        _VAE_BLOCK + r"resnets\.\d+\.norm[12]\." + _SPATIAL_NORM,
        r"decoder\.norm_out\." + _SPATIAL_NORM,
        note="norm conditioned on the latents, in the decoder",
    ),
    *replicated(r"(down|up)samplers\.\d+\.conv", within=_VAE_BLOCK),
    *where_there_are(
        *replicated("(post_)?quant_conv", note="off in every published checkpoint")
    ),
)
