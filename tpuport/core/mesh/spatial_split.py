"""Programs split in space: every device holds some rows and columns of a video.

A convolution then needs the rows and columns beside its own (a halo), which the
neighbours send; a statistic over the picture covers all devices. If a side does not
divide, the last devices hold phantom rows or columns. Convolutions see the border of
the picture in their place and statistics leave them out, so the result equals one
device's.

Legend: B videos, Y rows and X columns, at any resolution of the program; n elements of
a side on a device. Halo exchange for convolutions: Dryden et al. 2019, "Improving
Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS
(arXiv:1903.06681).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tpuport.core.compat import without_folding
from tpuport.core.mesh.device_mesh import mesh_over
from tpuport.core.mesh.mesh_spec import divisors
from tpuport.core.mesh.picture_marks import Mark, marked

if TYPE_CHECKING:
    import jax


VIDEOS, ROWS, COLUMNS = ("videos", "rows", "columns")
"""The mesh axes of a program split in space."""


Border = Literal["zeros", "edge"]
"""What lies beyond the picture: zeros, or its outermost row or column again."""


class HaloError(ValueError):
    """More rows or columns are asked for than a neighbour has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Rows or columns of a picture over devices.

    Attributes:
        axis: the mesh axis.
        parts: devices along it.
        size: elements of the whole side, at the resolution of what is split.
    """

    axis: str
    parts: int
    size: int

    @property
    def each(self) -> int:
        """Elements on a device, phantom ones included."""
        return -(-self.size // self.parts)

    @property
    def even(self) -> bool:
        """Whether there are no phantom elements."""
        return self.size % self.parts == 0

    def whole(self, n: int) -> int:
        """Elements of the whole side at the resolution that has n on a device.

        Raises:
            ValueError: no resolution has: n was padded or cut.
        """
        if n * self.size % self.each:
            raise ValueError(
                f"{n} {self.axis} on a device, where a picture of {self.size} has "
                f"{self.each}"
            )
        return n * self.size // self.each

    def start(self, n: int) -> jax.Array:
        """Where this device's elements start in the whole side."""
        return self.place() * n

    def place(self) -> jax.Array:
        """Which of the devices along the side this one is."""
        import jax

        # It has no value yet, wherever constants are computed while tracing.
        with without_folding():
            return jax.lax.axis_index(self.axis)

    def real(self, n: int, ndim: int = 1, dim: int = 0) -> jax.Array:
        """Which of this device's elements are no phantoms.

        Args:
            ndim, dim: of an array whose dim the n elements are.

        Returns:
            booleans that broadcast to the array.
        """
        import jax.numpy as jnp

        real = self.start(n) + jnp.arange(n) < self.whole(n)
        return real.reshape([n if at == dim else 1 for at in range(ndim)])

    def moved(self, x: jax.Array, by: int) -> jax.Array:
        """``x`` of the device that is ``by`` before this one; zeros without one."""
        import jax
        import jax.numpy as jnp

        if self.parts == 1:
            return jnp.zeros_like(x)
        places = range(self.parts)
        return jax.lax.ppermute(
            x, self.axis, [(i, i + by) for i in places if i + by in places]
        )

    def count(self, n: int) -> jax.Array | int:
        """How many of them there are."""
        import jax.numpy as jnp

        return n if self.even else jnp.clip(self.ahead(n), 0, n)

    def ahead(self, n: int) -> jax.Array:
        """How many there are from this device's first on, on all devices together."""
        return self.whole(n) - self.start(n)


