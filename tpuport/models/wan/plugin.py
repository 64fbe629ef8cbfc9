"""The plugin of Wan 2.1 and 2.2."""

from __future__ import annotations

from pathlib import Path

from tpuport.plugin import Layout, ModelPlugin, Module, Published, hookimpl

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
CONFIGS = Path(__file__).with_name("configs")
_720P = {"height": 720, "width": 1280}
_5B = {"height": 704, "width": 1280, "num_frames": 121}
VARIANTS = {
    hub.lower(): Published(
        f"Wan-AI/Wan{hub}-Diffusers", CONFIGS / file, title, defaults
    )
    for hub, file, title, defaults in (
        ("2.1-T2V-1.3B", "2.1-t2v-1.3b.json", "text to video", {}),
        ("2.1-T2V-14B", "2.1-t2v-14b.json", "text to video", {}),
        ("2.1-I2V-14B-480P", "2.1-i2v-14b.json", "image to video", {}),
        ("2.1-I2V-14B-720P", "2.1-i2v-14b.json", "image to video", _720P),
        ("2.2-T2V-A14B", "2.2-t2v-a14b.json", "text to video, two experts", _720P),
        ("2.2-I2V-A14B", "2.2-i2v-a14b.json", "image to video, two experts", _720P),
        ("2.2-TI2V-5B", "2.2-ti2v-5b.json", "text to video, image to video", _5B),
    )
}
#: Channels that each class gives its transformer; 48 are those of 2.2 5B.
CHANNELS = {"": (16, 48), "ImageToVideo": (36, 48), "VideoToVideo": (16,)}

PLUGIN = ModelPlugin(
    name="wan",
    title="Wan 2.1 and 2.2, text, image and video to video",
    claims=tuple(f"diffusers:Wan{kind}Pipeline" for kind in CHANNELS),
    modules={"transformer": TRANSFORMER, "transformer_2": TRANSFORMER},
    variants=VARIANTS,
    suits=lambda name, config: (
        config.get("in_channels", 16) in CHANNELS[name[3 : -len("Pipeline")]]
    ),
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
