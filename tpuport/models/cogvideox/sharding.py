"""Where the weights of each component go.

torch stores Linear weights as [out, in]: a column-parallel layer splits dim 0 and its
bias, a row-parallel layer splits dim 1 and keeps its bias whole. Every stored weight
matches exactly one rule; the session refuses anything else.
"""

from __future__ import annotations

from tpuport.core.tracing.context import AttentionPolicy
from tpuport.core.weights.sharding import ShardRule

ATTENTION = AttentionPolicy(batch="dp", heads="tp", sequence="sp")

COLUMN = ("tp", None)
ROW = (None, "tp")

TRANSFORMER: tuple[ShardRule, ...] = (
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.attn1\.to_[qkv]\.weight",
        spec=COLUMN,
        note="heads over tp",
    ),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.attn1\.to_[qkv]\.bias",
        spec=("tp",),
        optional=True,
    ),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.attn1\.to_out\.0\.weight",
        spec=ROW,
        note="sums over tp",
    ),
    ShardRule(pattern=r"transformer_blocks\.\d+\.attn1\.to_out\.0\.bias", spec=()),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.attn1\.norm_[qk]\.(weight|bias)",
        spec=(),
        note="per head dim, the same for every head",
    ),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.ff\.net\.0\.proj\.weight", spec=COLUMN
    ),
    ShardRule(pattern=r"transformer_blocks\.\d+\.ff\.net\.0\.proj\.bias", spec=("tp",)),
    ShardRule(pattern=r"transformer_blocks\.\d+\.ff\.net\.2\.weight", spec=ROW),
    ShardRule(pattern=r"transformer_blocks\.\d+\.ff\.net\.2\.bias", spec=()),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.norm[12]\.linear\.weight",
        spec=COLUMN,
        note="adaLN, 2.4 of 5.6 billion parameters of 1.5-5b with ff",
    ),
    ShardRule(pattern=r"transformer_blocks\.\d+\.norm[12]\.linear\.bias", spec=("tp",)),
    ShardRule(
        pattern=r"transformer_blocks\.\d+\.norm[12]\.norm\.(weight|bias)", spec=()
    ),
    ShardRule(pattern=r"norm_out\.linear\.weight", spec=COLUMN),
    ShardRule(pattern=r"norm_out\.linear\.bias", spec=("tp",)),
    ShardRule(pattern=r"(norm_final|norm_out\.norm)\.(weight|bias)", spec=()),
    ShardRule(
        pattern=r"patch_embed\.(proj|text_proj)\.(weight|bias)",
        spec=(),
        note="convolution in 1.0, linear in 1.5; small in both",
    ),
    ShardRule(
        pattern=r"patch_embed\.pos_embedding",
        spec=(),
        optional=True,
        note="learned positions, stored by image-to-video checkpoints only",
    ),
    ShardRule(pattern=r"time_embedding\.linear_[12]\.(weight|bias)", spec=()),
    ShardRule(
        pattern=r"ofs_embedding\.linear_[12]\.(weight|bias)",
        spec=(),
        optional=True,
        note="1.5 image to video",
    ),
    ShardRule(pattern=r"proj_out\.(weight|bias)", spec=()),
)

TEXT_ENCODER: tuple[ShardRule, ...] = (
    ShardRule(
        pattern=r"shared\.weight",
        spec=ROW,
        note="by feature: a lookup by id stays local for any vocabulary size",
    ),
    ShardRule(
        pattern=r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.[qkv]\.weight",
        spec=COLUMN,
    ),
    ShardRule(
        pattern=r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.o\.weight", spec=ROW
    ),
    ShardRule(
        pattern=r"encoder\.block\.0\.layer\.0\.SelfAttention"
        r"\.relative_attention_bias\.weight",
        spec=ROW,
        note="[buckets, heads]",
    ),
    ShardRule(
        pattern=r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.wi(_[01])?\.weight",
        spec=COLUMN,
    ),
    ShardRule(
        pattern=r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.wo\.weight", spec=ROW
    ),
    ShardRule(
        pattern=r"encoder\.(block\.\d+\.layer\.[01]\.layer_norm|final_layer_norm)"
        r"\.weight",
        spec=(),
    ),
)

_VAE_BLOCK = r"(encoder|decoder)\.(mid_block|(down|up)_blocks\.\d+)"

VAE: tuple[ShardRule, ...] = (
    ShardRule(
        pattern=r"(encoder|decoder)\.conv_(in|out)\.conv\.(weight|bias)", spec=()
    ),
    ShardRule(
        pattern=_VAE_BLOCK + r"\.resnets\.\d+\.conv[12]\.conv\.(weight|bias)", spec=()
    ),
    ShardRule(
        pattern=_VAE_BLOCK + r"\.resnets\.\d+\.conv_shortcut\.(conv\.)?(weight|bias)",
        spec=(),
        optional=True,
    ),
    ShardRule(
        pattern=_VAE_BLOCK + r"\.resnets\.\d+\.norm[12]\.(weight|bias)",
        spec=(),
        note="plain group norm, in the encoder",
    ),
    ShardRule(
        pattern=_VAE_BLOCK
        + r"\.resnets\.\d+\.norm[12]\.(norm_layer|conv_[yb]\.conv)\.(weight|bias)",
        spec=(),
        note="norm conditioned on the latents, in the decoder",
    ),
    ShardRule(
        pattern=_VAE_BLOCK + r"\.(down|up)samplers\.\d+\.conv\.(weight|bias)", spec=()
    ),
    ShardRule(pattern=r"encoder\.norm_out\.(weight|bias)", spec=()),
    ShardRule(
        pattern=r"decoder\.norm_out\.(norm_layer|conv_[yb]\.conv)\.(weight|bias)",
        spec=(),
    ),
    ShardRule(
        pattern=r"(post_)?quant_conv\.(weight|bias)",
        spec=(),
        optional=True,
        note="off in every published checkpoint",
    ),
)
