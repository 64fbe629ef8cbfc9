"""Where the weights of Wan's transformer go."""

from __future__ import annotations

from tpuport.core.weights.sharding import ShardRule
from tpuport.core.weights.tensor_parallel import (
    Rules,
    column,
    replicated,
    row,
    where_there_are,
)

_BLOCK = r"blocks\.\d+\."

TRANSFORMER: Rules = (
    *column(_BLOCK + r"attn[12]\.to_[qkv]", note="heads over tp"),
    *row(_BLOCK + r"attn[12]\.to_out\.0", note="sums over tp"),
    *column(_BLOCK + r"ffn\.net\.0\.proj"),
    *row(_BLOCK + r"ffn\.net\.2"),
    *replicated(_BLOCK + r"attn[12]\.norm_[qk]", leaves="weight", note="of all heads"),
    *where_there_are(
        *column(_BLOCK + r"attn2\.add_[kv]_proj", note="2.1 image to video"),
        *replicated(_BLOCK + r"attn2\.norm_added_k", leaves="weight"),
        *replicated(_BLOCK + "norm2", note="with cross_attn_norm"),
        *replicated(r"condition_embedder\.image_embedder\.(norm[12]|ff\.net\.0\.proj)"),
        *replicated(r"condition_embedder\.image_embedder\.ff\.net\.2"),
    ),
    ShardRule(
        pattern=r"condition_embedder\.image_embedder\.pos_embed",
        spec=(),
        optional=True,
        note="first and last frame to video",
    ),
    ShardRule(pattern=rf"({_BLOCK})?scale_shift_table", spec=()),
    *replicated(
        r"condition_embedder\.(time|text)_embedder\.linear_[12]",
        r"condition_embedder\.time_proj",
        "patch_embedding",
        "proj_out",
    ),
)
