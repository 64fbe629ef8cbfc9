"""What each dim of an array is while a split program is followed.

A dim is one factor or several, the outermost first: upstream's code folds frames into a
batch, or rows and columns into tokens, and takes them apart again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpuport.core.mesh.spatial_split import Side

WHOLE, SAME = "", "*"
"""A factor that is no part of a picture, and one along which all elements are equal."""


class MixedError(Exception):
    """An operation that is not local in a picture."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a dim.

    Attributes:
        size: elements on a device.
        kind: ``WHOLE``, ``SAME``, or the mesh axis of a side of the picture.
        border: elements among them that lie around the device's part.
    """

    size: int
    kind: str = WHOLE
    border: int = 0

    @property
    def split(self) -> bool:
        """Whether it is rows or columns."""
        return self.kind not in (WHOLE, SAME)


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def same(n: int) -> Dim:
    """A dim of n equal elements."""
    return (Factor(n, SAME),)


def full(n: int) -> Dim:
    """A dim of n elements that every device has."""
    return (Factor(n),) if n > 1 else same(n)


def whole(shape: Sequence[int]) -> Dims:
    """The dims of an array that every device has in full."""
    return tuple(map(full, shape))


def canonical(factors: Sequence[Factor]) -> Dim:
    """The shortest factors that say the same."""
    found: list[Factor] = []
    for one in factors:
        last = found[-1] if found else None
        if one.size == 1 and not one.split and (last or len(factors) > 1):
            continue
        if last is None or one.split:
            found.append(one)
        elif last.split:
            # So many elements of each row: rows of a picture that is as much larger.
            size, border = last.size * one.size, last.border * one.size
            found[-1] = replace(last, size=size, border=border)
        else:
            kind = SAME if last.kind == one.kind == SAME else WHOLE
            found[-1] = Factor(last.size * one.size, kind)
    return tuple(found) or (Factor(1, SAME),)


def has_split(dim: Dim) -> bool:
    """Whether a dim holds rows or columns."""
    return any(one.split for one in dim)


def is_same(dim: Dim) -> bool:
    """Whether all elements along a dim are equal."""
    return all(one.kind == SAME for one in dim)


def size_of(dim: Dim) -> int:
    """Elements of a dim on a device."""
    return math.prod(one.size for one in dim)


def joined(one: Dim, other: Dim) -> Dim:
    """A dim of a result element by element.

    Raises:
        MixedError: one array is whole where the other is a device's part.
    """
    if one == other:
        return one
    for a, b in ((one, other), (other, one)):
        if is_same(a):
            return b
    if not has_split(one) and not has_split(other):
        return (Factor(size_of(one)),)
    if [f.size for f in one] == [f.size for f in other]:
        return tuple(map(_joined, one, other))
    raise MixedError("joins arrays whose rows or columns differ")


def _joined(one: Factor, other: Factor) -> Factor:
    if one == other or other.kind == SAME:
        return one
    if one.kind == SAME:
        return other
    if one.split and other.split:
        raise MixedError("joins arrays whose rows or columns differ")
    if one.split or other.split:
        raise MixedError("joins a device's part with an array that is whole")
    return Factor(one.size)


def reshaped(dims: Dims, shape: Sequence[int], sides: Sequence[Side]) -> Dims:
    """The dims of an array in another shape.

    Raises:
        MixedError: the shape cuts rows or columns in another way than into groups of
            equal size, none of which lies on two devices.
    """
    if 0 in shape:  # of no element, as frames after the only one: as any array
        return tuple(map(same, shape))
    factors = [one for dim in dims for one in dim]
    if any(one.split and one.size == 1 for one in factors):
        raise MixedError("a reshape of a picture of which a device has one row")
    left = [one for one in reversed(factors) if one.size > 1]
    found = []
    for size in shape:
        taken = [Factor(1, SAME)]
        while size > 1:
            one = left.pop()
            if size % one.size == 0:
                taken.append(one)
                size //= one.size
                continue
            if one.size % size:
                raise MixedError(f"a reshape cuts {one.size} into {size}")
            inner = one.size // size
            if one.split:
                taken.append(_groups(one, inner, sides))
                left.append(Factor(inner))
            else:
                taken.append(Factor(size, one.kind))
                left.append(Factor(inner, one.kind))
            size = 1
        found.append(canonical(taken))
    return tuple(found)


def _groups(one: Factor, inner: int, sides: Sequence[Side]) -> Factor:
    """Rows or columns in groups of ``inner``."""
    side = next(side for side in sides if side.axis == one.kind)
    if one.border:
        raise MixedError("a reshape of a picture with a border")
    if whole_of(side, one.size) % inner:
        raise MixedError(f"a reshape cuts {side.axis} into groups of {inner}")
    found = Factor(one.size // inner, one.kind)
    whole_of(side, found.size)
    return found


def whole_of(side: Side, n: int) -> int:
    """Elements of a side, of which a device has n.

    Raises:
        MixedError: no picture of the program has as many.
    """
    try:
        return side.whole(n)
    except ValueError as error:
        raise MixedError(str(error)) from None
