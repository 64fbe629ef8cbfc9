"""A picture split over devices against the whole picture in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.mesh.spatial_split import (
    Side,
    SpatialLayout,
    SpatialSplit,
    choose_split,
    split_of,
)
from tpuport.core.programs.lowering import spread
from tpuport.core.tracing.runtime import Runtime
from tpuport.errors import PluginError

# Rows and columns that divide, that do not, and fewer than there are devices.
SHAPES = [
    (1, 2, 8, 16),
    (1, 2, 9, 13),
    (2, 2, 5, 7),
    (1, 1, 1, 17),
    (4, 1, 6, 3),
    (1, 3, 40, 41),
    (1, 1, 3, 3),
]
LAYOUT = SpatialLayout(
    inputs={"x": "BCYX"},
    carry="BCYX",
    output={"picture": "BCYX", "number": "B", "whole": "BC"},
)
DIMS = (2, 3)


def runtime(devices: int = 8) -> Runtime:
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("any",), axis_types=axis)
    return model_runtime(mesh=mesh, platform="cpu")


def pixels(shape: tuple[int, ...], mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(0).normal(mean, 1.0, shape).astype(np.float32)


def split(run: Callable[[Any, Any], dict[str, Any]], x: np.ndarray) -> dict[str, Any]:
    """``run(space, x)`` on every device's part; phantom rows and columns cut off."""
    env = runtime()

    def program(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        assert env.space is not None
        return carry, run(env.space, inputs["x"])

    # With nothing to run on it names what it gives.
    names = list(run(None, None))
    assert isinstance(LAYOUT.output, dict)
    used = SpatialLayout(
        inputs=LAYOUT.inputs,
        carry=LAYOUT.carry,
        output={name: LAYOUT.output[name] for name in names},
    )
    whole, places = spread(program, env, used, (None, None, {"x": x}))
    _, out = jax.jit(whole, out_shardings=places)(None, None, None, {"x": x})
    rows, columns = x.shape[2:]
    return {
        k: np.asarray(v)[..., :rows, :columns] if k == "picture" else np.asarray(v)
        for k, v in out.items()
    }


@pytest.mark.parametrize("border", ["zeros", "edge"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_halo_is_what_lies_beside_a_part(shape: tuple[int, ...], border: Any) -> None:
    x = pixels(shape)

    def run(space: Any, x: Any) -> dict[str, Any]:
        if x is None:
            return {"picture": None}
        y = space.halo(x, DIMS, (1, 1), (1, 1), border)
        # Every neighbour with a weight of its own, the corners too.
        n, m = x.shape[2:]
        parts = [
            (3 * i + j + 1) * y[:, :, i : i + n, j : j + m]
            for i in range(3)
            for j in range(3)
        ]
        return {"picture": sum(parts)}

    mode = "edge" if border == "edge" else "constant"
    wide = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)], mode=mode)  # type: ignore[call-overload]
    n, m = shape[2:]
    wanted = sum(
        (3 * i + j + 1) * wide[:, :, i : i + n, j : j + m]
        for i in range(3)
        for j in range(3)
    )
    assert np.abs(split(run, x)["picture"] - wanted).max() <= 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_of_the_whole_picture(shape: tuple[int, ...]) -> None:
    # Far from zero, where a difference of squares would have nothing left.
    x = pixels(shape, mean=1000.0)

    def run(space: Any, x: Any) -> dict[str, Any]:
        if x is None:
            return {"whole": None, "number": None}
        mean, variance = space.moments(x, DIMS, (2, 3))
        real = space.mask(x.shape, DIMS)
        ones = jnp.ones(x.shape) if real is None else jnp.broadcast_to(real, x.shape)
        count = space.sum(ones.astype(jnp.float32).sum((1, 2, 3)))
        return {"whole": (mean + variance).reshape(x.shape[:2]), "number": count}

    out = split(run, x)
    wide = x.astype(np.float64)
    wanted = wide.mean((2, 3)) + wide.var((2, 3))
    assert np.abs(out["whole"] - wanted).max() <= 2e-3
    assert (out["number"] == np.prod(shape[1:])).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_extremes_and_a_gathered_picture_know_no_phantoms(
    shape: tuple[int, ...],
) -> None:
    # All above zero, which phantoms are padded with.
    x = pixels(shape, mean=100.0)

    def run(space: Any, x: Any) -> dict[str, Any]:
        if x is None:
            return {"whole": None, "number": None}
        whole = space.gather(x, DIMS)
        assert whole.shape[1:] == shape[1:]
        low = space.smallest(whole.min((2, 3)))
        return {"whole": low + space.largest(whole.max((2, 3))), "number": low[:, 0]}

    out = split(run, x)
    assert np.array_equal(out["whole"], x.min((2, 3)) + x.max((2, 3)))
    assert np.array_equal(out["number"], x.min((2, 3))[:, 0])


@pytest.mark.parametrize(
    ("devices", "videos", "rows", "columns", "wanted"),
    [
        (1, 1, 90, 160, (1, 1, 1)),
        (8, 1, 90, 160, (1, 1, 8)),
        (8, 2, 90, 160, (2, 1, 4)),
        (8, 8, 90, 160, (8, 1, 1)),
        (8, 3, 90, 160, (1, 1, 8)),
        # Too few columns for all of them.
        (256, 1, 90, 160, (1, 8, 32)),
        (8, 1, 160, 4, (1, 8, 1)),
    ],
)
def test_columns_are_split_until_rows_leave_a_tenth_less(
    devices: int, videos: int, rows: int, columns: int, wanted: tuple[int, int, int]
) -> None:
    names = ("videos", "rows", "columns")
    expected = SpatialSplit(**dict(zip(names, wanted, strict=True)))
    assert choose_split(devices, videos, rows, columns) == expected


def test_an_input_without_its_layout_is_refused() -> None:
    mesh = runtime().mesh
    assert mesh is not None
    with pytest.raises(PluginError, match=r"input 'y' .* layout None"):
        split_of(LAYOUT, mesh, {"x": np.zeros((1, 1, 4, 4)), "y": np.zeros(3)})
    with pytest.raises(PluginError, match="'BCYX'"):
        split_of(LAYOUT, mesh, {"x": np.zeros((1, 4, 4))})
    whole = SpatialLayout(inputs={"x": "BCYX"}, carry="", output="B", granule=8)
    with pytest.raises(PluginError, match="8 rows and columns stay together"):
        split_of(whole, mesh, {"x": np.zeros((1, 1, 16, 20))})


def test_a_halo_wider_than_a_neighbour_and_a_cut_side_are_refused() -> None:
    side = Side(axis="columns", parts=4, size=6)
    assert (side.each, side.even, side.whole(4)) == (2, False, 12)
    with pytest.raises(ValueError, match="3 columns on a device"):
        Side(axis="columns", parts=4, size=5).whole(3)

    def run(space: Any, x: Any) -> dict[str, Any]:
        if x is None:
            return {"picture": None}
        return {"picture": space.halo(x, DIMS, (0, 3), (0, 0))}

    with pytest.raises(ValueError, match="a halo of 3 columns, where a device has 2"):
        split(run, pixels((1, 1, 2, 16)))
