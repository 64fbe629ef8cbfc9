"""The mesh that is chosen where none is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from tests.pipelines.example import all_examples, made, saved
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.checks import default_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter

PAIR, ALONG = MeshSpec(dp=2, sp=4), MeshSpec(sp=8)


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
    heard = Reporter()
    folder = PipelineFolder.find(str(tmp_path / "pipeline"), heard)
    found = default_mesh(folder, jax.devices(), Settings(), asked | more, heard)
    assert found == mesh


def test_an_odd_number_of_devices_has_no_pair() -> None:
    folder: Any = None  # it is not looked at
    found = default_mesh(folder, jax.devices()[:3], Settings(), {}, Reporter())
    assert found == MeshSpec(sp=3)
