"""The plugin of CogVideoX and CogVideoX 1.5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuport.models.cogvideox import sharding
from tpuport.plugin import ModelPlugin, Module, Published, hookimpl

HERE = "tpuport.models.cogvideox"
CONFIGS = Path(__file__).with_name("configs")

_1_0 = {"height": 480, "width": 720, "num_frames": 49, "fps": 8}
_1_5 = {"height": 768, "width": 1360, "num_frames": 81, "fps": 16}
_DEMO = {"height": 128, "width": 128, "num_frames": 17, "fps": 8}
#: The sampler that the model cards of all but 2b ask for.
_DPM = {"scheduler": "dpm", "use_dynamic_cfg": True}


def _variant(name: str, title: str, **defaults: Any) -> Published:
    repo = "" if name.startswith("demo") else f"THUDM/CogVideoX{name}"
    return Published(
        repo, CONFIGS / f"{name.lstrip('-').lower()}.json", title, defaults
    )


VARIANTS = {
    "demo": Published(
        configs="demo",
        title="a small one of moving shapes, in the package",
        defaults={**_DEMO, **_DPM, "num_inference_steps": 12},
    ),
    "demo-i2v": _variant(
        "demo-i2v",
        "image to video, with random weights, made on first use",
        **{**_DEMO, "width": 192},
        **_DPM,
        num_inference_steps=8,
    ),
    "2b": _variant("-2b", "text and video to video", **_1_0),
    "5b": _variant("-5b", "text and video to video", **_1_0, **_DPM),
    "5b-i2v": _variant("-5b-I2V", "image to video, of 480x720 alone", **_1_0, **_DPM),
    "1.5-5b": _variant("1.5-5B", "text to video", **_1_5, **_DPM),
    "1.5-5b-i2v": _variant("1.5-5B-I2V", "image to video", **_1_5, **_DPM),
}


def suits(pipeline: str, config: Mapping[str, Any]) -> bool:
    """Whether a transformer has the channels of an image, where the pipeline has."""
    channels = config.get("in_channels", 16)
    image = channels == 2 * (config.get("out_channels") or 16)
    # Upstream's video to video refuses every number of frames of 1.5.
    later = config.get("patch_size_t") is not None
    return image == ("Image" in pipeline) and not ("VideoToVideo" in pipeline and later)


PLUGIN = ModelPlugin(
    name="cogvideox",
    title="CogVideoX and CogVideoX 1.5, text, image and video to video",
    claims=(
        "diffusers:CogVideoXPipeline",
        "diffusers:CogVideoXImageToVideoPipeline",
        "diffusers:CogVideoXVideoToVideoPipeline",
    ),
    modules={
        "transformer": Module(
            layout=sharding.TRANSFORMER, native=f"{HERE}.native:TRANSFORMER"
        ),
        "text_encoder": Module(layout=sharding.TEXT_ENCODER),
        "vae": Module(split="space", forms={"flax": f"{HERE}.flax_vae:FLAX"}),
    },
    patches=f"{HERE}.patches:PATCHES",
    variants=VARIANTS,
    suits=suits,
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
