"""From the prompt to frames, beside upstream's own pipeline, in float32.

``tests/pipelines/`` runs the form of 5b, from text, an image and a video.
"""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

import tpuport
from tests.pipelines.example import all_examples, difference, made, prepared, run
from tests.tolerances import TOLERANCES

#: Form -> the transformer, and the pipeline's class.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "2b": ({"use_rotary_positional_embeddings": False}, ""),
    "5b": ({}, ""),
    "1.5": ({"patch_size_t": 2}, ""),
    "5b-i2v": ({}, "ImageToVideo"),
    "1.5-i2v": (
        {
            "patch_size_t": 2,
            "ofs_embed_dim": 8,
            "use_learned_positional_embeddings": False,
        },
        "ImageToVideo",
    ),
    "2b-v2v": ({"use_rotary_positional_embeddings": False}, "VideoToVideo"),
}


def make(form: str) -> tuple[Any, dict[str, Any]]:
    changed, task = FORMS[form]
    pipeline, call = made(all_examples()[f"CogVideoX{task}Pipeline"])
    small, first = pipeline.transformer, form.startswith("2b")
    other = type(small).from_config({**small.config, **changed})
    pipeline.register_modules(transformer=prepared(other))
    if first:
        config = pipeline.scheduler.config
        pipeline.scheduler = diffusers.CogVideoXDDIMScheduler.from_config(config)
    return pipeline, call | {"use_dynamic_cfg": not first}


sweep = pytest.mark.sweep


@pytest.mark.parametrize(
    ("form", "mesh", "how"),
    [
        ("2b", "sp=3", {}),
        ("5b", "dp=1", {"blocks": "upstream"}),
        ("1.5", "dp=2,sp=2,tp=2", {"vae": "flax"}),
        pytest.param("1.5", "sp=2", {"blocks": "upstream"}, marks=sweep),
        ("1.5-i2v", "dp=2,sp=2", {}),
        pytest.param("5b-i2v", "sp=2,tp=2", {"vae": "flax"}, marks=sweep),
        pytest.param("2b-v2v", "sp=2", {}, marks=sweep),
    ],
)
def test_every_form_makes_upstreams_video(
    form: str, mesh: str, how: dict[str, str]
) -> None:
    pipeline, call = make(form)
    expected = run(pipeline, call)
    with tpuport.ported(pipeline, mesh=mesh, **how):
        found = run(pipeline, call)
    assert difference(found, expected) < TOLERANCES["video float32"]
    assert all(array.std() > 0 for array in expected)
