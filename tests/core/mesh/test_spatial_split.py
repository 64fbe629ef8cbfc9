"""A picture split over devices against the whole picture in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.spatial_split import (
    COLUMNS,
    ROWS,
    Side,
    Space,
    SpatialSplit,
    choose_split,
    partition,
    spatial_mesh,
)

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
#: The dims of what a program may give.
LAYOUT = {"picture": "BCYX", "number": "B", "whole": "BC"}
DIMS = (2, 3)


def pixels(shape: tuple[int, ...], mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(0).normal(mean, 1.0, shape).astype(np.float32)


def split(
    run: Callable[[Any, Any], dict[str, Any]], x: np.ndarray, *gives: str
) -> dict[str, Any]:
    """What ``run(space, x)`` gives on every device's part, phantoms cut off."""
    devices = build_mesh(MeshSpec(sp=8))
    videos, _, rows, columns = x.shape
    parts = choose_split(8, videos, rows, columns)
    space = Space(
        rows=Side(axis=ROWS, parts=parts.rows, size=rows),
        columns=Side(axis=COLUMNS, parts=parts.columns, size=columns),
    )
    missing = (
        space.rows.each * parts.rows - rows,
        space.columns.each * parts.columns - columns,
    )
    wide = np.pad(x, [(0, 0), (0, 0), *((0, n) for n in missing)])
    whole = jax.shard_map(
        lambda x: run(space, x),
        mesh=spatial_mesh(devices, parts),
        in_specs=partition("BCYX"),
        out_specs={name: partition(LAYOUT[name]) for name in gives},
        check_vma=False,
    )
    out = jax.jit(whole)(wide)
    return {
        k: np.asarray(v)[..., :rows, :columns] if k == "picture" else np.asarray(v)
        for k, v in out.items()
    }


@pytest.mark.parametrize("border", ["zeros", "edge"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_halo_is_what_lies_beside_a_part(shape: tuple[int, ...], border: Any) -> None:
    x = pixels(shape)

    def run(space: Any, x: Any) -> dict[str, Any]:
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
    assert np.abs(split(run, x, "picture")["picture"] - wanted).max() <= 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_of_the_whole_picture(shape: tuple[int, ...]) -> None:
    # Far from zero, where a difference of squares would have nothing left.
    x = pixels(shape, mean=1000.0)

    def run(space: Any, x: Any) -> dict[str, Any]:
        mean, variance = space.moments(x, DIMS, (2, 3))
        real = space.mask(x.shape, DIMS)
        ones = jnp.ones(x.shape) if real is None else jnp.broadcast_to(real, x.shape)
        count = space.sum(ones.astype(jnp.float32).sum((1, 2, 3)))
        return {"whole": (mean + variance).reshape(x.shape[:2]), "number": count}

    out = split(run, x, "whole", "number")
    wide = x.astype(np.float64)
    wanted = wide.mean((2, 3)) + wide.var((2, 3))
    assert np.abs(out["whole"] - wanted).max() <= 2e-3
    assert (out["number"] == np.prod(shape[1:])).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gathered_picture_has_no_phantoms(shape: tuple[int, ...]) -> None:
    # All above zero, which phantoms are padded with.
    x = pixels(shape, mean=100.0)

    def run(space: Any, x: Any) -> dict[str, Any]:
        whole = space.gather(x, DIMS)
        assert whole.shape[1:] == shape[1:]
        return {"whole": whole.min((2, 3)) + whole.max((2, 3))}

    assert np.array_equal(
        split(run, x, "whole")["whole"], x.min((2, 3)) + x.max((2, 3))
    )


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


def test_a_halo_wider_than_a_neighbour_and_a_cut_side_are_refused() -> None:
    side = Side(axis="columns", parts=4, size=6)
    assert (side.each, side.even, side.whole(4)) == (2, False, 12)
    with pytest.raises(ValueError, match="3 columns on a device"):
        Side(axis="columns", parts=4, size=5).whole(3)

    def run(space: Any, x: Any) -> dict[str, Any]:
        return {"picture": space.halo(x, DIMS, (0, 3), (0, 0))}

    with pytest.raises(ValueError, match="a halo of 3 columns, where a device has 2"):
        split(run, pixels((1, 1, 2, 16)), "picture")
