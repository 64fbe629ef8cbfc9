"""Which arrays of a call are pictures, and how they are split over devices.

Legend: B videos, C channels, T frames, Y rows and X columns, at any resolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.mesh.device_mesh import by_slice, mesh_over
from tpuport.core.mesh.mesh_spec import divisors
from tpuport.core.mesh.spatial_split import (
    COLUMNS,
    ROWS,
    Side,
    Space,
    SpatialSplit,
    choose_split,
)
from tpuport.errors import PluginError

Shape = tuple[int, ...]

#: Rows or columns of a device, at the lowest resolution of a program: one row or column
#: cannot be told from a dim of one element.
FEWEST = 2


def may_be_picture(array: Any) -> bool:
    """Whether an array is of floats, [B, C, T, Y, X] or [B, C, Y, X]."""
    return array.ndim in (4, 5) and jnp.issubdtype(array.dtype, jnp.floating)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """The pictures of a call, before they are split.

    Attributes:
        videos, rows, columns: of the first one.
        places: of all of them among the tensors.
        scales: resolutions beside the first one's: that of each in units of it.
    """

    videos: int
    rows: int
    columns: int
    places: frozenset[int]
    scales: frozenset[Fraction]


def pictures_of(
    component: str, names: Sequence[str], arrays: Sequence[jax.ShapeDtypeStruct]
) -> Pictures | None:
    """The pictures among the arrays of a call; ``None`` if there are none.

    The first one gives the size. Others are as many times larger or smaller, in rows as
    in columns. Whatever has one row and one column is no picture.

    Args:
        names: of the arrays, for people.

    Raises:
        PluginError: an array has the dims of a picture and another shape.
    """
    found = [i for i, one in enumerate(arrays) if may_be_picture(one)]
    if not found:
        return None
    first = arrays[found[0]]
    rows, columns = first.shape[-2:]
    places, scales = set(), set()
    for i in found:
        one = arrays[i]
        if one.shape[-2:] == (1, 1) != (rows, columns):
            continue
        scale, other = (
            Fraction(n, of)
            for n, of in zip(one.shape[-2:], (rows, columns), strict=True)
        )
        if scale != other or 1 not in (scale.numerator, scale.denominator):
            raise PluginError(
                f'{component} has split="space", and its calls are given '
                f"{names[i]} of shape {[*one.shape]} beside {names[found[0]]} of shape "
                f"{[*first.shape]}: the last two dims are no rows and columns of the "
                "same picture"
            )
        places.add(i)
        scales.add(scale)
    return Pictures(
        videos=first.shape[0],
        rows=rows,
        columns=columns,
        places=frozenset(places),
        scales=frozenset(scales),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A way to split the pictures of a call.

    Attributes:
        split: how many ways.
        space: the sides.
        copies: devices that hold the same part: a small picture has no part for each.
    """

    split: SpatialSplit
    space: Space
    copies: int

    @classmethod
    def of(cls, split: SpatialSplit, rows: int, columns: int, devices: int) -> Parts:
        """Of the first picture, whose rows or columns that stay together count once."""
        space = Space(
            rows=Side(axis=ROWS, parts=split.rows, size=rows),
            columns=Side(axis=COLUMNS, parts=split.columns, size=columns),
        )
        return cls(split=split, space=space, copies=devices // math.prod(split))

    @classmethod
    def whole(cls, pictures: Pictures, devices: int) -> Parts:
        """The pictures whole on every device."""
        one = SpatialSplit(videos=1, rows=1, columns=1)
        return cls.of(one, pictures.rows, pictures.columns, devices)

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.space.rows, self.space.columns

    def local(self, shape: Shape) -> Shape:
        """The shape of a picture's part on a device, phantoms included."""
        first, *others = shape[:-2]
        sides = zip(shape[-2:], self._sides, strict=True)
        own = (n if s.parts == 1 else n // s.size * s.each for n, s in sides)
        return (first // self.split.videos, *others, *own)

    def padded(self, shape: Shape) -> Shape:
        """The shape of a picture with its phantom rows and columns."""
        own = zip(self.local(shape)[-2:], self._sides, strict=True)
        return (*shape[:-2], *(n * side.parts for n, side in own))

    def mesh(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """The devices, in their order, along the axes of the split.

        Copies are neighbours on one slice. Of several slices each has all parts of a
        picture, so copies are far apart.
        """
        split, copies = self.split._asdict(), {"copies": self.copies}
        several = len(by_slice(devices)) > 1
        return mesh_over(devices, copies | split if several else split | copies)


def ways(
    pictures: Pictures,
    made: Sequence[Shape],
    devices: Sequence[jax.Device],
    by_video: bool,
) -> Iterator[Parts]:
    """Ways to split the pictures of a call, the best first; the last one is no split.

    Args:
        made: shapes of its results of four or five dims.
        devices: all; the parts of a picture lie on one slice of them.
        by_video: whether videos may lie on different devices.
    """
    scales = {*pictures.scales}
    for shape in made:
        scales |= {
            Fraction(shape[-2], pictures.rows),
            Fraction(shape[-1], pictures.columns),
        }
    granule = math.lcm(*(scale.denominator for scale in scales))
    rows, left = divmod(pictures.rows, granule)
    columns, over = divmod(pictures.columns, granule)
    total, each = len(devices), len(by_slice(devices)[0])
    counts = [] if left or over else divisors(total)[:0:-1]
    for count in counts:
        videos = pictures.videos if by_video else 1
        split = choose_split(count, videos, rows, columns)
        found = Parts.of(split, rows, columns, total)
        if each % (split.rows * split.columns):
            continue
        if all(side.parts == 1 or side.each >= FEWEST for side in found._sides):
            yield found
    yield Parts.whole(pictures, total)
