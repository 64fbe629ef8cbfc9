"""What a user asks of a pipeline becomes keywords of its call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpuport.core.pipelines.call_arguments import arguments_of
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.spec.run_settings import Asked
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError


def folder_of(place: Path, pipeline: str) -> PipelineFolder:
    index = {"_class_name": pipeline}
    (place / "model_index.json").write_text(json.dumps(index))
    return PipelineFolder(place, "folder", index, Checkpoint(place, "folder"))


def test_an_option_has_the_type_that_the_pipeline_says(tmp_path: Path) -> None:
    """YAML reads 1e-3 as a text."""
    asked = Asked(prompt=("a fox",), options={"guidance_scale_2": "1e-3"})
    found = arguments_of(folder_of(tmp_path, "WanPipeline"), asked)
    assert found["guidance_scale_2"] == 1e-3


def test_an_option_that_names_no_file_says_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "WanImageToVideoPipeline")
    asked = Asked(options={"last_image": "nowhere.png"})
    with pytest.raises(UsageError, match=r"last_image: 'nowhere.png' does not exist"):
        arguments_of(folder, asked)
