"""Frames as a device gives them: the bytes of the host, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.files.whole_frames import check_frames
from tests.core.mesh.test_spatial_split import runtime as spatial_runtime
from tpuport.core.files.frames import (
    FrameChecks,
    as_frames,
    encode_on_host,
    encode_pixels,
    measure,
    to_uint8,
)
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.programs.lowering import spread
from tpuport.errors import UsageError, VideoError


def encode(x: Any, pixels: str = "uint8") -> dict[str, np.ndarray]:
    """Frames through the device, under jit, as the programs of decode do."""
    planes = jnp.moveaxis(jnp.asarray(x, jnp.float32), -1, 1)
    made = jax.device_get(jax.jit(lambda x: encode_pixels(x, pixels))(planes))
    return {**made, "frames": as_frames(made["frames"], *x.shape[2:4])}


def one_video(values: Any) -> np.ndarray:
    """A flat array as frames of one video, padded with its last value."""
    flat = np.asarray(values, np.float32).ravel()
    count = -(-flat.size // 48) * 48
    flat = np.pad(flat, (0, count - flat.size), mode="edge")
    return flat.reshape(1, -1, 4, 4, 3)


def ties() -> np.ndarray:
    """Every half byte and its float32 neighbours, some of which are exact ties."""
    halves = ((np.arange(-2, 258) + 0.5) / 255).astype(np.float32)
    below = np.nextafter(halves, np.float32(-1))
    above = np.nextafter(halves, np.float32(2))
    return np.concatenate([halves, below, above])


def test_bytes_are_those_of_the_host_to_the_last_tie() -> None:
    values = ties()
    # There are exact ties among them, and they go both ways.
    products = np.clip(values, 0, 1) * np.float32(255)
    tied = products[products % 1 == 0.5]
    assert {int(np.rint(x)) - int(x) for x in tied} == {0, 1}
    frames = one_video(values)
    assert np.array_equal(encode(frames)["frames"], to_uint8(frames))


def test_bytes_of_a_million_floats_are_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    frames = rng.uniform(-0.2, 1.2, (2, 5, 180, 180, 3)).astype(np.float32)
    made = encode(frames)
    assert made["frames"].dtype == np.uint8
    assert np.array_equal(made["frames"], to_uint8(frames))


def test_floats_are_clipped_and_nothing_else() -> None:
    rng = np.random.default_rng(1)
    frames = rng.uniform(-0.2, 1.2, (2, 3, 8, 8, 3)).astype(np.float32)
    made = encode(frames, "float32")
    assert np.array_equal(made["frames"], np.clip(frames, 0, 1))
    with pytest.raises(UsageError, match="pixels 'int8': choose from float32, uint8"):
        encode_pixels(jnp.zeros((1, 3, 1, 2, 2)), "int8")


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_statistics_are_those_of_the_floats(pixels: str) -> None:
    rng = np.random.default_rng(2)
    frames = rng.uniform(0, 1, (3, 4, 6, 8, 3)).astype(np.float32)
    made = encode(frames, pixels)
    for name, value in measure(frames).items():
        assert np.array_equal(made[name], value), name


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_frames_that_do_not_count_are_left_out(pixels: str) -> None:
    rng = np.random.default_rng(6)
    planes = rng.uniform(0.2, 0.8, (2, 3, 4, 6, 8)).astype(np.float32)
    planes[0, :, 0], planes[1, :, 0], planes[1, 2, 3, 0, 0] = 0.0, np.inf, -np.inf
    counts = np.array([False, True, True, True])
    made = encode_pixels(jnp.asarray(planes), pixels, counts=jnp.asarray(counts))
    rest = encode_pixels(jnp.asarray(planes[:, :, 1:]), pixels)
    assert np.array_equal(made["frames"][:, :, 1:], rest["frames"])
    assert np.array_equal(made["finite"][:, 1:], rest["finite"])
    for end in ("low", "high"):
        assert np.array_equal(made[end], rest[end]), end


PLANES = SpatialLayout(
    inputs={"x": "BCFYX"},
    carry="B",
    output={"frames": "BCFYX", "finite": "BF", "low": "BC", "high": "BC"},
)


@pytest.mark.parametrize("phantom", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("size", [(3, 5), (9, 13), (1, 17)])
def test_statistics_leave_phantom_rows_and_columns_out(
    size: tuple[int, int], phantom: float
) -> None:
    """They are neither counted nor among the extremes, whatever is in them."""
    rng = np.random.default_rng(5)
    x = rng.uniform(0.3, 0.6, (1, 3, 2, *size)).astype(np.float32)
    x[0, 1, 1, 0, 2] = np.inf
    runtime = spatial_runtime()

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        space = runtime.space
        assert space is not None
        real = space.mask(inputs["x"].shape, (3, 4))
        assert real is not None
        planes = jnp.where(real, inputs["x"], phantom)
        return carry, encode_pixels(planes, "float32", space)

    program, places = spread(run, runtime, PLANES, (None, None, {"x": x}))
    _, made = jax.jit(program, out_shardings=places)(None, None, None, {"x": x})
    assert np.array_equal(made["finite"], np.isfinite(x).sum((1, 3, 4)))
    wanted = np.clip(x, 0, 1)
    assert np.array_equal(made["low"], wanted.min((2, 3, 4)))
    assert np.array_equal(made["high"], wanted.max((2, 3, 4)))


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_planes_of_the_host_are_those_of_the_device(pixels: str) -> None:
    rng = np.random.default_rng(4)
    planes = rng.uniform(-0.1, 1.1, (2, 3, 4, 6, 8)).astype(np.float32)
    planes[1, 2, 3, 0, 0] = np.inf
    made = encode_on_host(planes, pixels)
    for name, value in encode_pixels(jnp.asarray(planes), pixels).items():
        assert np.array_equal(made[name], value), name


def test_frames_are_planes_with_colours_last_and_phantoms_cut_off() -> None:
    planes = np.arange(2 * 3 * 2 * 4 * 5).reshape(2, 3, 2, 4, 5)
    frames = as_frames(planes, 3, 2)
    assert frames.shape == (2, 2, 3, 2, 3)
    # The video encoder writes them as they lie in memory.
    assert frames.flags.c_contiguous
    for colour in range(3):
        assert np.array_equal(frames[..., colour], planes[:, colour, :, :3, :2])


def good() -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.uniform(0, 1, (2, 6, 8, 8, 3)).astype(np.float32)


def black(frames: np.ndarray) -> None:
    frames[1] = 0.4 / 255


def one_colour(frames: np.ndarray) -> None:
    frames[0] = (0.9, 0.1, 0.5)


def not_finite(frames: np.ndarray) -> None:
    frames[1, 3, 0, 0, :] = np.nan
    frames[1, 5, 0, 0, 1] = np.nan


@pytest.mark.parametrize("damage", [black, one_colour, not_finite])
@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_bytes_in_chunks_are_refused_in_the_words_for_the_float_video(
    damage: Callable[[np.ndarray], None], chunk: int
) -> None:
    frames = good()
    damage(frames)
    with pytest.raises(VideoError) as whole:
        check_frames(frames)
    checks = FrameChecks()
    for start in range(0, frames.shape[1], chunk):
        part = encode(frames[:, start : start + chunk])
        checks.add(0, part["frames"].shape, part)
    with pytest.raises(VideoError) as chunked:
        checks.check()
    assert str(chunked.value) == str(whole.value)


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_an_infinite_value_is_found_before_the_clip_hides_it(bad: float) -> None:
    frames = good()
    frames[0, 2, 1, 1, 0] = bad
    part = encode(frames)
    checks = FrameChecks()
    checks.add(4, part["frames"].shape, part)
    with pytest.raises(VideoError, match=r"video 4: 1 of \d+ values .* frame 2 on"):
        checks.check()


def test_good_chunks_pass_and_are_counted() -> None:
    checks = FrameChecks()
    for first in (0, 2):
        for part in (good()[:, :1], good()[:, 1:]):
            checks.add(first, part.shape, measure(part))
    checks.check()
    assert [checks._videos[video].frames for video in range(4)] == [6, 6, 6, 6]