def exchanged(
    side: Side, x: jax.Array, dim: int, before: int, after: int, border: Border
) -> jax.Array:
    """One dim of :meth:`Space.halo`."""
    import jax
    import jax.numpy as jnp

    if not before and not after:
        return x
    n = x.shape[dim]
    if side.parts == 1:
        pads = [(0, 0)] * x.ndim
        pads[dim] = (before, after)
        return jnp.pad(x, pads, mode="edge" if border == "edge" else "constant")
    if max(before, after) > n:
        raise HaloError(
            f"a halo of {max(before, after)} {side.axis}, where a device has {n}"
        )

    def cut(start: int, stop: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, start, stop, axis=dim)

    last: jax.Array | None = None
    if not side.even:
        # Phantom elements stand for what lies beyond the picture.
        real = side.real(n, x.ndim, dim)
        if border == "edge":
            at = jnp.clip(side.whole(n) - 1 - side.start(n), 0, n - 1)
            last = jax.lax.dynamic_slice_in_dim(x, at, 1, axis=dim)
            x = jnp.where(real, x, last)
        else:
            x = jnp.where(real, x, 0)
    place = side.place()
    parts = [x]
    if before:
        got = side.moved(cut(n - before, n), 1)
        if border == "edge":
            got = jnp.where(place == 0, cut(0, 1), got)
        parts.insert(0, got)
    if after:
        got = side.moved(cut(0, after), -1)
        if border == "edge":
            ends = side.start(n) + n >= side.whole(n)
            got = jnp.where(ends, cut(n - 1, n) if last is None else last, got)
        parts.append(got)
    return jnp.concatenate(parts, axis=dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """How the picture is split while a program is traced."""

    rows: Side
    columns: Side

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which the picture is split."""
        return tuple(s.axis for s in (self.rows, self.columns) if s.parts > 1)

    def halo(
        self,
        x: jax.Array,
        dims: tuple[int, int],
        before: tuple[int, int],
        after: tuple[int, int],
        border: Border = "zeros",
    ) -> jax.Array:
        """``x`` with the rows and columns around this device's.

        Args:
            x: of any shape.
            dims: its dims of rows and of columns.
            before, after: how many rows and columns to add in front and behind.
            border: what lies beyond the picture.

        Raises:
            HaloError: more are asked for than a neighbour has.
        """
        wide = x
        for side, dim, n, m in zip(
            (self.rows, self.columns), dims, before, after, strict=True
        ):
            wide = exchanged(side, wide, dim, n, m, border)
        added = (before[0] + after[0], before[1] + after[1])
        mark = Mark(name="a border", dims=dims, given=dims, added=added)
        return marked(mark, wide, x)

    def moments(
        self, x: jax.Array, dims: tuple[int, int], axes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of the whole picture over ``axes``, in float32.

        Args:
            x: of any float dtype.
            dims: its dims of rows and of columns, both among ``axes``.
            axes: what to reduce; kept with length 1.

        Each device's are exact for its part, and joined by Chan's formula (Chan, Golub
        and LeVeque 1979): no difference of large numbers anywhere.
        """
        import jax
        import jax.numpy as jnp

        axes = tuple(axes)
        x = x.astype(jnp.float32)
        real = self.mask(x.shape, dims)
        count: Any = 1
        sides = dict(zip(dims, (self.rows, self.columns), strict=True))
        for axis in axes:
            n = x.shape[axis]
            count = count * (sides[axis].count(n) if axis in sides else n)
        some = jnp.maximum(count, 1)

        def total(x: jax.Array) -> jax.Array:
            kept = x if real is None else jnp.where(real, x, 0)
            return jnp.sum(kept, axis=axes, keepdims=True)

        picture = x
        mean = total(x) / some
        spread = total(jnp.square(x - mean))
        if not self.axes:
            return mean, spread / count
        counts = jnp.broadcast_to(jnp.asarray(count, jnp.float32), mean.shape)
        parts = jax.lax.all_gather(jnp.stack([counts, mean, spread]), self.axes)
        counts, means, spreads = (parts[:, i] for i in range(3))
        whole = jnp.sum(counts, 0)
        mean = jnp.sum(counts * means, 0) / whole
        spread = jnp.sum(spreads + counts * jnp.square(means - mean), 0)
        mark = Mark(name="statistics", dims=None, given=dims)
        return marked(mark, mean, picture), marked(mark, spread / whole, picture)

    def mask(self, shape: Sequence[int], dims: tuple[int, int]) -> jax.Array | None:
        """Which elements are no phantoms; ``None`` where all are real.

        Returns:
            booleans that broadcast to ``shape``.
        """
        found: jax.Array | None = None
        for side, dim in zip((self.rows, self.columns), dims, strict=True):
            if not side.even:
                real = side.real(shape[dim], len(shape), dim)
                found = real if found is None else found & real
        return found

    def gather(self, x: jax.Array, dims: tuple[int, int]) -> jax.Array:
        """The whole picture, phantom rows and columns cut off, on every device."""
        import jax

        found = x
        for side, dim in zip((self.rows, self.columns), dims, strict=True):
            if side.parts > 1:
                whole = side.whole(x.shape[dim])
                found = jax.lax.all_gather(found, side.axis, axis=dim, tiled=True)
                found = jax.lax.slice_in_dim(found, 0, whole, axis=dim)
        return marked(Mark(name="a gathered picture", dims=None, given=dims), found, x)

    def sum(self, x: jax.Array) -> jax.Array:
        """Element by element the sum over all devices that share a picture."""
        import jax

        return jax.lax.psum(x, self.axes) if self.axes else x


# ---------------------------------------------------------------------- programs


class SpatialSplit(NamedTuple):
    """How many ways a program's arrays are split: videos, rows, columns."""

    videos: int
    rows: int
    columns: int


def choose_split(devices: int, videos: int, rows: int, columns: int) -> SpatialSplit:
    """The split of all ``devices`` that leaves each the least work.

    Videos first, as far as they divide; then columns, as long as another split would
    not leave a tenth less: with both sides split, every exchange is two. A row or
    column of halo on every split side counts as work.

    Args:
        devices: how many there are.
        videos, rows, columns: of what is split.
    """
    by_video = math.gcd(devices, videos)
    left = devices // by_video

    def work(split: tuple[int, int]) -> int:
        sides = zip((rows, columns), split, strict=True)
        return math.prod(-(-n // parts) + 2 * (parts > 1) for n, parts in sides)

    splits = [(r, left // r) for r in divisors(left)]
    most = 1.1 * min(map(work, splits))
    best = next(split for split in splits if work(split) <= most)
    return SpatialSplit(videos=by_video, rows=best[0], columns=best[1])


def spatial_mesh(mesh: jax.sharding.Mesh, split: SpatialSplit) -> jax.sharding.Mesh:
    """The devices of ``mesh``, in its order, along the axes of a split.

    If the split is of the devices of one slice, every slice has all parts.
    """
    slices = mesh.size // math.prod(split)
    first = {"slices": slices} if slices > 1 else {}
    return mesh_over(mesh.devices.flat, first | split._asdict())


def partition(letters: str) -> jax.sharding.PartitionSpec:
    """The mesh axis of every dim of a layout."""
    from jax.sharding import PartitionSpec

    axes = {"B": VIDEOS, "Y": ROWS, "X": COLUMNS}
    return PartitionSpec(*(axes.get(letter) for letter in letters))
