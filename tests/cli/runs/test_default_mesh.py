"""The mesh that is chosen where none is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from tests.pipelines.example import all_examples, made, saved
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.checks import PipelineCall
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter

PAIR, ALONG = MeshSpec(dp=2, sp=4), MeshSpec(sp=8)


def call_of(folder: Any, arguments: dict[str, Any]) -> PipelineCall:
    return PipelineCall(
        settings=Settings(), folder=folder, reporter=Reporter(), arguments=arguments
    )


@pytest.mark.parametrize(
    ("name", "more", "mesh"),
    [
        ("CogVideoXPipeline", {}, PAIR),  # one call of two rows
        ("CogVideoXPipeline", {"guidance_scale": 1.0}, ALONG),
        ("WanPipeline", {}, PAIR),  # two calls of one row
        ("WanPipeline", {"guidance_scale": 1.0}, ALONG),
        ("HunyuanVideoPipeline", {}, PAIR),
        # Guidance is an input of the model then.
        ("HunyuanVideoPipeline", {"true_cfg_scale": 1.0}, ALONG),
    ],
)
def test_the_pair_of_a_guided_step_is_split(
    name: str, more: dict[str, Any], mesh: MeshSpec, tmp_path: Path
) -> None:
    pipeline, asked = made(all_examples()[name])
    saved(pipeline, tmp_path / "pipeline")
    folder = PipelineFolder.find(str(tmp_path / "pipeline"), Reporter())
    assert call_of(folder, asked | more).default_mesh(jax.devices()) == mesh


def test_an_odd_number_of_devices_has_no_pair() -> None:
    assert call_of(None, {}).default_mesh(jax.devices()[:3]) == MeshSpec(sp=3)
