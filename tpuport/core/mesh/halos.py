"""What devices that share a picture send each other along one of its sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import jax


Border = Literal["zeros", "edge"]
"""What lies beyond the picture: zeros, or its outermost row or column again."""


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
        raise ValueError(
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
    place = jax.lax.axis_index(side.axis)
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
        import jax

        return jax.lax.axis_index(self.axis) * n

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
