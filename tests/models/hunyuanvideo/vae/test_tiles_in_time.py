"""Tiles in time of 13b, blended on the device: upstream's frames, as bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

import tpuport
from tests.core.layers.test_tiles import assemble
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.enums import Dtype, Tiling
from tpuport.core.files.frames import FrameChecks, measure, to_uint8
from tpuport.core.layers.tiles import TilePlan, fading, tiled_axis, whole_axis
from tpuport.core.plan.abstract_programs import abstract_programs
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.spec.run_settings import RunSettings
from tpuport.models.hunyuanvideo import tiles_in_time
from tpuport.models.hunyuanvideo.tiles_in_time import blended, in_time_work

ATOL = TOLERANCES["component float32"]


# -------------------------------------------------------------------- the seam


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "frames"), [(4, 17), (4, 9), (5, 5), (12, 5)])
def test_blending_is_upstreams(length: int, frames: int, dtype: torch.dtype) -> None:
    """Also where a tile has fewer frames than the seam."""
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(2, 3, 20, 6, 5, generator=draw).to(dtype)
    video = torch.randn(2, 3, frames, 6, 5, generator=draw).to(dtype)
    rest: Any = AutoencoderKLHunyuanVideo.blend_t(
        SimpleNamespace(),  # type: ignore[arg-type]
        before,
        video[:, :, 1:].clone(),
        length,
    )
    expected = torch.cat([video[:, :, :1], rest], dim=2)
    shares = fading(min(length, frames - 1))
    found = jax.jit(blended)(
        to_numpy(before[:, :, -length:].contiguous()), to_numpy(video), *shares
    )
    assert found.dtype == to_numpy(expected).dtype
    error = np.abs(np.asarray(found, np.float32) - expected.float().numpy()).max()
    # What is rounded to fewer bits is the same to the last of them.
    exact = dtype != torch.float32
    assert error <= (0 if exact else TOLERANCES["module float32"])


def in_time(n: int) -> int:
    return (n - 1) * 4 + 1


def plan(latents: int, *, window: int = 4, stride: int = 3) -> TilePlan:
    """Tiles of pictures of 4 x 5, as upstream lays them out."""
    time = tiled_axis(
        latents,
        in_time,
        window=window + 1,
        stride=stride,
        blend=4 * (window - stride),
        keep=4 * stride,
        limit=in_time(latents),
        lead=1,
    )
    return TilePlan(axes=(time, whole_axis(4, lambda n: n), whole_axis(5, lambda n: n)))


def outputs(tiles: TilePlan) -> Iterator[np.ndarray]:
    """What a decoder may give. What is dropped is beyond all the rest."""
    rng = np.random.default_rng(0)
    for span in tiles.axes[0].spans:
        video = rng.uniform(-0.9, 0.9, (2, 3, span.made, 4, 5)).astype(np.float32)
        video[:, :, : span.drop] = 5
        video[:, :, span.drop + span.keep + tiles.axes[0].blend :] = -5
        yield video


def run(tiles: TilePlan, pixels: str) -> Iterator[dict[str, np.ndarray]]:
    """The calls of a decode whose tiles are those of :func:`outputs`, op by op."""
    z = torch.zeros(2, 1, tiles.axes[0].spans[-1].stop, 4, 5)
    work = in_time_work(z, tiles, pixels)
    model: Any = SimpleNamespace(
        space=None,
        ported=SimpleNamespace(module=SimpleNamespace(spatial_compression_ratio=1)),
        weights={"post_quant_conv.weight": np.zeros(1, np.float32)},
    )
    made = outputs(tiles)
    carry: Any = None
    calls = list(work.calls)
    assert len(calls) == work.total
    for index, call in enumerate(calls):
        given = {name: jnp.asarray(to_numpy(x)) for name, x in call.inputs.items()}
        if not index:
            assert call.program == "seam"
            carry, output = tiles_in_time.first_seam(model, carry, None, given)
            assert work.to_frames is not None
            assert work.to_frames(index, output) is None
            continue
        assert call.program == f"tile {pixels}"
        carry, output = tiles_in_time.tile_frames(
            lambda *_: jnp.asarray(next(made)), pixels, model, carry, None, given
        )
        assert work.to_frames is not None
        frames: Any = work.to_frames(index, jax.device_get(output))
        yield frames


#: Latent frames, the window and the stride; the last has tiles shorter than the seam.
PLANS = [(7, 4, 3), (8, 4, 3), (9, 4, 3), (33, 4, 3), (9, 4, 2), (8, 4, 1)]


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
@pytest.mark.parametrize("size", PLANS, ids=str)
def test_frames_and_statistics_are_those_of_the_host(
    size: tuple[int, int, int], pixels: str
) -> None:
    latents, window, stride = size
    tiles = plan(latents, window=window, stride=stride)
    parts = list(run(tiles, pixels))
    spans = tiles.axes[0].spans
    assert [part["frames"].shape[1] for part in parts] == [s.keep for s in spans]
    video = assemble(tiles, outputs(tiles)) * np.float32(0.5) + np.float32(0.5)
    floats = video.clip(0, 1).transpose(0, 2, 3, 4, 1)
    expected = to_uint8(floats) if pixels == "uint8" else floats
    assert np.array_equal(np.concatenate([p["frames"] for p in parts], 1), expected)
    for part, span in zip(parts, spans, strict=True):
        told = measure(floats[:, span.at : span.at + span.keep])
        for name, value in told.items():
            assert np.array_equal(part[name], value), name


def test_what_is_not_finite_is_told_of_its_frame() -> None:
    tiles = plan(8)
    checks = FrameChecks()
    made = list(outputs(tiles))
    # Dropped, blended with what was before it, and on its own.
    made[1][0, 0, 0, 0, 0] = made[1][1, 0, 9, 0, 0] = np.inf
    for part in _run_on(tiles, made):
        checks.add(0, part["frames"].shape, part)
    with pytest.raises(
        tpuport.errors.VideoError, match=r"video 1: 1 of 1740 .* from frame 21 on"
    ):
        checks.check()


def _run_on(tiles: TilePlan, made: list[np.ndarray]) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "outputs", lambda tiles: iter(made))
        yield from run(tiles, "uint8")


def test_only_whole_pictures_are_blended_here() -> None:
    long = plan(8).axes[0]
    one, two = whole_axis(4, in_time), tiled_axis(
        4, in_time, window=3, stride=2, blend=1, keep=2
    )  # fmt: skip
    assert tiles_in_time.is_in_time(TilePlan(axes=(long, one, one)))
    assert not tiles_in_time.is_in_time(TilePlan(axes=(one, one, one)))
    assert not tiles_in_time.is_in_time(TilePlan(axes=(long, one, two)))
    assert not tiles_in_time.is_in_time(TilePlan(axes=(long, two, one)))


# ------------------------------------------------------------------- a session


SIDES = {"height": 48, "width": 80}
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(hunyuanvideo_folders: dict[str, Path], cache_dir: Path) -> Load:
    def open_session(**options: Any) -> Any:
        return tpuport.load(
            "hunyuanvideo",
            weights=hunyuanvideo_folders["13b"],
            variant="demo-13b",
            cache_dir=cache_dir,
            **options,
        )

    return open_session


def asked(session: Any, frames: int, videos: int = 1) -> tuple[Any, dict[str, Any]]:
    """A request, and latents for it."""
    request = session.request(prompt=["a"] * videos, num_frames=frames, **SIDES)
    shape = session.port.latent_shape(request, session.checkpoint)
    return request, {"latents": torch.randn(shape, generator=torch.manual_seed(1))}


@pytest.fixture(scope="module")
def upstreams(load: Load) -> Callable[[int, int], np.ndarray]:
    """What upstream's code decodes of the latents for that many frames and videos."""

    @functools.cache
    def decoded(frames: int, videos: int) -> np.ndarray:
        with load() as session:
            request, latents = asked(session, frames, videos)
            made, _ = session.run_stage("decode", request, latents, backend="diffusers")
        found: np.ndarray = made["frames"]
        return found

    return decoded


