"""How tensor parallelism splits CogVideoX: heads, and features of wide layers."""

from __future__ import annotations

from tpuport.plugin import Layout

TRANSFORMER: Layout = {
    r"attn1\.to_[qkv]\.weight": ("tp", None),
    r"attn1\.to_[qkv]\.bias": ("tp",),
    r"attn1\.to_out\.0\.weight": (None, "tp"),
    r"ff\.net\.0\.proj\.weight": ("tp", None),
    r"ff\.net\.0\.proj\.bias": ("tp",),
    r"ff\.net\.2\.weight": (None, "tp"),
    # The modulation has 2.4 of the 5.6 billion parameters of 1.5-5b.
    r"(norm[12]|norm_out)\.linear\.weight": ("tp", None),
    r"(norm[12]|norm_out)\.linear\.bias": ("tp",),
}

TEXT_ENCODER: Layout = {
    # By feature: a lookup by id stays local for any size of the vocabulary.
    r"shared\.weight": (None, "tp"),
    r"SelfAttention\.[qkv]\.weight": ("tp", None),
    r"SelfAttention\.o\.weight": (None, "tp"),
    r"relative_attention_bias\.weight": (None, "tp"),
    r"DenseReluDense\.wi(_[01])?\.weight": ("tp", None),
    r"DenseReluDense\.wo\.weight": (None, "tp"),
}
