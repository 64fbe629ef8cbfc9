"""Pairs of neighbours taken apart and put together, as rotary embeddings do.

Elements 2i and 2i + 1 lie in neighbouring lanes of a vector register, and a TPU moves
lanes slowly. A product with zeros and ones moves them on the MXU instead, and is exact:
each result is one element times one.

Legend: N pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride

#: Pairs, at most: beyond it the product costs more than it saves.
MOST = 256


def taken_apart(pairs: jax.Array) -> list[jax.Array]:
    """The first and the second elements of [..., N, 2], each [..., N]."""
    flat = pairs.reshape(*pairs.shape[:-2], -1)
    return [_product(flat, _chooser(pairs.shape[-2], place)) for place in (0, 1)]


def put_together(parts: Sequence[jax.Array]) -> jax.Array:
    """[..., N, 2] of the first and the second elements, each [..., N]."""
    first, second = parts
    size = first.shape[-1]
    flat = _product(first, _chooser(size, 0).T) + _product(second, _chooser(size, 1).T)
    return flat.reshape(*first.shape, 2)


def on_lanes(platform: str, shape: Sequence[int], dtype: Any) -> bool:
    """Whether pairs [..., N, 2] are better moved by a product."""
    few = len(shape) > 2 and 1 < shape[-2] <= MOST and shape[-1] == 2
    return platform == "tpu" and few and bool(jnp.issubdtype(dtype, jnp.floating))


def _product(x: jax.Array, chooser: np.ndarray) -> jax.Array:
    out: jax.Array = jnp.einsum(
        "...i,ij->...j",
        x,
        chooser.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    return out


def _chooser(size: int, place: int) -> np.ndarray:
    """[2 N, N]: a one at (2 i + place, i)."""
    chosen = np.zeros((2 * size, size), np.float32)
    chosen[np.arange(size) * 2 + place, np.arange(size)] = 1
    return chosen


def _unbind(context: OpContext) -> Callable[..., Any]:
    def unbind(self: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
        last = dim in (-1, self.ndim - 1)
        if last and on_lanes(context.platform, self.shape, self.dtype):
            return tuple(taken_apart(self))
        return tuple(
            jax.lax.index_in_dim(self, place, dim, keepdims=False)
            for place in range(self.shape[dim])
        )

    return unbind


def _stack(context: OpContext) -> Callable[..., Any]:
    def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
        first = tensors[0]
        last = dim in (-1, first.ndim)
        alike = len({(x.shape, x.dtype) for x in tensors}) == 1
        shape = (*first.shape, len(tensors))
        if last and alike and on_lanes(context.platform, shape, first.dtype):
            return put_together(tensors)
        return jnp.stack(tensors, axis=dim)

    return stack


PAIRS = (
    OpOverride(
        targets=("torch.Tensor.unbind", "torch.unbind"),
        make=_unbind,
        owner="tpuport.patches.pairs",
        reason="a TPU moves neighbouring lanes slowly, and by a product at once",
    ),
    OpOverride(
        targets=("torch.stack",),
        make=_stack,
        owner="tpuport.patches.pairs",
        reason="a TPU moves neighbouring lanes slowly, and by a product at once",
    ),
)
"""For any model with rotary embeddings on pairs of neighbours."""
