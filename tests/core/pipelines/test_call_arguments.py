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


def test_an_option_that_names_no_file_says_so(tmp_path: Path) -> None:
    index = {"_class_name": "WanImageToVideoPipeline"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    folder = PipelineFolder(tmp_path, "folder", index, Checkpoint(tmp_path, "folder"))
    asked = Asked(options={"last_image": "nowhere.png"})
    with pytest.raises(UsageError, match=r"last_image: 'nowhere.png' does not exist"):
        arguments_of(folder, asked)
