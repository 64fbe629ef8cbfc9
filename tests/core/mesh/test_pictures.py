"""Which split a picture gets."""

from __future__ import annotations

import jax
import pytest

from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.pictures import picture_of, picture_sharding


def mesh(text: str) -> jax.sharding.Mesh:
    return build_mesh(MeshSpec.parse(text))


@pytest.mark.parametrize(
    ("devices", "sides", "expected"),
    [
        # Latents of 720p: columns alone.
        ("sp=8", (90, 160), (1, 8)),
        ("dp=2,sp=2,tp=2", (90, 160), (1, 8)),
        # Neither side divides by 8.
        ("sp=8", (60, 90), (4, 2)),
        ("sp=3", (90, 160), (3, 1)),
        # Whole now, and in parts once the picture is twice the size.
        ("sp=8", (15, 22), None),
        ("sp=8", (30, 44), (2, 4)),
        # A device has four rows or columns, or the picture is whole.
        ("sp=8", (8, 16), (2, 4)),
        ("sp=8", (4, 16), None),
        # Rows over whole axes: 4 x 2 would be a part of tp.
        ("dp=2,tp=4", (64, 48), (8, 1)),
        ("dp=2,tp=4", (16, 12), None),
        ("sp=3", (64, 64), None),
        ("sp=1", (64, 64), None),
    ],
)
def test_the_split(devices: str, sides: tuple[int, int], expected: object) -> None:
    found = picture_of(mesh(devices), *sides)
    parts = found and (found.space.rows.parts, found.space.columns.parts)
    assert parts == expected


@pytest.mark.parametrize("sides", [(90, 160), (60, 90), (34, 60), (30, 44), (13, 16)])
def test_a_picture_of_twice_the_size_has_the_same_split(sides: tuple[int, int]) -> None:
    meshes = set()
    for times in (1, 2, 4, 8, 16):
        found = picture_of(mesh("sp=8"), *(times * side for side in sides))
        if found is not None:
            meshes.add((found.space.rows.parts, found.space.columns.parts))
    assert len(meshes) == 1


def test_only_arrays_of_four_and_five_dims_are_pictures() -> None:
    devices = mesh("sp=8")
    split = {
        shape: picture_sharding(devices, shape).shard_shape(shape)
        for shape in ((64, 64), (2, 64, 64), (2, 3, 64, 64), (2, 3, 1, 64, 64))
    }
    assert [sizes[-1] for sizes in split.values()] == [64, 64, 16, 16]
