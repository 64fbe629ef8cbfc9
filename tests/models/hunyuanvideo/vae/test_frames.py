"""Tiles become frames row by row in time; the float video is never whole."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from tests.core.files.whole_frames import check_frames
from tests.core.layers.test_tiles import assemble
from tpuport.core.files.frames import to_uint8
from tpuport.core.layers.tiled_frames import JoinedFrames
from tpuport.core.layers.tiles import TilePlan, tiled_axis, whole_axis
from tpuport.core.run.frame_delivery import Delivery
from tpuport.errors import VideoError


def in_time(n: int) -> int:
    return (n - 1) * 4 + 1


def in_space(n: int) -> int:
    return n * 8


def plan(*, long: int = 25, side: int = 12, framewise: bool = True) -> TilePlan:
    """Tiles of a latent of ``long`` frames and ``side`` x ``side`` latent pixels."""
    time = (
        tiled_axis(
            long, in_time, window=5, stride=3, blend=4, keep=12, lead=1,
            limit=in_time(long),
        )
        if framewise
        else whole_axis(long, in_time)
    )  # fmt: skip
    space = tiled_axis(side, in_space, window=8, stride=6, blend=16, keep=48)
    return TilePlan(axes=(time, space, space))


def outputs(tiles: TilePlan, seed: int = 0) -> Iterator[np.ndarray]:
    """What a decoder may give: about [-1, 1], some of it outside."""
    rng = np.random.default_rng(seed)
    for tile in tiles.tiles:
        made = [
            axis.spans[n].made for axis, n in zip(tiles.axes, tile.index, strict=True)
        ]
        yield rng.uniform(-1.1, 1.1, (2, 3, *made)).astype(np.float32)


def whole(tiles: TilePlan) -> np.ndarray:
    """The float video, as it was made before there was a stream."""
    video = assemble(tiles, outputs(tiles))
    frames = np.clip(video * np.float32(0.5) + np.float32(0.5), 0, 1)
    return frames.transpose(0, 2, 3, 4, 1)


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
@pytest.mark.parametrize("framewise", [True, False])
def test_the_frames_are_those_of_the_whole_video(pixels: str, framewise: bool) -> None:
    tiles = plan(framewise=framewise)
    joined = JoinedFrames(tiles, pixels)
    made = [joined.add(output) for output in outputs(tiles)]
    per_row = len(tiles.axes[1].spans) * len(tiles.axes[2].spans)
    ended = [index for index, part in enumerate(made) if part is not None]
    # Every row of tiles in time completes its frames, with its last tile.
    rows = len(tiles.axes[0].spans)
    assert ended == [per_row * (row + 1) - 1 for row in range(rows)]
    assert rows == (8 if framewise else 1)
    parts = [part["frames"] for part in made if part is not None]
    expected = whole(tiles)
    if pixels == "uint8":
        expected = to_uint8(expected)
    assert np.array_equal(np.concatenate(parts, axis=1), expected)


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_what_is_wrong_is_told_as_of_the_whole_video(pixels: str, value: float) -> None:
    """One value that is not finite in some tile, or the same value everywhere."""
    tiles = plan()
    made = [np.array(output) for output in outputs(tiles)]
    if value == 1.0:
        for output in made:
            output[1] = -1.0
    else:
        made[-1][1, :, -1, -1, -1] = value  # the last pixel of the last frame
    video = assemble(tiles, made) * np.float32(0.5) + np.float32(0.5)
    with pytest.raises(VideoError) as expected:
        check_frames(np.clip(video, 0, 1).transpose(0, 2, 3, 4, 1))
    joined = JoinedFrames(tiles, pixels)
    delivery = Delivery(pixels, lambda first, frames: None)
    for output in made:
        part = joined.add(output)
        if part is not None:
            delivery.take(0, part)
    with pytest.raises(VideoError) as told:
        delivery.check()
    assert str(told.value) == str(expected.value)


@pytest.mark.parametrize(
    ("tiles", "share"),
    [
        # Many rows in time: what is held does not grow with the length.
        (plan(long=61), 0.35),
        # All frames in one row: a quarter for the bytes, and some tiles.
        (plan(long=13, side=30, framewise=False), 0.7),
    ],
    ids=["rows in time", "one row"],
)
def test_the_float_video_is_never_held(tiles: TilePlan, share: float) -> None:
    floats = 2 * 3 * int(np.prod(tiles.output)) * 4
    joined = JoinedFrames(tiles, "uint8")
    source = outputs(tiles)
    emitted = 0
    tracemalloc.start()
    for output in source:
        part = joined.add(output)
        emitted += 0 if part is None else part["frames"].nbytes
        del part
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert emitted == floats // 4
    assert peak < share * floats
