"""Convolutions of a picture that devices share unevenly, with anything in phantoms."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.mesh.test_spatial_split import DIMS, pixels, split
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.layers.video_layers import KERNEL, convolve, enlarged_convolution
from tpuport.core.mesh import spatial_split as spatial
from tpuport.core.mesh.spatial_split import SpatialSplit
from tpuport.core.tracing.context import OpContext, counted

CHANNELS = 128

#: Parts of rows and columns, and how many of both there are.
SPLITS = {
    "columns": ((1, 8), (3, 13)),
    "rows": ((8, 1), (13, 3)),
    "both": ((2, 4), (3, 11)),
    # Those before have none to spare.
    "devices of no columns": ((1, 8), (3, 12)),
    "devices of no rows": ((8, 1), (12, 3)),
    "no row and no column": ((4, 2), (9, 5)),
    "several tiles": ((2, 4), (5, 75)),
}


def drawn(*shape: int) -> np.ndarray:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    return (values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def convolved(x: Any, kernel: np.ndarray) -> Any:
    """[B, T + K - 1, Y, X, C] by [O, C, K, 3, 3], with zeros around the picture."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1, 1),
        [(0, 0), (1, 1), (1, 1)],
        dimension_numbers=("NTYXC", "OITYX", "NTYXC"),
        precision="highest",
    )


def use_split(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The picture of a split, which every choice of one then takes."""
    (rows, columns), size = SPLITS[name]
    found = SpatialSplit(videos=1, rows=rows, columns=columns)
    monkeypatch.setattr(spatial, "choose_split", lambda *sizes: found)
    return size


def context_of(space: Any) -> OpContext:
    return OpContext(
        mesh=None,
        platform="tpu",
        space=space,
        records=[],
    )


def garbled(space: Any, video: Any) -> Any:
    """Numbers that are none in phantom rows and columns of [B, T, Y, X, C]."""
    real = space.mask(video.shape, DIMS)
    assert real is not None
    return jnp.where(real, video, jnp.nan)


ADDED = ["nothing", "residual", "shortcut"]


@pytest.mark.parametrize(
    ("name", "taps", "channels", "added"),
    sweep(
        # Each split with a kernel of one frame or of three, and each sum with both.
        [
            ("columns", 3, CHANNELS, "residual"),
            ("rows", 1, CHANNELS, "shortcut"),
            ("both", 3, CHANNELS, "shortcut"),
            ("both", 1, CHANNELS, "residual"),
            ("both", 3, 16, "nothing"),
            ("devices of no columns", 1, CHANNELS, "nothing"),
            ("devices of no rows", 3, CHANNELS, "nothing"),
            ("no row and no column", 3, 16, "shortcut"),
            ("several tiles", 3, CHANNELS, "residual"),
        ],
        (
            (name, *kernel, added)
            for name, kernel, added in itertools.product(
                SPLITS, [(1, CHANNELS), (3, CHANNELS), (3, 16)], ADDED
            )
        ),
    ),
)
def test_a_convolution_is_that_of_the_whole_picture(
    name: str, taps: int, channels: int, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = use_split(name, monkeypatch)
    x, spread = pixels((1, 2, *size)), np.linspace(0.5, 1, channels, dtype=np.float32)
    kernel, bias = drawn(CHANNELS, channels, taps, 3, 3), drawn(CHANNELS)
    short = drawn(CHANNELS, 2 * CHANNELS, 1, 1, 1), drawn(CHANNELS)
    deep = np.linspace(0.5, 1, 2 * CHANNELS, dtype=np.float32)
    colours = drawn(1, CHANNELS)[0]
    lag = taps - 1

    def parts(x: Any) -> tuple[Any, ...]:
        """The video, frames before it, a residual, and what a shortcut takes."""
        video = x[..., None] * spread
        before = jnp.concatenate([-video[:, :1], 0.5 * video[:, 1:]], 1)
        return video, before[:, :lag], x[..., None] + bias, x[..., None] * deep

    def run(space: Any, x: Any) -> dict[str, Any]:
        context = context_of(space)
        video, before, residual, taken = (garbled(space, v) for v in parts(x))
        out = convolve(
            context,
            video,
            before if lag else None,
            jnp.asarray(kernel),
            jnp.asarray(bias),
            residual if added == "residual" else None,
            (taken, *map(jnp.asarray, short)) if added == "shortcut" else None,
        )
        kinds = {(r.implementation, r.reason) for r in counted(context.convolutions)}
        assert ((KERNEL, "") in kinds) == (channels == CHANNELS)
        return {"picture": out @ colours}

    video, before, residual, taken = parts(x)
    wanted = convolved(jnp.concatenate([before, video], 1), kernel) + bias
    if added == "residual":
        wanted = wanted + residual
    if added == "shortcut":
        matrix = short[0][..., 0, 0, 0].T
        wanted = wanted + np.matmul(taken, matrix) + short[1]
    found = split(run, x, "picture")["picture"]
    assert np.abs(found - wanted @ colours).max() <= TOLERANCES["module float32"]


@pytest.mark.parametrize(
    "name",
    sweep(
        ["both", "devices of no columns", "rows", "several tiles"], SPLITS, single=True
    ),
)
def test_enlarging_is_that_of_the_whole_picture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = use_split(name, monkeypatch)
    x, spread = pixels((1, 2, *size)), np.linspace(0.5, 1, CHANNELS, dtype=np.float32)
    kernel, bias = drawn(CHANNELS, CHANNELS, 3, 3), drawn(CHANNELS)
    colours = drawn(1, CHANNELS)[0]

    def together(out: Any) -> Any:
        """[1, T, 2 Y, 2 X] -> [1, 4 T, Y, X]."""
        _, frames, rows, columns = out.shape
        out = out.reshape(1, frames, rows // 2, 2, columns // 2, 2)
        return out.transpose(0, 1, 3, 5, 2, 4).reshape(
            1, 4 * frames, rows // 2, columns // 2
        )

    def run(space: Any, x: Any) -> dict[str, Any]:
        video = garbled(space, x[..., None] * spread)
        weights = jnp.asarray(kernel), jnp.asarray(bias)
        out = enlarged_convolution(context_of(space), video, *weights, 2)
        return {"picture": together(out @ colours)}

    wide = (x[..., None] * spread).repeat(2, 2).repeat(2, 3)
    wanted = (convolved(wide, kernel[:, :, None]) + bias).repeat(2, 1) @ colours
    found = split(run, x, "picture")["picture"]
    assert np.abs(found - together(wanted)).max() <= TOLERANCES["module float32"]
