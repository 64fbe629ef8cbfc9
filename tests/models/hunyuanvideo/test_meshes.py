"""Eight virtual devices give what one gives, whatever they split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuport
from tests.models.hunyuanvideo.upstream import picture
from tests.tolerances import TOLERANCES
from tpuport.errors import MeshError, UsageError

ATOL = TOLERANCES["mesh float32"]
SHAPE = {"height": 48, "width": 64, "num_frames": 5, "num_inference_steps": 2}
#: Texts of other lengths, one of them without anything to draw.
PROMPTS = ['a red fox reads "stop" aloud and walks on', "rain"]

Result = dict[str, Any]


def run(folder: Path, cache: Path, form: str, count: int, **options: Any) -> Result:
    """What every stage writes; from an image where the form can."""
    prompts = [PROMPTS[i % 2] for i in range(count)]
    image = {"image": picture()} if form == "1.5" else {}
    with tpuport.load(
        "hunyuanvideo", weights=folder, cache_dir=cache, **options
    ) as session:
        result = session.generate(prompts, seed=1, **SHAPE, **image)
    plans = {p["component"]: p for s in result.report.stages[:2] for p in s.sharding}
    return {
        "latents": result.latents.numpy(),
        "frames": result.frames,
        "plans": plans,
        "denoise": result.report.stages[1],
    }


@pytest.fixture(scope="module")
def single(
    hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> Callable[[str, int], Result]:
    made: dict[tuple[str, int], Result] = {}

    def get(form: str, count: int) -> Result:
        if (form, count) not in made:
            made[form, count] = run(hunyuanvideo_folders[form], cache_dir, form, count)
        return made[form, count]

    return get


def largest(many: Result, one: Result) -> float:
    """The largest difference in latents and frames."""
    names = ("latents", "frames")
    return max(float(np.abs(many[name] - one[name]).max()) for name in names)


@pytest.mark.parametrize(
    ("mesh", "videos"),
    [
        ((2, 1, 4), 1),
        ((2, 2, 2), 1),
        ((1, 3, 1), 1),
        ((1, 5, 1), 1),
        ((1, 8, 1), 1),
        ((4, 1, 2), 2),
    ],
    ids=str,
)
def test_15_from_an_image(
    mesh: tuple[int, int, int],
    videos: int,
    single: Callable[[str, int], Result],
    hunyuanvideo_folders: dict[str, Path],
    cache_dir: Path,
) -> None:
    many = run(hunyuanvideo_folders["1.5"], cache_dir, "1.5", videos, mesh=mesh)
    assert largest(many, single("1.5", videos)) <= ATOL
    plan = many["plans"]["transformer"]
    if mesh[2] > 1:
        assert plan["bytes_per_device"] < plan["total_bytes"]
    padded = [r for r in many["denoise"].attention if r["key_lengths"]]
    # The refiner's and the joint one; the encoders have masks.
    assert len(padded) == 2
    sizes = {"dp": mesh[0], "tp": mesh[2], "sp": mesh[1]}
    for record in padded:
        split = dict(zip(("dp", "tp", "sp"), record["split"], strict=False))
        assert split == {a: a if n > 1 else None for a, n in sizes.items()}


@pytest.mark.parametrize("mesh", [(1, 1, 8), (1, 2, 4), (1, 3, 1), (1, 5, 1)], ids=str)
def test_13b(
    mesh: tuple[int, int, int],
    single: Callable[[str, int], Result],
    hunyuanvideo_folders: dict[str, Path],
    cache_dir: Path,
) -> None:
    many = run(hunyuanvideo_folders["13b"], cache_dir, "13b", 1, mesh=mesh)
    assert largest(many, single("13b", 1)) <= ATOL


def test_replicated_outputs_cost_memory_and_change_nothing(
    single: Callable[[str, int], Result],
    hunyuanvideo_folders: dict[str, Path],
    cache_dir: Path,
) -> None:
    folder = hunyuanvideo_folders["1.5"]
    many = run(folder, cache_dir, "1.5", 1, mesh=(2, 1, 4), sharding="replicated-out")
    assert largest(many, single("1.5", 1)) <= ATOL
    plan = many["plans"]["transformer"]
    assert plan["layout"] == "replicated-out"
    assert plan["extra_bytes_per_device"] > 0
    rules = {r["pattern"]: r["spec"] for r in plan["rules"]}
    outputs = [p for p in rules if "to_add_out" in p and "weight" in p]
    assert outputs
    assert all(rules[p] == [] for p in outputs)
    with pytest.raises(UsageError, match="has default, gathered, replicated-att"):
        tpuport.load("hunyuanvideo", weights=folder, sharding="replicated")


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
