"""``--vae flax`` through a session: upstream's frames, split, in tiles, from images."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.models.conftest import pictures
from tests.tolerances import TOLERANCES
from tpuport.core.files.frames import to_uint8
from tpuport.core.files.sources import read_image, read_video
from tpuport.core.run.frame_delivery import Delivery
from tpuport.errors import UsageError
from tpuport.plugins import get_port

ATOL = TOLERANCES["component float32"]
#: 6 x 10 latents: the columns do not divide among eight devices, which have 2 each.
SHAPE: dict[str, Any] = {"height": 48, "width": 80, "num_frames": 17}
#: Of a checkpoint whose autoencoder has tiles of 6 x 10 latents.
SAMPLE = {"sample_height": 96, "sample_width": 160}
#: 10 x 8 latents: the second one of two tiles has 5 rows.
TILED: dict[str, Any] = {"height": 80, "width": 64, "num_frames": 17}


@pytest.fixture(scope="module")
def folder(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint whose autoencoder has small tiles."""
    copy = tmp_path_factory.mktemp("flax") / "5b"
    shutil.copytree(checkpoints("5b"), copy)
    config = copy / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SAMPLE}))
    return copy


def drawn(shape: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows, columns = shape["height"] // 8, shape["width"] // 8
    draw = torch.Generator().manual_seed(1)
    return {"latents": torch.randn(1, 5, 4, rows, columns, generator=draw)}


def upstream(folder: Path, shape: dict[str, Any], tiling: bool = False) -> np.ndarray:
    """Frames of diffusers' own decode."""
    return _upstream(folder, tuple(shape.items()), tiling)


@functools.cache
def _upstream(
    folder: Path, asked: tuple[tuple[str, int], ...], tiling: bool
) -> np.ndarray:
    from diffusers import AutoencoderKLCogVideoX

    shape = dict(asked)
    vae = AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()
    if tiling:
        vae.enable_tiling()
    z = drawn(shape)["latents"].permute(0, 2, 1, 3, 4) / vae.config.scaling_factor
    with torch.no_grad():
        video = vae.decode(z).sample
    frames = (video * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    return np.asarray(frames.numpy())


def decode(
    folder: Path, cache: Path, shape: dict[str, Any], **how: Any
) -> tuple[np.ndarray, Any]:
    with tpuport.load(weights=folder, cache_dir=cache, **how) as session:
        request = session.request(prompt="a cat", **shape)
        made, report = session.run_stage("decode", request, drawn(shape))
    return made["frames"], report


@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=1", marks=pytest.mark.sweep), "dp=2,tp=4"]
)
def test_decode_is_upstreams_on_one_device_and_on_eight(
    mesh: str, folder: Path, cache: Path
) -> None:
    ours, report = decode(folder, cache, SHAPE, vae="flax", mesh=mesh)
    assert ours.shape == (1, 17, 48, 80, 3)
    assert float(np.abs(ours - upstream(folder, SHAPE)).max()) <= ATOL
    assert [c.program for c in report.compiles] == ["first float32", "next float32"]
    # None of upstream's code ran, so that none of it was patched.
    assert report.patches == ()


@pytest.mark.sweep
def test_several_videos_are_divided_among_devices(folder: Path, cache: Path) -> None:
    shape = {**SHAPE, "width": 48, "num_frames": 9}
    draw = torch.Generator().manual_seed(2)
    z = {"latents": torch.randn(2, 3, 4, 6, 6, generator=draw)}
    found = {}
    for mesh in ("dp=1", "dp=2,tp=4"):
        with tpuport.load(
            weights=folder, cache_dir=cache, mesh=mesh, vae="flax"
        ) as session:
            request = session.request(prompt=["a cat", "a dog"], seed=1, **shape)
            assert request.batch_size == 2
            found[mesh], _ = session.run_stage("decode", request, z)
    one, many = (made["frames"] for made in found.values())
    assert float(np.abs(one - many).max()) <= TOLERANCES["mesh float32"]


def test_bytes_come_chunk_by_chunk(folder: Path, cache: Path) -> None:
    parts: list[np.ndarray] = []
    delivery = Delivery("uint8", lambda first, frames: parts.append(frames))
    with tpuport.load(weights=folder, cache_dir=cache, vae="flax") as session:
        request = session.request(prompt="a cat", **SHAPE)
        session.run_stage("decode", request, drawn(SHAPE), delivery=delivery)
    delivery.check()
    assert [part.shape[1] for part in parts] == [9, 8]
    truth = to_uint8(upstream(folder, SHAPE))
    off = np.concatenate(parts, axis=1).astype(int) - truth
    assert np.abs(off).max() <= 1
    assert (off != 0).mean() < 1e-3


def test_tiled_decode_is_upstreams(folder: Path, cache: Path) -> None:
    ours, report = decode(folder, cache, TILED, vae="flax", vae_tiling="on")
    assert report.tiling["tiled"]
    # Tiles of two sizes, each with a first and a following chunk.
    assert len(report.compiles) == 2 * 2
    truth = upstream(folder, TILED, tiling=True)
    assert float(np.abs(ours - truth).max()) <= ATOL
    # Another video than the whole picture.
    assert float(np.abs(truth - upstream(folder, TILED)).max()) > 100 * ATOL


@pytest.mark.sweep
def test_op_by_op_too(folder: Path, cache: Path) -> None:
    shape = {**SHAPE, "num_frames": 9}
    z = {"latents": drawn(SHAPE)["latents"][:, :3]}
    with tpuport.load(
        weights=folder, cache_dir=cache, vae="flax", no_jit=("decode",)
    ) as session:
        request = session.request(prompt="a cat", **shape)
        made, report = session.run_stage("decode", request, z)
    assert report.op_by_op
    # The frames of the first chunk are those of the longer video.
    truth = upstream(folder, SHAPE)[:, :9]
    assert float(np.abs(made["frames"] - truth).max()) <= ATOL


@pytest.mark.sweep
def test_bfloat16_latents_and_weights(folder: Path, cache: Path) -> None:
    exact = upstream(folder, SHAPE)
    off = {}
    for vae in ("torchax", "flax"):
        frames, _ = decode(folder, cache, SHAPE, vae=vae, dtype="bfloat16")
        off[vae] = float(np.sqrt(np.mean((frames - exact) ** 2)))
    # Rounding, and about as much of it as upstream's class has.
    assert 0 < off["flax"] <= 1.5 * off["torchax"]


@pytest.mark.parametrize(
    "mesh", ["dp=1", pytest.param("dp=2,tp=4", marks=pytest.mark.sweep)]
)
def test_an_image_is_encoded_as_by_upstreams_class(
    mesh: str, checkpoints: Callable[[str], Path], cache: Path
) -> None:
    source = read_image(pictures(1)[0])
    encoded = {}
    for vae in ("torchax", "flax"):
        with tpuport.load(
            weights=checkpoints("5b-i2v"), cache_dir=cache, mesh=mesh, vae=vae
        ) as session:
            # 8 x 12 latents: eight devices have 8 x 2 of them, and two have none.
            request = session.request(
                prompt="a fox", source=source, height=64, width=96, num_frames=9, seed=3
            )
            given = {source.kind: source.for_videos(1)}
            made, _ = session.run_stage("encode", request, given)
            if vae == "flax" and mesh == "dp=1":
                with pytest.raises(UsageError, match="'flax' is not upstream's"):
                    session.run_stage("encode", request, given, backend="diffusers")
        encoded[vae] = made["image_latents"]
    difference = float((encoded["flax"] - encoded["torchax"]).abs().max())
    assert difference <= ATOL
    assert float(encoded["flax"].abs().max()) > 0.1


def test_a_video_is_encoded_chunk_by_chunk(folder: Path, cache: Path) -> None:
    video = pictures(17, 48, 80)
    encoded = {}
    for vae in ("torchax", "flax"):
        with tpuport.load(weights=folder, cache_dir=cache, vae=vae) as session:
            source = read_video(video)
            request = session.request(
                source=source,
                num_frames=17,
                prompt="a fox",
                height=48,
                width=80,
                seed=3,
            )
            given = {source.kind: source.for_videos(1)}
            made, report = session.run_stage("encode", request, given)
        names = [c.program for c in report.compiles]
        assert names == ["encode", "first", "next"]
        encoded[vae] = made["video_latents"]
    difference = float((encoded["flax"] - encoded["torchax"]).abs().max())
    assert encoded["flax"].shape[1] == 5
    assert difference <= ATOL


def test_generate_says_which_autoencoder_ran(folder: Path, cache: Path) -> None:
    made = {}
    for vae in ("torchax", "flax"):
        with tpuport.load(weights=folder, cache_dir=cache, vae=vae) as session:
            made[vae] = session.generate(
                "a cat",
                seed=1,
                height=48,
                width=64,
                num_frames=9,
                num_inference_steps=2,
            )
        report = made[vae].report
        assert report.implementations == {"vae": vae}
        assert bool(report.stages[-1].patches) == (vae == "torchax")
    assert torch.equal(made["flax"].latents, made["torchax"].latents)
    assert np.abs(made["flax"].frames - made["torchax"].frames).max() <= ATOL
    assert made["flax"].frames.std() > 0.01


def test_the_decoder_alone_is_loaded_for_decode(folder: Path, cache: Path) -> None:
    with tpuport.load(weights=folder, cache_dir=cache, vae="flax") as session:
        shape = {"height": 48, "width": 64, "num_frames": 9}
        request = session.request(prompt="a cat", **shape)
        z = torch.randn(1, 3, 4, 6, 8, generator=torch.Generator().manual_seed(1))
        session.run_stage("decode", request, {"latents": z})
        assert session.components.loaded == ("vae",)
        (loaded,) = session.components._loaded.values()
        whole = session.components.abstract("vae")
    assert {name.partition(".")[0] for name in loaded.weights} == {"decoder"}
    assert {name.partition(".")[0] for name in whole.weights} == {"decoder", "encoder"}
    # Each stored tensor has one place, and each array comes of one.
    stored = set(whole.plan.assignments)
    assert set(whole.ported.map.by_stored_name) == stored
    assert len(whole.weights) == len(stored)


def test_a_config_of_another_autoencoder_is_refused_before_any_work(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "5b"
    shutil.copytree(folder, copy)
    config = copy / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "act_fn": "relu"}))
    with (
        tpuport.load(weights=copy, cache_dir=cache, vae="flax") as session,
        pytest.raises(UsageError, match=r"'flax' cannot run .*has no act_fn='relu'"),
    ):
        session.generate("a cat", height=48, width=64, num_frames=9)


def test_a_model_without_it_refuses_it() -> None:
    assert set(get_port("cogvideox").components["vae"].implementations) == {"flax"}
    with pytest.raises(UsageError, match=r"vae 'flax': hunyuanvideo has torchax$"):
        tpuport.load("hunyuanvideo", vae="flax")
    assert len(jax.devices()) == 8
