"""The plugin of HunyuanVideo-1.5."""

from __future__ import annotations

from typing import Any

from tpuport.models.hunyuanvideo.lora_names import LORA_NAMES
from tpuport.models.hunyuanvideo.sharding import layout, layouts
from tpuport.plugin import ModelPlugin, Module, Published, hookimpl

HERE = "tpuport.models.hunyuanvideo"

_SMALL: dict[str, Any] = {"num_frames": 17, "num_inference_steps": 8, "fps": 24}
_480P: dict[str, Any] = {"height": 480, "width": 848, "fps": 24}
_720P: dict[str, Any] = {"height": 720, "width": 1280, "fps": 24}
# From an image, a video has the image's shape.
_FPS: dict[str, Any] = {"fps": 24}

_PUBLISHED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("480p-t2v", "480p_t2v", "text to video", _480P),
    ("480p-i2v", "480p_i2v", "image to video", _FPS),
    ("720p-t2v", "720p_t2v", "text to video", _720P),
    ("720p-i2v", "720p_i2v", "image to video", _FPS),
    ("480p-t2v-cfg-distilled", "480p_t2v_distilled", "no guidance", _480P),
    ("480p-i2v-cfg-distilled", "480p_i2v_distilled", "no guidance", _FPS),
    ("720p-t2v-cfg-distilled", "720p_t2v_distilled", "no guidance", _720P),
    ("720p-i2v-cfg-distilled", "720p_i2v_distilled", "no guidance", _FPS),
    (
        "480p-i2v-step-distilled",
        "480p_i2v_step_distilled",
        "no guidance, few steps",
        _FPS | {"num_inference_steps": 12},
    ),
)

VARIANTS = {
    "demo": Published(
        configs="configs/demo-t2v.json",
        title="small and random, text to video",
        defaults=_SMALL | {"height": 96, "width": 160},
    ),
    "demo-i2v": Published(
        configs="configs/demo-i2v.json",
        title="small and random, image to video",
        defaults=_SMALL,
    ),
    **{
        f"1.5-{name}": Published(
            f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{hub}",
            f"configs/1.5-{name}.json",
            title,
            defaults,
        )
        for name, hub, title, defaults in _PUBLISHED
    },
}

PLUGIN = ModelPlugin(
    name="hunyuanvideo",
    title="HunyuanVideo-1.5, text and image to video",
    claims=(
        "diffusers:HunyuanVideo15Pipeline",
        "diffusers:HunyuanVideo15ImageToVideoPipeline",
    ),
    modules={
        "transformer": Module(
            layout=layout(singles=False),
            layouts=layouts(singles=False),
            native=f"{HERE}.native:TRANSFORMER_15",
        ),
        "vae": Module(split="space"),
    },
    patches=f"{HERE}.patches:PATCHES",
    variants=VARIANTS,
    lora_names=LORA_NAMES,
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
