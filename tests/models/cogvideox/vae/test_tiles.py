"""Decoding in tiles is upstream's tiled decode, on one device and on eight."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tests.tolerances import TOLERANCES
from tpuport.core.files.frames import to_uint8
from tpuport.core.run import executor as executors
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.run.model_stages import tile_work
from tpuport.models.cogvideox import vae_tiles
from tpuport.models.cogvideox.inputs import chunk_lengths

ATOL = TOLERANCES["component float32"]
#: Tiles of 6 x 10 latents at every 5 rows and 8 columns.
SAMPLE = {"sample_height": 96, "sample_width": 160}
#: 10 x 18 latents: the last tiles have 5 rows, and 2 columns. One chunk each.
SHAPE = {"height": 80, "width": 144, "num_frames": 9}
TILES = 2 * 3
#: Two tiles of two chunks each: of all rows, and of the columns of one tile.
LONG = {"height": 80, "width": 64, "num_frames": 17}


@pytest.fixture(scope="module")
def folder(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint whose autoencoder has small tiles."""
    copy = tmp_path_factory.mktemp("tiles") / "5b"
    shutil.copytree(checkpoints("5b"), copy)
    config = copy / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SAMPLE}))
    return copy


@pytest.fixture(scope="module")
def latents() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"latents": torch.randn(1, 3, 4, 10, 18, generator=draw)}


@pytest.fixture(scope="module")
def long() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {"latents": torch.randn(1, 5, 4, 10, 8, generator=draw)}