IN_TIME = ["seam", "tile float32", "tile float32"]
#: Frames, videos, and the devices that share them: 6 rows and 10 columns of latents do
#: not divide by all of them.
CASES = [
    (29, 1, "dp=1", IN_TIME),
    (29, 1, "sp=8", IN_TIME),
    *(
        pytest.param(*case, marks=pytest.mark.sweep)
        for case in (
            (13, 1, "dp=1", ["whole float32"]),
            (25, 1, "dp=1", IN_TIME),
            (29, 2, "dp=1", IN_TIME),
            (33, 2, "sp=8", IN_TIME),
        )
    ),
]


@pytest.mark.parametrize(("frames", "videos", "mesh", "programs"), CASES, ids=str)
def test_decode_is_upstreams(
    frames: int,
    videos: int,
    mesh: str,
    programs: list[str],
    load: Load,
    upstreams: Callable[[int, int], np.ndarray],
) -> None:
    with load(mesh=mesh) as session:
        request, latents = asked(session, frames, videos)
        found, report = session.run_stage("decode", request, latents)
    expected = upstreams(frames, videos)
    assert found["frames"].shape == expected.shape
    assert float(np.abs(found["frames"] - expected).max()) <= ATOL
    assert [c.program for c in report.compiles] == programs


def test_bytes_leave_the_device_tile_by_tile(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures that are fetched are bytes, and few more than the video's."""
    frames, fetched = 29, []
    get = jax.device_get

    def listen(tree: Any) -> Any:
        fetched.extend(x for x in jax.tree.leaves(tree) if np.ndim(x) == 5)
        return get(tree)

    parts: list[np.ndarray] = []
    pending: list[int] = []

    def sink(first: int, made: np.ndarray) -> None:
        parts.append(made)
        pending.append(len(fetched))

    with load() as session:
        request, latents = asked(session, frames)
        whole, _ = session.run_stage("decode", request, latents)
        monkeypatch.setattr(jax, "device_get", listen)
        delivery = Delivery("uint8", sink)
        session.run_stage("decode", request, latents, delivery=delivery)
    delivery.check()
    assert {x.dtype for x in fetched} == {np.dtype(np.uint8)}
    assert [part.shape[1] for part in parts] == [13, 12, 4]
    # A tile's frames are handed on before the next tile's are fetched.
    assert pending == [1, 2, 3]
    # Later tiles bring the frame that they drop along.
    assert sum(x.shape[2] for x in fetched) == frames + 2
    assert np.array_equal(np.concatenate(parts, 1), to_uint8(whole["frames"]))


# The tests of the seam run these programs op by op as well.
@pytest.mark.sweep
def test_without_compiling_it_is_the_same(
    load: Load, upstreams: Callable[[int, int], np.ndarray]
) -> None:
    with load(no_jit=("decode",)) as session:
        request, latents = asked(session, 29)
        found, _ = session.run_stage("decode", request, latents)
    assert float(np.abs(found["frames"] - upstreams(29, 1)).max()) <= ATOL


@pytest.mark.parametrize(
    ("frames", "tiling", "programs"),
    [
        # All tiles but the last have one length; 129 is what the model makes.
        (129, "off", {"seam": 1, "tile uint8": 11}),
        pytest.param(
            *(121, "off", {"seam": 1, "tile uint8": 10}), marks=pytest.mark.sweep
        ),
        (13, "off", {"whole uint8": 1}),
        # Rows and columns in tiles too: blended on the host.
        (25, "on", {"tile": 8}),
    ],
)
def test_what_a_decode_runs_and_fetches_in_bfloat16(
    frames: int, tiling: str, programs: dict[str, int], load: Load
) -> None:
    sides = {"height": 272, "width": 320} if tiling == "on" else SIDES
    with load(dtype="bfloat16") as session:
        request = session.request(prompt="a", num_frames=frames, **sides)
        found = list(
            abstract_programs(
                session.components,
                request,
                RunSettings(dtype=Dtype.BFLOAT16, vae_tiling=Tiling(tiling)),
                stages=["decode"],
            )
        )
        made = [program.outputs() for program in found]
    calls: dict[str, int] = {}
    for program in found:
        calls[program.asked.name] = calls.get(program.asked.name, 0) + program.calls
    assert calls == programs
    if tiling == "on":
        assert {x.dtype for _, x in made} == {np.dtype(jnp.bfloat16)}
        return
    # Of the tiles one program for the last one, which is shorter.
    assert len(found) == (1 if frames == 13 else 3)
    for carry, output in made:
        assert carry is None or carry.dtype == jnp.bfloat16
        assert not output or output["frames"].dtype == np.uint8
