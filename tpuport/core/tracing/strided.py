"""Views as torch describes them, by sizes, strides and an offset, on JAX arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

#: Says of a tensor that a write counts on the order of its elements in the memory.
ORDERED = "_tpuport_ordered"


def write_box(
    x: jax.Array, value: jax.Array, starts: Sequence[int], dim: int = 0
) -> jax.Array:
    """``x`` with the box that starts at ``starts`` replaced, by concatenation."""
    while dim < x.ndim and value.shape[dim] == x.shape[dim]:
        dim += 1
    if dim == x.ndim:
        return value
    start, stop = starts[dim], starts[dim] + value.shape[dim]
    before = jax.lax.slice_in_dim(x, 0, start, axis=dim)
    inside = jax.lax.slice_in_dim(x, start, stop, axis=dim)
    after = jax.lax.slice_in_dim(x, stop, x.shape[dim], axis=dim)
    parts = [before, write_box(inside, value, starts, dim + 1), after]
    return jnp.concatenate([p for p in parts if p.shape[dim]], axis=dim)


@dataclass(frozen=True, slots=True)
class _Box:
    """A view as a box: of the memory in dims ``whole``, ``sizes`` from ``starts``.

    ``dims`` are those of the view, in the order of the memory.
    """

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strided:
    """Where a view lies in the memory of an array in the order of its dims.

    Attributes:
        size: shape of the view.
        stride: elements from one place to the next, along each dim.
        offset: elements before the first one.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """Of a tensor of torch, which may be on the meta device."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def read(self, whole: jax.Array) -> jax.Array:
        """The view of an array of any shape."""
        if 0 in self.size:
            return jnp.zeros(self.size, whole.dtype)
        box = self._box(whole.size)
        if box is None:
            return whole.reshape(-1)[jnp.asarray(self._places())]
        stops = [start + n for start, n in zip(box.starts, box.sizes, strict=True)]
        cut = jax.lax.slice(whole.reshape(box.whole), box.starts, stops)
        order = np.argsort(box.dims)
        turned = cut.reshape([self.size[d] for d in box.dims]).transpose(order)
        shown = [n if d in box.dims else 1 for d, n in enumerate(self.size)]
        return jnp.broadcast_to(turned.reshape(shown), self.size)

    def written(self, whole: jax.Array, value: jax.Array) -> jax.Array | None:
        """``whole`` once ``value`` is written to the view.

        Args:
            value: has the shape of the view.

        Returns:
            ``None`` if the view shows an element twice.
        """
        if 0 in self.size:
            return whole
        value = value.astype(whole.dtype)
        box = self._box(whole.size)
        if box is None:
            places = self._places().reshape(-1)
            if np.unique(places).size < places.size:
                return None
            flat = whole.reshape(-1).at[jnp.asarray(places)]
            return flat.set(value.reshape(-1)).reshape(whole.shape)
        if math.prod(box.sizes) < math.prod(self.size):
            return None
        small = value.reshape([self.size[d] for d in sorted(box.dims)])
        turned = small.transpose([sorted(box.dims).index(d) for d in box.dims])
        apart = whole.reshape(box.whole)
        return write_box(apart, turned.reshape(box.sizes), box.starts).reshape(
            whole.shape
        )

    def apart(self, other: Strided, count: int) -> bool:
        """Whether two views of ``count`` elements surely have none in common."""
        one, two = self._box(count), other._box(count)
        if one is None or two is None or one.whole != two.whole:
            return False
        ranges = zip(one.starts, one.sizes, two.starts, two.sizes, strict=True)
        return any(a + n <= b or b + m <= a for a, n, b, m in ranges)

    def _box(self, count: int) -> _Box | None:
        """The view as a box of ``count`` elements; ``None`` if it is none."""
        shown = [d for d, n in enumerate(self.size) if n != 1 and self.stride[d]]
        dims = sorted(shown, key=lambda d: -self.stride[d])
        whole, starts, sizes = [], [], []
        left, rest = count, self.offset
        for dim in (*dims, None):
            step = 1 if dim is None else self.stride[dim]
            if left % step:
                return None
            whole.append(left // step)
            starts.append(rest // step)
            sizes.append(1 if dim is None else self.size[dim])
            left, rest = step, rest % step
        if any(a + n > w for a, n, w in zip(starts, sizes, whole, strict=True)):
            return None
        return _Box(tuple(whole), tuple(starts), tuple(sizes), tuple(dims))

    def _places(self) -> np.ndarray[Any, Any]:
        """The place in the memory of each element of the view."""
        places = np.full(self.size, self.offset)
        for dim, (n, step) in enumerate(zip(self.size, self.stride, strict=True)):
            shape: Sequence[int] = [-1 if d == dim else 1 for d in range(places.ndim)]
            places += (np.arange(n) * step).reshape(shape)
        return places
