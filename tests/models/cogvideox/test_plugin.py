"""The data of the plugin: variants, layouts, and which class runs which transformer."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from tpuport.core.pipelines.call_arguments import PARAMETERS
from tpuport.core.pipelines.folder import class_taking
from tpuport.models.cogvideox.plugin import PLUGIN
from tpuport.plugins import folder_of

#: Billions of parameters of the transformer, by the model cards.
BILLIONS = {"2b": 1.7, "5b": 5.6, "5b-i2v": 5.6, "1.5-5b": 5.6, "1.5-5b-i2v": 5.6}
MESH = {"dp": 1, "sp": 1, "tp": 2}


def configs(variant: str) -> Any:
    return PLUGIN.variants[variant].read(folder_of("cogvideox"))


@pytest.mark.parametrize("variant", PLUGIN.variants)
def test_configs_build_upstreams_classes_and_every_weight_has_its_place(
    variant: str,
) -> None:
    known = configs(variant)
    with torch.device("meta"):
        transformer = diffusers.CogVideoXTransformer3DModel(**known["transformer"])
        text = T5EncoderModel(T5Config(**known["text_encoder"]))
        vae = diffusers.AutoencoderKLCogVideoX(**known["vae"])
    count = sum(tensor.numel() for tensor in transformer.parameters()) / 1e9
    if variant in BILLIONS:
        assert count == pytest.approx(BILLIONS[variant], abs=0.05)
    for name, module, share in (
        ("transformer", transformer, 0.52),
        ("text_encoder", text, 0.52),
        ("vae", vae, 1),
    ):
        weights = dict(module.named_parameters())
        plan = PLUGIN.plan(name, "default", weights, MESH)
        assert plan.assignments.keys() == weights.keys()
        if variant in BILLIONS:
            assert plan.bytes_per_device <= share * plan.total_bytes
    names = known["model_index"]["scheduler"][1]
    scheduler = getattr(diffusers, names)(**known["scheduler"])
    assert scheduler.config.prediction_type == "v_prediction"


@pytest.mark.parametrize(
    ("variant", "given", "expected"),
    [
        ("5b", (), "CogVideoXPipeline"),
        ("5b", ("video",), "CogVideoXVideoToVideoPipeline"),
        ("5b", ("image",), None),
        ("5b-i2v", ("image",), "CogVideoXImageToVideoPipeline"),
        ("5b-i2v", ("video",), None),
        # Upstream's pipeline refuses every number of frames.
        ("1.5-5b", ("video",), None),
        ("demo", ("video",), "CogVideoXVideoToVideoPipeline"),
        ("demo-i2v", ("image",), "CogVideoXImageToVideoPipeline"),
    ],
)
def test_the_class_is_the_one_that_takes_what_is_given(
    variant: str, given: tuple[str, ...], expected: str | None
) -> None:
    known = configs(variant)
    media = {field: PARAMETERS[field] for field in given}
    index, transformer = known["model_index"], known["transformer"]
    found = class_taking(PLUGIN, index, transformer, media)
    assert (found and found.__name__) == expected
