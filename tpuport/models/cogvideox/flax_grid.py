"""Where the pixels of an activation are, and what a layer needs from beside its own.

An activation of the Flax VAE is [N, T, Y, X, C]: N = B videos times the strips that a
device cuts its part of the picture into, video by video, strip rows before strip
columns. A TPU convolution wants something like a batch of eight beside the channels;
strips are that, also for one video. On a mesh the device's part is itself one of a
larger picture (:class:`tpuport.core.spatial.Space`). Both are the same to a layer: it
asks for the rows and columns around its own, and for statistics of the whole picture.

Legend: N strips, B videos, T/Y/X frames, rows, columns of a strip, C channels, G
groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from tpuport.core.spatial import Side, Space

#: What a TPU register holds beside the channels: the batch of a convolution fills it.
SUBLANES = 8

#: Dims of rows and columns of an activation.
ROWS, COLUMNS = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a program's pictures are cut.

    Attributes:
        rows, columns: strips that a device's part is cut into, down and across. They
            divide the rows and columns of the latents on the device.
        space: how the picture is split over devices; ``None`` for not at all.
        fold_taps: write a convolution over three axes as one over two, with the frames
            of its taps side by side in the channels. XLA's CPU compiler wants that.
    """

    rows: int = 1
    columns: int = 1
    space: Space | None = None
    fold_taps: bool = False

    @property
    def strips(self) -> int:
        """Strips of a video on a device."""
        return self.rows * self.columns

    def split(self, x: jax.Array) -> jax.Array:
        """A device's [B, T, Y, X, C] as strips [N, T, Y, X, C].

        Raises:
            ValueError: the strips do not divide rows or columns.
        """
        batch, frames, rows, columns, channels = x.shape
        if rows % self.rows or columns % self.columns:
            raise ValueError(
                f"{rows} x {columns} pixels on a device cannot be cut into "
                f"{self.rows} x {self.columns} strips"
            )
        if self.strips == 1:
            return x
        y, w = rows // self.rows, columns // self.columns
        x = x.reshape(batch, frames, self.rows, y, self.columns, w, channels)
        x = x.transpose(0, 2, 4, 1, 3, 5, 6)
        return x.reshape(batch * self.strips, frames, y, w, channels)

    def join(self, x: jax.Array) -> jax.Array:
        """Undo :meth:`split`."""
        if self.strips == 1:
            return x
        count, frames, y, w, channels = x.shape
        x = x.reshape(-1, self.rows, self.columns, frames, y, w, channels)
        x = x.transpose(0, 3, 1, 4, 2, 5, 6)
        return x.reshape(
            count // self.strips, frames, y * self.rows, w * self.columns, channels
        )

    def padded(
        self, x: jax.Array, before: int, after: int
    ) -> tuple[jax.Array, tuple[tuple[int, int], tuple[int, int]]]:
        """``x`` with what is around each strip, as far as another strip has it.

        Args:
            x: [N, T, Y, X, C].
            before, after: rows and columns in front and behind.

        Returns:
            the array, and what a convolution has yet to pad with zeros on rows and on
            columns: nothing, or all of it where a side is in one piece.

        Raises:
            ValueError: more are asked for than a strip has.
        """
        pads: list[tuple[int, int]] = []
        for dim in (ROWS, COLUMNS):
            if self._pieces(dim) == 1:
                pads.append((before, after))
            else:
                x = self._halo(x, dim, before, after)
                pads.append((0, 0))
        return x, (pads[0], pads[1])

    def moments(self, x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of every group of channels over the whole picture.

        Args:
            x: [N, T, Y, X, C].
            groups: G, which divides C.

        Returns:
            two float32 arrays [N, 1, 1, 1, C].

        Sums are over the device's part first, in two passes for float32. Narrower
        inputs take one: what float32 sums of squares lose is less than what the inputs'
        own rounding did to the variance. Parts are joined as count, mean and summed
        squares around the mean (Chan, Golub and LeVeque 1979).
        """
        import jax
        import jax.numpy as jnp

        channels = x.shape[-1]
        each = channels // groups
        real = self._real(x)
        pixels = jnp.float32(x.shape[1] * self._held(x, ROWS) * self._held(x, COLUMNS))
        count = pixels * each

        def total(values: jax.Array) -> jax.Array:
            """[N, T, Y, X, C] -> sums [B, G]."""
            if real is not None:
                values = jnp.where(real, values, 0)
            sums = jnp.sum(values, axis=(1, 2, 3))
            return sums.reshape(-1, self.strips, groups, each).sum((1, 3))

        wide = x.astype(jnp.float32)
        some = jnp.maximum(count, 1)
        mean = total(wide) / some
        if x.dtype == jnp.float32:
            squares = total(jnp.square(wide - self._spread(mean, each)))
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
        return self._spread(mean, each), self._spread(variance, each)

    def _spread(self, values: jax.Array, each: int) -> jax.Array:
        """[B, G] -> [N, 1, 1, 1, C]."""
        import jax.numpy as jnp

        values = jnp.repeat(jnp.repeat(values, each, axis=1), self.strips, axis=0)
        return values[:, None, None, None, :]

    def _side(self, dim: int) -> tuple[int, Side | None]:
        """Strips on a device and how devices share a side."""
        strips = self.rows if dim == ROWS else self.columns
        if self.space is None:
            return strips, None
        return strips, self.space.rows if dim == ROWS else self.space.columns

    def _held(self, x: jax.Array, dim: int) -> Any:
        """Rows or columns of the picture that this device holds."""
        strips, side = self._side(dim)
        n = x.shape[dim] * strips
        return n if side is None else side.count(n)

    def _pieces(self, dim: int) -> int:
        strips, side = self._side(dim)
        return strips * (side.parts if side else 1)

    def _real(self, x: jax.Array, dims: tuple[int, ...] = (ROWS, COLUMNS)) -> Any:
        """Which pixels are in the picture: booleans that broadcast to ``x``, or None.

        The picture does not divide among the devices where some are not.
        """
        import jax.numpy as jnp

        found: jax.Array | None = None
        for dim in dims:
            strips, side = self._side(dim)
            if side is None or side.even:
                continue
            n = x.shape[dim]
            real = side.real(n * strips)
            if dim == ROWS:
                real = real.reshape(1, strips, 1, 1, n, 1, 1)
            else:
                real = real.reshape(1, 1, strips, 1, 1, n, 1)
            batch = x.shape[0] // self.strips
            wide = jnp.broadcast_to(
                real, (batch, self.rows, self.columns, *real.shape[3:])
            )
            real = wide.reshape(x.shape[0], *real.shape[3:])
            found = real if found is None else found & real
        return found

    def _halo(self, x: jax.Array, dim: int, before: int, after: int) -> jax.Array:
        """``x`` with rows or columns of the strips beside, zeros beyond the picture."""
        import jax
        import jax.numpy as jnp

        n = x.shape[dim]
        if max(before, after) > n:
            raise ValueError(f"a halo of {max(before, after)}, where a strip has {n}")
        real = self._real(x, (dim,))
        if real is not None:
            # What is no pixel stands for the zeros beyond the picture.
            x = jnp.where(real, x, 0)
        parts = [x]
        if before:
            edge = jax.lax.slice_in_dim(x, n - before, n, axis=dim)
            parts.insert(0, self._shifted(edge, dim, 1))
        if after:
            edge = jax.lax.slice_in_dim(x, 0, after, axis=dim)
            parts.append(self._shifted(edge, dim, -1))
        return jnp.concatenate(parts, axis=dim)

    def _shifted(self, edge: jax.Array, dim: int, by: int) -> jax.Array:
        """Every strip's ``edge`` at its neighbour; who has none there gets zeros."""
        import jax
        import jax.numpy as jnp

        strips, side = self._side(dim)
        edge_strip = 0 if by == 1 else strips - 1
        beyond: Any = 0
        if side is not None and side.parts > 1:
            split = edge.reshape(-1, self.rows, self.columns, *edge.shape[1:])
            other = strips - 1 - edge_strip
            ours = jax.lax.slice_in_dim(split, other, other + 1, axis=dim - 1)
            pairs = [(i, i + by) for i in range(side.parts) if 0 <= i + by < side.parts]
            got = jax.lax.ppermute(ours, side.axis, pairs)
            beyond = jnp.broadcast_to(got, split.shape).reshape(edge.shape)
            if strips == 1:
                return beyond
        # Along N as it is: a TPU holds it beside the channels, and a reshape of that
        # costs more than the comparison.
        step = by * (self.columns if dim == ROWS else 1)
        zeros = jnp.zeros_like(edge[: abs(step)])
        if step > 0:
            moved = jnp.concatenate([zeros, edge[:-step]])
        else:
            moved = jnp.concatenate([edge[-step:], zeros])
        index = jnp.arange(edge.shape[0])
        index = (
            index // self.columns % self.rows if dim == ROWS else index % self.columns
        )
        outer = (index == edge_strip).reshape(-1, 1, 1, 1, 1)
        return jnp.where(outer, beyond, moved)


def choose_grid(
    platform: str, videos: int, rows: int, columns: int, space: Space | None = None
) -> Grid:
    """The strips that suit a platform.

    Args:
        platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
        videos, rows, columns: of the latents on a device.
        space: how the picture is split over devices.

    On a TPU strips fill the registers beside the channels as far as exact divisors of
    rows and columns can; of such the ones with the least border.
    """
    if platform != "tpu":
        return Grid(space=space, fold_taps=True)

    def cost(strips: tuple[int, int]) -> tuple[float, int]:
        count = videos * strips[0] * strips[1]
        filled = -(-count // SUBLANES) * SUBLANES / count
        border = (rows + 2 * strips[0]) * (columns + 2 * strips[1]) / (rows * columns)
        return filled * border, strips[0]

    found = [
        (r, c)
        for r in _divisors(rows)
        for c in _divisors(columns)
        if r * c <= 2 * SUBLANES
    ]
    best = min(found, key=cost)
    return Grid(rows=best[0], columns=best[1], space=space)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
