"""Each patch of a plugin is run while a pipeline of the plugin is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.pipelines.example import all_examples, made, saved
from tpuport import targets
from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.plan.pipeline_plan import rehearsed
from tpuport.core.reports import Reporter
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.patching import Patch

USED = {
    "CogVideoXPipeline": {
        "cogvideox-activation-in-norm",
        "cogvideox-native-block",
        "cogvideox-native-forward",
        "cogvideox-norm-at-latent-size",
        "cogvideox-pointwise-conv-cache",
        "cogvideox-resnet-block",
        "cogvideox-upsample",
    },
    "HunyuanVideo15Pipeline": {
        "hunyuanvideo15-native-block",
        "hunyuanvideo15-native-forward",
        "hunyuanvideo15-vae-convolution",
        "hunyuanvideo15-vae-decoder-in-chunks",
        "hunyuanvideo15-vae-frame-causal-attention",
        "hunyuanvideo15-vae-residual-block",
        "hunyuanvideo15-vae-upsampling",
    },
    "HunyuanVideoPipeline": {
        "hunyuanvideo-native-block",
        "hunyuanvideo-native-forward",
        "hunyuanvideo-native-single-block",
        "hunyuanvideo-vae-convolution",
        "hunyuanvideo-vae-frame-causal-attention",
        "hunyuanvideo-vae-residual-block",
    },
    "WanPipeline": {"wan-native-block", "wan-native-forward"},
}


def spied(patch: Patch, ran: set[str]) -> Patch:
    """The patch, whose function notes that it is run."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, property):
            return function  # standard patches alone

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.add(patch.name)
            return function(*args, **kwargs)

        return run

    made: Any = patch.replacement
    replacement = (
        (lambda original: noting(made(original))) if patch.wraps else noting(made)
    )
    return dataclasses.replace(patch, replacement=replacement)


def run_patches(
    place: Path, asked: dict[str, Any], blocks: Blocks = Blocks.NATIVE
) -> set[str]:
    """The names of the patches that run when the pipeline of a folder is rehearsed."""
    folder = PipelineFolder.find(str(place), Reporter())
    placed, settings = targets.place_for_port(MeshSpec()), RunSettings(blocks=blocks)
    target = targets.claimed_target(folder.class_name, placed, settings, Reporter())
    ran: set[str] = set()
    patches = tuple(spied(patch, ran) for patch in target.patches)
    target = dataclasses.replace(target, patches=patches)
    rehearsed(folder, target, "float32", asked, Reporter())
    return ran


@pytest.mark.parametrize("name", USED)
def test_patches_run_when_a_pipeline_is_traced(name: str, tmp_path: Path) -> None:
    pipeline, asked = made(all_examples()[name])
    saved(pipeline, tmp_path / "pipeline")
    assert run_patches(tmp_path / "pipeline", asked) >= USED[name]


def test_patches_of_upstreams_blocks_run(tmp_path: Path) -> None:
    pipeline, asked = made(all_examples()["HunyuanVideoPipeline"])
    saved(pipeline, tmp_path / "pipeline")
    ran = run_patches(tmp_path / "pipeline", asked, Blocks.UPSTREAM)
    assert ran >= {"hunyuanvideo-attention", "hunyuanvideo-forward"}


def test_patches_of_an_image_in_the_first_frame_run(
    hunyuanvideo_folders: dict[str, Path],
) -> None:
    asked = {
        "image": Image.new("RGB", (64, 32)),
        "prompt": "a fox",
        "height": 32,
        "width": 64,
        "num_frames": 5,
        "num_inference_steps": 1,
    }
    assert run_patches(hunyuanvideo_folders["13b-i2v"], asked) >= {
        "hunyuanvideo-native-first-frame-block",
        "hunyuanvideo-native-first-frame-single-block",
    }
