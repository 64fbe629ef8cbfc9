"""Both plugins as data: their configs build upstream's classes, their layouts fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.hunyuanvideo.transformers import plugin_of
from tpuport.core.pipelines.stand_in import class_of
from tpuport.plugins import folder_of, get_model

MODELS = {"hunyuanvideo": "1.5 t2v", "hunyuanvideo-13b": "13b t2v"}
VARIANTS = [
    pytest.param(model, name, id=f"{model} {name}")
    for model in MODELS
    for name, one in get_model(model).variants.items()
    if one.configs
]


def configs_of(model: str, variant: str) -> Any:
    return get_model(model).variants[variant].read(folder_of(model))


@pytest.mark.parametrize(("model", "variant"), VARIANTS)
def test_configs_build_their_classes_and_layouts_fit(model: str, variant: str) -> None:
    """Every pattern matches weights, and all that it splits divides."""
    plugin, configs = plugin_of(MODELS[model]), configs_of(model, variant)
    index = configs["model_index"]
    assert index["_class_name"] in plugin.pipelines
    known = {n: e for n, e in index.items() if isinstance(e, list) and None not in e}
    pipeline = class_of("diffusers", index["_class_name"])
    assert known.keys() == pipeline._get_signature_types().keys()
    for name in ("transformer", "vae"):
        with torch.device("meta"):
            module = class_of(*known[name]).from_config(configs[name])
        weights = module.state_dict()
        for layout in plugin.layouts if name == "transformer" else ():
            plan = plugin.plan(name, layout, weights, {"dp": 1, "sp": 1, "tp": 8})
            assert plan.bytes_per_device < plan.total_bytes
        if name == "transformer" and "demo" not in variant:
            count = sum(one.numel() for one in weights.values())
            expected = {"hunyuanvideo": 8.3e9, "hunyuanvideo-13b": 12.8e9}[model]
            assert abs(count / expected - 1) < 0.02
    for name, (library, class_name) in known.items():
        if library == "transformers" and class_name.endswith(("Model", "Generation")):
            kind = class_of(library, class_name)
            with torch.device("meta"):
                kind(kind.config_class(**configs[name]))


@pytest.mark.parametrize("model", MODELS)
def test_upstream_has_all_that_a_plugin_names(model: str) -> None:
    plugin_of(MODELS[model]).check()


@pytest.mark.parametrize(
    ("variant", "guidance", "shift", "size"),
    [
        ("1.5-480p-t2v", 6.0, 5.0, 640),
        ("1.5-480p-i2v", 6.0, 5.0, 640),
        ("1.5-720p-t2v", 6.0, 9.0, 960),
        ("1.5-720p-i2v", 6.0, 7.0, 960),
        ("1.5-720p-t2v-cfg-distilled", 1.0, 9.0, 960),
        ("1.5-480p-i2v-step-distilled", 1.0, 7.0, 640),
    ],
)
def test_what_tells_the_published_checkpoints_apart(
    variant: str, guidance: float, shift: float, size: int
) -> None:
    configs = configs_of("hunyuanvideo", variant)
    assert configs["guider"]["guidance_scale"] == guidance
    assert configs["scheduler"]["shift"] == shift
    transformer = configs["transformer"]
    assert transformer["target_size"] == size
    assert transformer["task_type"] == ("i2v" if "i2v" in variant else "t2v")
    assert transformer["use_meanflow"] == ("step" in variant)
