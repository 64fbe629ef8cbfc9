"""The plugin of Wan 2.1 and 2.2."""

from __future__ import annotations

from tpuport.plugin import Layout, ModelPlugin, Module, hookimpl

#: Heads, and features of the feed-forward layer, over tp.
LAYOUT: Layout = {
    r"attn[12]\.(to_[qkv]|add_[kv]_proj)\.weight": ("tp", None),
    r"attn[12]\.(to_[qkv]|add_[kv]_proj)\.bias": ("tp",),
    r"attn[12]\.to_out\.0\.weight": (None, "tp"),
    r"ffn\.net\.0\.proj\.weight": ("tp", None),
    r"ffn\.net\.0\.proj\.bias": ("tp",),
    r"ffn\.net\.2\.weight": (None, "tp"),
}
TRANSFORMER = Module(layout=LAYOUT, native="tpuport.models.wan.native:TRANSFORMER")

PLUGIN = ModelPlugin(
    name="wan",
    title="Wan 2.1 and 2.2, text, image and video to video",
    claims=(
        "diffusers:WanPipeline",
        "diffusers:WanImageToVideoPipeline",
        "diffusers:WanVideoToVideoPipeline",
    ),
    modules={"transformer": TRANSFORMER, "transformer_2": TRANSFORMER},
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
