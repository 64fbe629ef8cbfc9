"""Pictures that are split over the devices within a program of whole arrays.

The compiler carries the split through all that looks at one place of a picture. What
looks at its neighbours, such as a convolution, runs on each device's part
(:mod:`tpuport.core.mesh.spatial_split`). A picture that does not divide stays whole.

Legend: Y rows and X columns, at any resolution of the program.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.mesh.device_mesh import on_one_slice
from tpuport.core.mesh.mesh_spec import divisors
from tpuport.core.mesh.spatial_split import (
    COLUMNS,
    ROWS,
    Side,
    Space,
    SpatialSplit,
    partition,
    spatial_mesh,
)

if TYPE_CHECKING:
    import jax

#: Rows or columns of a device, at least: to exchange less takes longer than to compute.
FEWEST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """How the last two dims of an array are split.

    Attributes:
        mesh: all devices, along rows and columns; several slices along an axis more.
        space: the sides of the picture.
    """

    mesh: jax.sharding.Mesh
    space: Space

    def axes(self, ndim: int) -> tuple[str | None, ...]:
        """The mesh axis of each dim of an array of ``ndim`` dims."""
        return (*(None,) * (ndim - 2), ROWS, COLUMNS)


@functools.lru_cache(maxsize=256)
def picture_of(
    mesh: jax.sharding.Mesh | None, rows: int, columns: int
) -> Picture | None:
    """The split of a picture over all devices; ``None`` if the picture stays whole.

    Of all splits the one whose parts can be halved most often. A picture of half or
    twice the size has the same split, so a network that enlarges a picture step by step
    moves no part. Columns come first: with both sides split, every exchange is two. Of
    several slices each has the whole picture, split over its devices.
    """
    if mesh is None:
        return None
    devices, shape = on_one_slice(mesh)
    count = len(devices)
    if count == 1:
        return None

    def halvings(split: tuple[int, int]) -> float:
        sides = zip((rows, columns), split, strict=True)
        return min(_twos(size, parts) for size, parts in sides if parts > 1)

    axes = [size for size in shape.values() if size > 1]
    # A side may take whole axes of the mesh. The compiler (jaxlib 0.10.2) loses a side
    # that takes an axis and a part of another: 4 x 2 on dp=2,tp=4 became 2 parts.
    counts = (
        divisors(count)
        if len(axes) == 1
        else [math.prod(axes[:n]) for n in range(len(axes) + 1)]
    )
    split = max(((n, count // n) for n in counts), key=halvings)
    sides = [
        Side(axis=axis, parts=parts, size=size)
        for axis, parts, size in zip(
            (ROWS, COLUMNS), split, (rows, columns), strict=True
        )
    ]
    if not all(s.even and (s.parts == 1 or s.each >= FEWEST) for s in sides):
        return None
    parts = SpatialSplit(videos=1, rows=split[0], columns=split[1])
    return Picture(
        mesh=spatial_mesh(mesh, parts), space=Space(rows=sides[0], columns=sides[1])
    )


def _twos(size: int, parts: int) -> float:
    """How often a part can be halved; below 0, how often it must be doubled first."""
    share = math.gcd(size, parts)
    size, parts = size // share, parts // share
    if parts & (parts - 1):
        return -math.inf
    return (size & -size).bit_length() - parts.bit_length()


def picture_sharding(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> Any:
    """Where the parts of an array go that may be a picture: [.., Y, X] of 4 or 5 dims.

    Other arrays, and pictures that do not divide, are whole on every device.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    if len(shape) in (4, 5) and (picture := picture_of(mesh, *shape[-2:])):
        letters = "BCTYX" if len(shape) == 5 else "BCYX"
        return NamedSharding(picture.mesh, partition(letters))
    return NamedSharding(mesh, PartitionSpec())
