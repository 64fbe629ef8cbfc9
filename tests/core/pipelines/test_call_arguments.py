"""What a user asks of a pipeline becomes keywords of its call."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tpuport.core.pipelines.call_arguments import arguments_of, made_of
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


def test_an_error_lists_parameters_that_a_user_can_give(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "LTX2Pipeline")
    with pytest.raises(UsageError, match="it takes ") as caught:
        arguments_of(folder, Asked(options={"zzz": "1"}))
    listed, _, more = str(caught.value).partition("it takes ")[2].partition(" and ")
    names = listed.split(", ")
    known = {
        n for n in folder.parameters if not n.endswith(("embeds", "attention_mask"))
    }
    assert known >= {*names}
    assert int(more.removesuffix(" more")) + len(names) < len(folder.parameters)
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_attention_mask"])
def test_a_tensor_is_not_for_the_command_line(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, "LTX2Pipeline")
    with pytest.raises(UsageError, match=f"{name} takes a tensor, .*tpuport.port"):
        arguments_of(folder, Asked(options={name: "1"}))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("generator", "tpuport sets generator by itself; use --seed"),
        ("return_dict", "tpuport sets return_dict by itself; leave it out"),
        ("self", "WanPipeline has no such parameter"),
        ("callback_on_step_end", "cannot be given on the command line"),
    ],
)
def test_what_tpuport_sets_is_said_to_be_set(
    tmp_path: Path, name: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        arguments_of(folder_of(tmp_path, "WanPipeline"), Asked(options={name: "1"}))


def test_images_are_the_frames_of_one_video() -> None:
    """As TextToVideoZeroPipeline gives frames, and pipelines of images their image."""
    images = np.zeros((8, 4, 4, 3))
    output = SimpleNamespace(images=images, nsfw_content_detected=None)
    assert made_of(output, object()).frames.shape == (1, *images.shape)
    with pytest.raises(UsageError, match="made no video: it returns a dict"):
        made_of({"latents": images}, object())
