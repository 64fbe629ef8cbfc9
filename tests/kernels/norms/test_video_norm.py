"""Group norm of video in interpret mode."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.kernels.norms.video_norm import apply_norm, channel_moments, latent_frame

OPTIONS: dict[str, Any] = {"vmem_limit": 100 * 2**20, "interpret": True}
ATOL = TOLERANCES["norm float32"]


@pytest.mark.parametrize("shape", [(2, 3, 6, 5, 128), (1, 1, 90, 20, 256)])
def test_moments_are_those_of_the_whole_video(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(1000.0, 2.0, shape).astype(np.float32)
    mean, spread = channel_moments(jnp.asarray(x), **OPTIONS)
    wide = x.astype(np.float64)
    assert np.abs(mean - wide.mean((1, 2, 3))).max() < 1e-3
    variance = spread / np.prod(shape[1:4])
    assert np.abs(variance / wide.var((1, 2, 3)) - 1).max() < 1e-4


# All rows of a block, none of it, and none at all; ints stand for a whole side.
@pytest.mark.parametrize(
    ("shape", "real"),
    [
        ((2, 3, 6, 5, 128), (4, 3)),
        ((1, 1, 90, 20, 256), (45, 11)),
        ((1, 2, 90, 20, 256), (71, None)),
        ((1, 2, 6, 20, 128), (None, 19)),
        ((1, 2, 6, 5, 128), (6, 5)),
    ],
)
def test_moments_leave_out_what_is_not_real(
    shape: tuple[int, ...], real: tuple[int | None, int | None]
) -> None:
    x = np.random.default_rng(0).normal(30.0, 2.0, shape).astype(np.float32)
    rows, columns = (n or m for n, m in zip(real, shape[2:4], strict=True))
    wide = x[:, :, :rows, :columns].astype(np.float64)
    x[:, :, rows:] = np.nan
    x[:, :, :, columns:] = np.inf

    def moments(x: jax.Array, n: Any, m: Any) -> Any:
        # Those of the whole side are known while it is traced.
        sides = (rows if real[0] is None else n, columns if real[1] is None else m)
        return channel_moments(x, sides, **OPTIONS)

    mean, spread = jax.jit(moments)(jnp.asarray(x), rows, columns)
    assert np.abs(mean / wide.mean((1, 2, 3)) - 1).max() <= ATOL
    wanted = wide.var((1, 2, 3)) * wide[0, ..., 0].size
    assert np.abs(spread / wanted - 1).max() <= ATOL


@pytest.mark.parametrize("real", [(0, 5), (6, 0), (0, 0)])
def test_moments_of_nothing_are_zeros(real: tuple[int, int]) -> None:
    x = jnp.full((1, 2, 6, 5, 128), jnp.nan)
    sides = jnp.asarray(real[0]), jnp.asarray(real[1])
    found = channel_moments(x, sides, **OPTIONS)
    assert [array.shape for array in found] == [(1, 128)] * 2
    assert all((array == 0).all() for array in found)


def test_a_number_for_every_device_is_that_of_the_side() -> None:
    x = jnp.zeros((1, 2, 6, 5, 128))
    with pytest.raises(ValueError, match="4 real of 5, for every device"):
        channel_moments(x, (6, 4), **OPTIONS)


# Frames and rows of the video, times and lines of the modulation; zeros for none.
SIZES = [(1, 1, 4, 4), (8, 2, 16, 2), (9, 3, 8, 1), (3, 3, 6, 3), (0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("sizes", "silu", "kept"),
    sweep(
        [
            (SIZES[0], True, 1),
            (SIZES[1], False, 2),
            (SIZES[2], True, 2),
            (SIZES[3], False, 1),
            (SIZES[4], True, 2),
            (SIZES[4], False, 0),
        ],
        itertools.product(SIZES, [True, False], [0, 1, 2]),
    ),
)
def test_norm_modulation_and_silu(
    sizes: tuple[int, int, int, int], silu: bool, kept: int
) -> None:
    frames, times, rows, lines = sizes
    rng = np.random.default_rng(0)
    modulated = frames > 0
    frames, rows = frames or 2, rows or 6
    x = rng.normal(size=(2, frames, rows, 5, 128)).astype(np.float32)
    mean, scale, shift = rng.normal(size=(3, 2, 128)).astype(np.float32)
    maps = rng.normal(size=(2, times, lines, 5, 256)).astype(np.float32)
    kept = min(kept, frames)
    found, last = apply_norm(
        jnp.asarray(x),
        *map(jnp.asarray, (mean, scale, shift)),
        jnp.asarray(maps) if modulated else None,
        silu=silu,
        kept=kept,
        **OPTIONS,
    )
    per_channel = (slice(None), None, None, None)
    wanted = (x - mean[per_channel]) * scale[per_channel] + shift[per_channel]
    if modulated:
        split = frames > 1 and frames % 2
        rest = (frames - 1) // (times - 1) if split else frames // times
        wide = np.repeat(maps[:, 1:] if split else maps, rest, axis=1)
        wide = np.concatenate([maps[:, :1], wide], 1) if split else wide
        wide = np.repeat(wide, rows // lines, axis=2)
        wanted = wanted * wide[..., :128] + wide[..., 128:]
    if silu:
        wanted = wanted * np.asarray(jax.nn.sigmoid(wanted))
    assert found.shape == x.shape
    assert np.abs(found - wanted).max() <= ATOL
    if kept:
        assert last is not None
        assert np.array_equal(last, found[:, frames - kept :])
    else:
        assert last is None


def test_no_more_frames_are_kept_than_there_are() -> None:
    x, vector = jnp.zeros((1, 1, 6, 4, 128)), jnp.zeros((1, 128))
    with pytest.raises(ValueError, match="2 frames to keep of 1"):
        apply_norm(x, vector, vector, vector, silu=True, kept=2, **OPTIONS)


def test_a_modulation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="5 frames for 8"):
        latent_frame(0, 8, 5)
    with pytest.raises(ValueError, match="1 frames for 9"):
        latent_frame(0, 9, 1)
    x, vector = jnp.zeros((1, 2, 6, 4, 128)), jnp.zeros((1, 128))
    maps = jnp.zeros((1, 1, 4, 4, 256))
    with pytest.raises(ValueError, match="modulation"):
        apply_norm(x, vector, vector, vector, maps, silu=True, **OPTIONS)
