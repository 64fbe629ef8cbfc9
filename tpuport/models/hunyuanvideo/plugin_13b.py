"""The plugin of HunyuanVideo, the model of 13 billion weights before 1.5."""

from __future__ import annotations

from typing import Any

from tpuport.models.hunyuanvideo.lora_names import LORA_NAMES
from tpuport.models.hunyuanvideo.sharding import layout, layouts
from tpuport.plugin import ModelPlugin, Module, Published, hookimpl

HERE = "tpuport.models.hunyuanvideo"
_SMALL: dict[str, Any] = {
    "height": 96,
    "width": 160,
    "num_frames": 17,
    "num_inference_steps": 8,
    "fps": 24,
}
_HUB = "hunyuanvideo-community/HunyuanVideo"

PLUGIN = ModelPlugin(
    name="hunyuanvideo-13b",
    title="HunyuanVideo 13B, text and image to video",
    claims=(
        "diffusers:HunyuanVideoPipeline",
        "diffusers:HunyuanVideoImageToVideoPipeline",
        "diffusers:HunyuanSkyreelsImageToVideoPipeline",
    ),
    modules={
        "transformer": Module(
            layout=layout(singles=True),
            layouts=layouts(singles=True),
            native=f"{HERE}.native_13b:TRANSFORMER_13B",
        ),
        "vae": Module(split="space"),
    },
    patches=f"{HERE}.patches_13b:PATCHES",
    lora_names=LORA_NAMES,
    variants={
        "demo": Published(
            configs="configs/demo-13b-t2v.json",
            title="small and random, text to video",
            defaults=_SMALL,
        ),
        "demo-i2v": Published(
            configs="configs/demo-13b-i2v.json",
            title="small and random, image to video",
            defaults=_SMALL,
        ),
        "t2v": Published(_HUB, "configs/13b-t2v.json", "text to video", {"fps": 24}),
        "i2v": Published(
            f"{_HUB}-I2V", "configs/13b-i2v.json", "image to video", {"fps": 24}
        ),
        "i2v-33ch": Published(
            f"{_HUB}-I2V-33ch",
            "configs/13b-i2v-33ch.json",
            "image to video, image in channels",
            {"fps": 24},
        ),
    },
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
