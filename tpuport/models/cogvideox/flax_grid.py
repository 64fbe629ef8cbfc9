"""Where the pixels of an activation are, and what a layer needs from beside its own.

An activation of the Flax VAE is [B, T, Y, X, C]. On a mesh the activation is a device's
part of a larger picture (:class:`tpuport.core.mesh.spatial_split.Space`). A layer asks
here for the rows and columns around its own, and for statistics of the whole picture.
On a TPU the grid also has what the project's kernels run in; the kernels ask for
themselves.

Legend: B videos, T/Y/X frames, rows, columns of a device, C channels, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.layers.video_layers import LANES, has_kernels
from tpuport.core.mesh.spatial_split import Space, exchanged
from tpuport.core.tracing.context import OpContext

#: Dims of rows and columns of an activation.
ROWS, COLUMNS = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a program's pictures are split.

    Attributes:
        space: how the picture is split over devices; ``None`` for not at all.
        kernels: what the project's kernels run in; ``None`` where they cannot, which is
            anywhere but on a TPU.
    """

    space: Space | None = None
    kernels: OpContext | None = None

    def normalises(self, channels: int) -> bool:
        """Whether the kernels do the norms of so many channels."""
        return self.kernels is not None and channels % LANES == 0

    def padded(
        self, x: jax.Array, before: int, after: int
    ) -> tuple[jax.Array, tuple[tuple[int, int], tuple[int, int]]]:
        """``x`` with what is around a device's part, as far as another device has it.

        Args:
            x: [B, T, Y, X, C].
            before, after: rows and columns in front and behind.

        Returns:
            the array, and what a convolution has yet to pad with zeros on rows and on
            columns: nothing, or all of it where a side is in one piece.

        Raises:
            ValueError: more are asked for than a device has.
        """
        if self.space is None:
            return x, ((before, after), (before, after))
        pads: list[tuple[int, int]] = []
        for side, dim in ((self.space.rows, ROWS), (self.space.columns, COLUMNS)):
            if side.parts == 1:
                pads.append((before, after))
            else:
                x = exchanged(side, x, dim, before, after, "zeros")
                pads.append((0, 0))
        return x, (pads[0], pads[1])

    def moments(self, x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of every group of channels over the whole picture.

        Args:
            x: [B, T, Y, X, C].
            groups: G, which divides C.

        Returns:
            two float32 arrays [B, 1, 1, 1, C].

        Sums are over the device's part first, in two passes for float32. Narrower
        inputs take one: what float32 sums of squares lose is less than what the inputs'
        own rounding did to the variance. Parts are joined as count, mean and summed
        squares around the mean (Chan, Golub and LeVeque 1979).
        """
        each = x.shape[-1] // groups
        rows: Any
        columns: Any
        rows, columns = x.shape[ROWS], x.shape[COLUMNS]
        real = None
        if self.space is not None:
            real = self.space.mask(x.shape, (ROWS, COLUMNS))
            rows = self.space.rows.count(rows)
            columns = self.space.columns.count(columns)
        count = jnp.float32(x.shape[1] * rows * columns) * each

        def total(values: jax.Array) -> jax.Array:
            """[B, T, Y, X, C] -> sums [B, G]."""
            if real is not None:
                values = jnp.where(real, values, 0)
            sums = jnp.sum(values, axis=(1, 2, 3))
            return sums.reshape(-1, groups, each).sum(2)

        wide = x.astype(jnp.float32)
        some = jnp.maximum(count, 1)
        mean = total(wide) / some
        if x.dtype == jnp.float32:
            squares = total(jnp.square(wide - _spread(mean, each)))
        else:
            squares = total(jnp.square(wide)) - count * jnp.square(mean)
        if self.space is not None and self.space.axes:
            counts = jnp.broadcast_to(count, mean.shape)
            parts = jax.lax.all_gather(
                jnp.stack([counts, mean, squares]), self.space.axes
            )
            counts, means, spreads = (parts[:, i] for i in range(3))
            count = jnp.sum(counts, 0)
            mean = jnp.sum(counts * means, 0) / count
            squares = jnp.sum(spreads + counts * jnp.square(means - mean), 0)
        variance = jnp.maximum(squares / count, 0)
        return _spread(mean, each), _spread(variance, each)


def grid_of(context: OpContext) -> Grid:
    """How the pictures of the program that is being traced are split."""
    kernels = context if has_kernels(context) else None
    return Grid(space=context.space, kernels=kernels)


def _spread(values: jax.Array, each: int) -> jax.Array:
    """[B, G] -> [B, 1, 1, 1, C]."""
    return jnp.repeat(values, each, axis=1)[:, None, None, None, :]
