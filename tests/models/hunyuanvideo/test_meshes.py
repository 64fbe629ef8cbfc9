"""Eight virtual devices give what one gives, whatever they split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuport
from tests.models.hunyuanvideo.upstream import picture
from tests.models.hunyuanvideo.videos import changed
from tests.tolerances import TOLERANCES
from tpuport.core.files.sources import read_image
from tpuport.errors import MeshError, UsageError

ATOL = TOLERANCES["mesh float32"]
SHAPE = {"height": 48, "width": 64, "num_frames": 5, "num_inference_steps": 2}
#: Texts of other lengths, one of them without anything to draw.
PROMPTS = ['a red fox reads "stop" aloud and walks on', "rain"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What stages wrote, by name, and their reports, by stage."""

    tensors: dict[str, Any]
    reports: dict[str, Any]


@pytest.fixture(scope="module")
def folders(
    hunyuanvideo_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Of each form, and of 1.5 one that makes small videos of images."""
    small = tmp_path_factory.mktemp("changed") / "small"
    changed(hunyuanvideo_folders["1.5"], small, {"target_size": 64})
    return {"1.5": small, "13b": hunyuanvideo_folders["13b"]}


Stages = tuple[str, ...]
ALL: Stages = ("encode", "denoise", "decode")


def run(
    form: str,
    count: int,
    *,
    stages: Stages = ALL,
    given: Result | None = None,
    **options: Any,
) -> Result:
    """A run of stages, from an image where the form can.

    ``given`` has what the stages before them wrote.
    """
    asked: dict[str, Any] = {"prompt": [PROMPTS[i % 2] for i in range(count)]}
    tensors, reports = dict(given.tensors if given else {}), {}
    if form == "1.5":
        asked["source"] = read_image(picture())
        tensors["image"] = asked["source"].for_videos(count)
    with tpuport.load("hunyuanvideo", **options) as session:
        request = session.request(**asked, seed=1, **SHAPE)
        for stage in stages:
            made, reports[stage] = session.run_stage(stage, request, tensors)
            tensors |= made
    return Result(tensors=tensors, reports=reports)


@pytest.fixture(scope="module")
def load(folders: dict[str, Path], cache_dir: Path) -> Callable[..., Result]:
    """:func:`run` on the checkpoint of a form."""

    def of_form(form: str, count: int, **options: Any) -> Result:
        return run(form, count, weights=folders[form], cache_dir=cache_dir, **options)

    return of_form


@pytest.fixture(scope="module")
def single(load: Callable[..., Result]) -> Callable[..., Result]:
    """What one device makes."""
    return functools.cache(load)


def largest(many: Result, one: Result, *names: str) -> float:
    """The largest difference in latents and frames, or in what is named."""
    return max(
        float(np.abs(np.asarray(many.tensors[n]) - np.asarray(one.tensors[n])).max())
        for n in names or ("latents", "frames")
    )


def transformers_plan(made: Result) -> dict[str, Any]:
    """Where the denoiser's weights are."""
    (plan,) = made.reports["denoise"].sharding
    assert plan["component"] == "transformer"
    found: dict[str, Any] = plan
    return found


#: All axes at once; then one after the other. Two videos are for dp to divide.
MESHES_15 = [
    ((2, 2, 2), 2),
    *(
        pytest.param(mesh, 1, marks=pytest.mark.sweep)
        for mesh in ((2, 1, 4), (2, 2, 2), (1, 3, 1), (1, 5, 1), (1, 8, 1))
    ),
    pytest.param((4, 1, 2), 2, marks=pytest.mark.sweep),
]
MESHES_13B = [
    ((2, 2, 2), 2),
    *(
        pytest.param(mesh, 1, marks=pytest.mark.sweep)
        for mesh in ((1, 1, 8), (1, 2, 4), (1, 3, 1), (1, 5, 1))
    ),
]


@pytest.mark.parametrize(("mesh", "videos"), MESHES_15, ids=str)
def test_15_from_an_image(
    mesh: tuple[int, int, int],
    videos: int,
    single: Callable[..., Result],
    load: Callable[..., Result],
) -> None:
    """Over 10 s: all stages of a video, on one device and on eight."""
    many = load("1.5", videos, mesh=mesh)
    assert largest(many, single("1.5", videos)) <= ATOL
    plan = transformers_plan(many)
    if mesh[2] > 1:
        assert plan["bytes_per_device"] < plan["total_bytes"]
    padded = [r for r in many.reports["denoise"].attention if r["key_lengths"]]
    # The refiner's and the joint one; the encoders have masks.
    assert len(padded) == 2
    sizes = {"dp": mesh[0], "tp": mesh[2], "sp": mesh[1]}
    for record in padded:
        split = dict(zip(("dp", "tp", "sp"), record["split"], strict=False))
        assert split == {a: a if n > 1 else None for a, n in sizes.items()}


@pytest.mark.parametrize(("mesh", "videos"), MESHES_13B, ids=str)
def test_13b(
    mesh: tuple[int, int, int],
    videos: int,
    single: Callable[..., Result],
    load: Callable[..., Result],
) -> None:
    many = load("13b", videos, mesh=mesh)
    assert largest(many, single("13b", videos)) <= ATOL


@pytest.mark.parametrize("form", ["1.5", "13b"])
def test_tokens_that_sp_does_not_divide(
    form: str, single: Callable[..., Result], load: Callable[..., Result]
) -> None:
    one = single(form, 2)
    many = load(form, 2, stages=("denoise",), given=one, mesh=(1, 3, 1))
    (joint,) = [r for r in many.reports["denoise"].attention if r["padded"]]
    assert joint["key"][2] % 3 != 0
    assert joint["padded"] % 3 == 0
    assert largest(many, one, "latents") <= ATOL


def test_replicated_outputs_cost_memory_and_change_nothing(
    single: Callable[..., Result], load: Callable[..., Result], folders: dict[str, Path]
) -> None:
    one, layout = single("1.5", 2), "replicated-out"
    options: dict[str, Any] = {"stages": ("denoise",), "given": one}
    many = load("1.5", 2, mesh=(2, 1, 4), sharding=layout, **options)
    assert largest(many, one, "latents") <= ATOL
    plan = transformers_plan(many)
    assert plan["layout"] == layout
    assert plan["extra_bytes_per_device"] > 0
    rules = {r["pattern"]: r["spec"] for r in plan["rules"]}
    outputs = [p for p in rules if "to_add_out" in p and "weight" in p]
    assert outputs
    assert all(rules[p] == [] for p in outputs)
    with pytest.raises(UsageError, match="has default, gathered, replicated-att"):
        tpuport.load("hunyuanvideo", weights=folders["1.5"], sharding="replicated")


def test_guidance_that_dp_does_not_divide(
    hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> None:
    with (
        tpuport.load(
            "hunyuanvideo", weights=hunyuanvideo_folders["1.5"], mesh=(4, 1, 1)
        ) as session,
        pytest.raises(MeshError, match=r"2 rows for 1 video.* with guidance"),
    ):
        session.generate("rain", **SHAPE)
