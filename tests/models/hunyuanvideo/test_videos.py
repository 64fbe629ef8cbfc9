"""From the prompt to the video: what upstream's own pipelines make, in float32.

A case compiles all programs of a pipeline, so some take more than 10 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tests.pipelines.example import difference, run
from tests.pipelines.parts import picture
from tests.tolerances import TOLERANCES
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter

CALL: dict[str, Any] = {"num_frames": 5, "num_inference_steps": 2}
SIZE: dict[str, Any] = {"height": 32, "width": 48}
#: By form: what a call takes besides. Quoted words are glyphs.
CALLS: dict[str, dict[str, Any]] = {
    "1.5": SIZE | {"prompt": 'a fox reads "stop" aloud', "negative_prompt": "grey"},
    "1.5-i2v": {"prompt": "a fox runs", "image": picture(0)},
    "13b": SIZE
    | {"prompt": "a fox runs", "negative_prompt": "grey", "true_cfg_scale": 3.0},
    "13b-i2v": SIZE | {"prompt": "a fox runs", "image": picture(0)},
}
sweep = pytest.mark.sweep


@pytest.mark.parametrize(
    ("form", "mesh", "blocks"),
    [
        ("1.5", "dp=2,sp=2", "native"),
        ("1.5-i2v", "dp=1", "upstream"),
        ("1.5-i2v", "dp=2,sp=2,tp=2", "native"),
        ("13b", "sp=3", "native"),
        ("13b-i2v", "dp=1", "native"),
        *(
            pytest.param(form, mesh, blocks, marks=sweep)
            for form, mesh, blocks in (
                ("1.5", "dp=1", "upstream"),
                ("1.5", "sp=8", "native"),
                ("13b", "dp=1", "upstream"),
                ("13b", "dp=2,sp=2,tp=2", "native"),
                ("13b-i2v", "sp=4", "upstream"),
            )
        ),
    ],
)
def test_a_video_is_upstreams(
    form: str, mesh: str, blocks: str, hunyuanvideo_folders: dict[str, Path]
) -> None:
    folder = PipelineFolder.find(hunyuanvideo_folders[form], Reporter())
    pipeline = folder.load(torch.float32, Reporter())
    pipeline.set_progress_bar_config(disable=True)
    call = CALL | CALLS[form]
    expected = run(pipeline, call)
    other = run(pipeline, call | {"prompt": "a dog sleeps"})
    with tpuport.ported(pipeline, mesh=mesh, blocks=blocks):
        found = run(pipeline, call)
    error = difference(found, expected)
    assert error < TOLERANCES["video float32"]
    # The prompt matters: another one's video is much further away.
    assert 10 * error < difference(other, expected)


def test_a_llama_tokenizer_is_read_as_its_file_says(
    hunyuanvideo_folders: dict[str, Path],
) -> None:
    """Upstream's own class drops the spaces of a byte-level file."""
    folder = PipelineFolder.find(hunyuanvideo_folders["13b"], Reporter())
    tokenizer = folder.part("tokenizer", torch.float32)
    text = "Describe the video\n\nby detailing"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_guidance_of_a_guider_is_asked_for_by_its_flag(
    hunyuanvideo_folders: dict[str, Path],
) -> None:
    from dataclasses import replace

    folder = PipelineFolder.find(hunyuanvideo_folders["1.5"], Reporter())
    assert folder.has_guider
    found = replace(folder, guidance=3.5).load(torch.float32, Reporter())
    assert found.guider.config.guidance_scale == 3.5
