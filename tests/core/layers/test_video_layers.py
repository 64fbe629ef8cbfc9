"""What the kernels for video are given on a device's part of a picture."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.mesh.test_spatial_split import DIMS, SHAPES, pixels, split
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.layers.video_layers import (
    _channel_statistics,
    _edges,
    convolve,
    modulation_maps,
    pointwise,
)
from tpuport.core.mesh.spatial_split import Space
from tpuport.core.tracing.context import OpContext
from tpuport.kernels.convolution.conv_sides import outer_columns

OPTIONS = {"vmem_limit": 2**26, "interpret": True}
#: By whether devices share rows, and columns.
KINDS = {(True, False): "rows", (False, True): "columns", (True, True): "both"}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] == 1])
def test_what_lies_around_comes_with_corners(shape: tuple[int, ...]) -> None:
    x = pixels(shape)

    def run(space: Any, x: Any) -> dict[str, Any]:
        real = space.mask(x.shape, DIMS)
        x = x if real is None else jnp.where(real, x, 0)
        # Its channels as frames, with channels of their own.
        video = x[..., None] * (1 + jnp.arange(128, dtype=x.dtype))
        (left, right), ends = _edges(space, video, 2 * video, OPTIONS, "zeros")
        inner = jnp.concatenate([2 * video, video], 1)
        if ends is None:
            # Rows in one piece: nothing but zeros beyond.
            assert space.rows.parts == 1
            ends = jnp.zeros_like(inner[:, :, :1].repeat(2, 2))
        tall = jnp.concatenate([ends[:, :, :1], inner, ends[:, :, 1:]], 2)
        y = jnp.concatenate([left[:, :, :, None], tall, right[:, :, :, None]], 3)
        y = (y[:, : x.shape[1]] + y[:, x.shape[1] :])[..., 99] / 100
        n, m = x.shape[2:]
        return {"picture": y[:, :, :n, :m] - 5 * y[:, :, 2 : n + 2, 2 : m + 2]}

    wide = 3 * np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    n, m = shape[2:]
    wanted = wide[:, :, :n, :m] - 5 * wide[:, :, 2 : n + 2, 2 : m + 2]
    assert np.abs(split(run, x, "picture")["picture"] - wanted).max() <= 1e-5


@pytest.mark.parametrize(
    ("size", "devices", "copied"),
    [
        ((3, 16), "columns", False),
        ((16, 3), "rows", False),
        ((24, 16), "both", False),
        # Beside phantoms the outermost column would have to be repeated.
        ((3, 11), "columns", True),
        ((3, 4), "one", False),
    ],
)
def test_a_convolution_repeats_the_edges_of_the_picture(
    size: tuple[int, int], devices: str, copied: bool
) -> None:
    x, rng = pixels((1, 2, *size)), np.random.default_rng(1)
    spread = np.linspace(0.5, 1, 128, dtype=np.float32)
    kernel = (rng.normal(size=(128, 128, 3, 3, 3)) / 60).astype(np.float32)
    bias, colours = rng.normal(size=(2, 128)).astype(np.float32) / 10

    def run(space: Any, x: Any) -> dict[str, Any]:
        context = OpContext(mesh=None, platform="tpu", space=space, records=[])
        if space is not None:
            assert devices == KINDS[space.rows.parts > 1, space.columns.parts > 1]
        video = x[..., None] * spread
        weights = jnp.asarray(kernel), jnp.asarray(bias)
        out = convolve(context, video, -video, *weights, video, border="edge")
        assert any(note.reason for note in context.convolutions) == copied
        return {"picture": out @ colours}

    video = x[..., None] * spread
    whole = np.concatenate([-video, video], 1)
    pads = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)]
    wanted = video + jax.lax.conv_general_dilated(
        np.pad(whole, pads, mode="edge"),
        kernel,
        (1, 1, 1),
        "VALID",
        dimension_numbers=("NTYXC", "OITYX", "NTYXC"),
        precision="highest",
    )
    one = devices == "one"
    found = run(None, jnp.asarray(x)) if one else split(run, x, "picture")
    error = np.abs(found["picture"] - (wanted + bias) @ colours).max()
    assert error <= TOLERANCES["module float32"]


@pytest.mark.parametrize(
    ("dtype", "columns", "lag"),
    sweep(
        [
            (jnp.float32, 1, 2),
            (jnp.bfloat16, 5, 0),
            (jnp.float32, 16, 0),
            (jnp.bfloat16, 20, 2),
            (jnp.float32, 47, 2),
        ],
        itertools.product([jnp.float32, jnp.bfloat16], [1, 5, 16, 20, 47], [0, 2]),
    ),
)
def test_outer_columns_come_by_themselves(dtype: Any, columns: int, lag: int) -> None:
    rng = np.random.default_rng(0)
    shape = (2, 3 + lag, 4, columns, 256)
    whole = rng.normal(size=shape).astype(dtype)
    before = whole[:, :lag] if lag else None
    call = jax.jit(functools.partial(outer_columns, **OPTIONS))
    first, last = call(whole[:, lag:], before)
    pads = [(0, 0), (0, 0), (1, 1), (0, 0), (0, 0)]
    wide = np.pad(whole, pads)
    assert first.dtype == last.dtype == dtype
    assert (first == wide[:, :, :, 0]).all()
    assert (last == wide[:, :, :, -1]).all()


@pytest.mark.parametrize(
    ("channels", "dtype", "limit", "message"),
    [
        (64, "float32", 2**26, "64 channels"),
        (128, "float16", 2**26, "elements of float16"),
        (128, "float32", 2**12, "bytes of VMEM; there are 4,096"),
    ],
)
def test_outer_columns_it_cannot_give_are_refused(
    channels: int, dtype: str, limit: int, message: str
) -> None:
    x = jnp.zeros((1, 1, 4, 16, channels), dtype)
    with pytest.raises(NotImplementedError, match=message):
        outer_columns(x, None, vmem_limit=limit, interpret=True)


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_products_of_float32_are_of_float32(dtype: str, exact: bool) -> None:
    """A TPU would multiply them in one bfloat16 pass; Flax sets no other default."""
    x = jnp.zeros((1, 2, 4, 4, 16), dtype)
    weight, bias = jnp.zeros((8, 16, 1, 1, 1), dtype), jnp.zeros(8, dtype)
    context = OpContext(mesh=None, platform="tpu", records=[])

    def run(x: Any) -> Any:
        short = pointwise(context, x, weight, bias)
        return short, modulation_maps(x, 16, (weight,) * 2, (bias,) * 2)

    found = [
        eqn.params["precision"]
        for eqn in jax.make_jaxpr(run)(x).jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    ]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert len(found) == 3
    assert [p == highest for p in found] == [exact] * 3


def refused(*args: Any) -> Any:
    raise AssertionError("XLA's statistics")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_leaves_phantoms_out(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "moments", refused)
    # Where a difference of squares would have lost a few digits.
    x = pixels(shape, mean=30.0)
    factors = 1 + np.arange(128, dtype=np.float32) / 128

    def run(space: Any, x: Any) -> dict[str, Any]:
        context = OpContext(
            mesh=None,
            platform="tpu",
            space=space,
            records=[],
        )
        real = space.mask(x.shape, DIMS)
        x = x if real is None else jnp.where(real, x, jnp.nan)
        # Its channels as frames, with channels of their own.
        found = _channel_statistics(context, x[..., None] * factors)
        return {"whole": jnp.concatenate(found, axis=1)}

    found = split(run, x, "whole")["whole"]
    wide = x.astype(np.float64)
    mean = wide.mean((1, 2, 3))[:, None] * factors
    variance = wide.var((1, 2, 3))[:, None] * factors**2
    assert found.shape == (shape[0], 256)
    assert np.abs(found[:, :128] / mean - 1).max() <= TOLERANCES["norm float32"]
    assert np.abs(found[:, 128:] / variance - 1).max() <= TOLERANCES["norm float32"]
