"""CogVideoX's autoencoder split over eight devices at sizes that they do not divide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.conftest import make_vae, pictures
from tests.tolerances import TOLERANCES
from tpuport.core.files.sources import read_video
from tpuport.core.mesh import spatial_split as spatial
from tpuport.core.mesh.spatial_split import SpatialSplit
from tpuport.core.reports import StageReport

ATOL = TOLERANCES["mesh float32"]
#: 6 x 6 latents in two chunks: 6 columns are two each on four devices and one each on
#: eight; one device and two devices have none of their own.
SHAPE: dict[str, Any] = {
    "height": 48,
    "width": 48,
    "num_frames": 17,
    "num_inference_steps": 2,
}


def run(
    folder: Path, cache: Path, mesh: str, stage: str
) -> tuple[dict[str, Any], StageReport]:
    """What a stage gives of the same inputs, and its report."""
    video = read_video(pictures(17))
    with tpuport.load(weights=folder, mesh=mesh, cache_dir=cache) as session:
        more = {"source": video} if stage == "encode" else {}
        request = session.request(prompt="a fox", seed=1, **SHAPE, **more)
        draw = torch.Generator().manual_seed(3)
        latents = torch.randn(1, 5, 4, 6, 6, generator=draw)
        given = (
            {"video": video.for_videos(1)}
            if stage == "encode"
            else {"latents": latents}
        )
        made, report = session.run_stage(stage, request, given)
    assert report.backend == "tpuport"
    return made, report


def place(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> list[Any]:
    """That many devices for the rows and the columns; the list tells when asked."""
    asked: list[Any] = []

    def choose(*sizes: int) -> SpatialSplit:
        asked.append(sizes)
        return SpatialSplit(videos=1, rows=rows, columns=columns)

    monkeypatch.setattr(spatial, "choose_split", choose)
    return asked


@pytest.fixture(scope="module")
def single(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def get(stage: str) -> dict[str, Any]:
        if stage not in made:
            cache = tmp_path_factory.mktemp("single")
            made[stage], _ = run(checkpoints("5b"), cache, "dp=1,sp=1,tp=1", stage)
        return made[stage]

    return get


FRAMES = ("decode", "frames", (1, 17, 48, 48, 3))
LATENTS = ("encode", "video_latents", (1, 5, 4, 6, 6))


@pytest.mark.parametrize(
    ("stage", "name", "shape", "rows", "columns"),
    [
        pytest.param(*FRAMES, 2, 4, id="decode 2 x 4"),
        pytest.param(*LATENTS, 2, 4, id="encode 2 x 4"),
        pytest.param(*FRAMES, 1, 8, id="decode 1 x 8", marks=pytest.mark.sweep),
        pytest.param(*LATENTS, 1, 8, id="encode 1 x 8", marks=pytest.mark.sweep),
    ],
)
def test_eight_devices_give_what_one_gives(
    stage: str,
    name: str,
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    single: Callable[[str], dict[str, Any]],
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = np.asarray(single(stage)[name])
    asked = place(monkeypatch, rows, columns)
    # A cache of its own: the key of a program does not know of the split forced here.
    made, report = run(checkpoints("5b"), tmp_path, "dp=1,sp=8,tp=1", stage)
    assert asked
    assert all(sizes == (8, 1, 6, 6) for sizes in asked)
    # Both the first chunk and what goes on from its caches.
    programs = {entry.program.split()[0] for entry in report.compiles}
    assert programs >= {"first", "next"}
    many = np.asarray(made[name])
    assert many.shape == one.shape == shape
    assert float(np.abs(many - one).max()) <= ATOL
    assert float(np.abs(one).std()) > 100 * ATOL
    # Each is told once for each of the two programs; no kernel is for a CPU.
    kinds = (torch.nn.Conv2d, torch.nn.Conv3d)
    coder = getattr(make_vae(), f"{stage}r")
    count = sum(isinstance(module, kinds) for module in coder.modules())
    assert {r["implementation"] for r in report.convolutions} == {"XLA"}
    assert [r["count"] for r in report.convolutions] == [2 * count]