def upstream(folder: Path, latents: torch.Tensor) -> np.ndarray:
    """Frames of ``vae.enable_tiling()`` and ``decode``."""
    from diffusers import AutoencoderKLCogVideoX

    vae = AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()
    vae.enable_tiling()
    z = 1 / vae.config.scaling_factor * latents.permute(0, 2, 1, 3, 4)
    with torch.no_grad():
        video = vae.decode(z).sample
    frames = (video * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    return np.asarray(frames.numpy())


@pytest.fixture(scope="module")
def theirs(folder: Path, latents: dict[str, torch.Tensor]) -> np.ndarray:
    return upstream(folder, latents["latents"])


@pytest.fixture(scope="module")
def their_long(folder: Path, long: dict[str, torch.Tensor]) -> np.ndarray:
    return upstream(folder, long["latents"])


def decode(
    folder: Path,
    cache: Path,
    latents: Any,
    tiling: str,
    shape: dict[str, int] = SHAPE,
    **how: Any,
) -> tuple[np.ndarray, Any, list[str]]:
    heard = Heard()
    with tpuport.load(
        weights=folder, cache_dir=cache, vae_tiling=tiling, reporter=heard, **how
    ) as session:
        request = session.request(prompt="a cat", **shape)
        made, report = session.run_stage("decode", request, latents)
    return made["frames"], report, heard.lines


def test_tiled_decode_is_upstreams(
    folder: Path, cache: Path, latents: Any, theirs: np.ndarray
) -> None:
    ours, report, said = decode(folder, cache, latents, "on")
    assert ours.shape == theirs.shape == (1, 9, 80, 144, 3)
    assert float(np.abs(ours - theirs).max()) <= ATOL
    # Tiles of four sizes.
    assert len(report.compiles) == 4
    assert report.tiling["tiled"]
    assert "2 x 3 tiles of up to 48 x 80 pixels" in "\n".join(said)


def test_tiles_are_split_in_space_too(
    folder: Path, cache: Path, long: Any, their_long: np.ndarray
) -> None:
    """Over 10 s: four decoders for eight devices."""
    ours, report, said = decode(folder, cache, long, "on", LONG, mesh="dp=2,tp=4")
    assert "2 x 1 tiles of up to 48 x 64 pixels" in "\n".join(said)
    # Tiles of two sizes, each with a first and a following chunk.
    assert len(report.compiles) == 2 * 2
    assert float(np.abs(ours - their_long).max()) <= ATOL


def test_tiles_are_another_video_than_the_whole_picture(
    folder: Path, cache: Path, latents: Any, theirs: np.ndarray
) -> None:
    whole, report, said = decode(folder, cache, latents, "auto")
    assert not report.tiling["tiled"]
    assert [c.program for c in report.compiles] == ["first float32"]
    assert report.tiling["line"].startswith("decode: untiled, ")
    assert not [line for line in said if line.startswith("decode: ")]
    assert {c["implementation"] for c in report.convolutions} == {"XLA"}
    assert float(np.abs(whole - theirs).max()) > 100 * ATOL


def test_auto_tiles_where_the_whole_picture_does_not_fit(
    folder: Path,
    cache: Path,
    latents: Any,
    theirs: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, whole, _ = decode(folder, cache, latents, "off")
    needed = whole.tiling["needed"]
    monkeypatch.setattr(executors, "program_room", lambda *args: needed - 1)
    # The second time it is known from the first.
    for _ in range(2):
        ours, report, said = decode(folder, cache, latents, "auto")
        assert float(np.abs(ours - theirs).max()) <= ATOL
        assert report.tiling["tiled"]
        assert report.tiling["needed"] < report.tiling["untiled"] == needed
        assert sum(line.startswith("decode untiled needs ") for line in said) == 1
        assert [c.program for c in report.compiles] == ["first tile"] * 4


def test_upstreams_own_backend_tiles_too(
    folder: Path, cache: Path, latents: Any, theirs: np.ndarray
) -> None:
    with tpuport.load(weights=folder, cache_dir=cache, vae_tiling="on") as session:
        request = session.request(prompt="a cat", **SHAPE)
        tiled, report = session.run_stage(
            "decode", request, latents, backend="diffusers"
        )
        whole, _ = session.run_stage(
            "decode", request, latents, backend="diffusers", vae_tiling="off"
        )
    assert report.tiling["tiled"]
    assert float(np.abs(tiled["frames"] - theirs).max()) <= ATOL
    assert float(np.abs(whole["frames"] - theirs).max()) > 100 * ATOL


@pytest.mark.sweep
def test_op_by_op_starts_every_tile_afresh(
    folder: Path, cache: Path, long: Any, their_long: np.ndarray
) -> None:
    # Every op compiles for every size of tile.
    ours, report, _ = decode(folder, cache, long, "on", LONG, no_jit=("decode",))
    assert report.op_by_op
    assert float(np.abs(ours - their_long).max()) <= ATOL


def test_bytes_come_chunk_by_chunk_with_the_last_tile(
    folder: Path, cache: Path, long: Any, their_long: np.ndarray
) -> None:
    parts: list[np.ndarray] = []
    delivery = Delivery("uint8", lambda first, frames: parts.append(frames))
    with tpuport.load(
        weights=folder, cache_dir=cache, vae_tiling="on", mesh="dp=2,tp=4"
    ) as session:
        request = session.request(prompt="a cat", **LONG)
        session.run_stage("decode", request, long, delivery=delivery)
    delivery.check()
    assert [part.shape[1] for part in parts] == [9, 8]
    off = np.concatenate(parts, axis=1).astype(int) - to_uint8(their_long)
    assert np.abs(off).max() <= 1
    assert (off != 0).mean() < 1e-3


def test_one_tile_is_no_tiling() -> None:
    from tests.models.conftest import make_vae

    vae = make_vae(**SAMPLE)
    rows, columns = vae_tiles.decode_axes(vae, 6, 11)
    assert (len(rows.spans), len(columns.spans)) == (2, 2)
    rows, columns = vae_tiles.decode_axes(vae, 6, 10)
    assert (len(rows.spans), len(columns.spans)) == (1, 1)
    assert (rows.size, columns.size) == (48, 80)


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_calls_start_afresh_with_each_tile(frames: int) -> None:
    from tests.models.conftest import make_vae

    axes = vae_tiles.decode_axes(make_vae(**SAMPLE), 10, 18)
    z = torch.zeros(1, 4, frames, 10, 18)
    chunks = chunk_lengths(frames, 2)
    plans = vae_tiles.chunk_plans(axes, chunks, lambda n, first: n)
    work = tile_work(z, plans, "uint8", ("first tile", "next tile"))
    calls = list(work.calls)
    assert len(calls) == work.total == TILES * len(chunks)
    assert [c.fresh for c in calls] == [True, *[False] * (len(chunks) - 1)] * TILES
    assert sum(c.inputs["latents"].shape[2] for c in calls) == frames * TILES
