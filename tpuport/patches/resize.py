"""Nearest-neighbour resizing as repetition.

torchax decomposes it into a gather with computed indices for every axis. Enlarging by a
whole factor is a broadcast, and is written as one here.

Legend: N batch, C channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.core.tracing.op_overrides import OpOverride


def nearest_resize(
    input: jax.Array,
    output_size: Sequence[int] | None,
    *scales: float | Sequence[float] | None,
    by_matrix: bool = False,
) -> jax.Array:
    """``aten.upsample_nearest{1,2,3}d`` of [N, C, *sizes].

    Args:
        output_size: the new sizes; ``None`` to go by ``scales``.
        scales: of each axis, or one sequence of them, or ``None``.
        by_matrix: enlarge the last two axes by a product with a matrix; exact if all
            elements are finite.

    Returns:
        [N, C, *output_size], in the dtype of ``input``. Element i of an axis is element
        floor(i * step) of the input, with step = 1 / scale where a scale is given and
        in / out otherwise. Source: ATen/native/UpSample.h,
        ``compute_scales_value`` and ``nearest_neighbor_compute_source_index``.
    """
    axes = input.ndim - 2
    factors: list[float | None] = [None] * axes
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        factors = [float(s) for s in scales[0]]
    elif scales:
        factors = [None if s is None else float(s) for s in scales]  # type: ignore[arg-type]
    if output_size is None:
        output_size = [
            math.floor(n * (f or 1.0))
            for n, f in zip(input.shape[2:], factors, strict=True)
        ]
    counts = [
        new // old if new % old == 0 and factor in (None, new / old) else None
        for old, new, factor in zip(input.shape[2:], output_size, factors, strict=True)
    ]
    columns = counts[-1] or 1
    rows = counts[-2] if len(counts) > 1 else None
    alone = len(counts)
    if by_matrix and columns > 1:
        alone -= 1 if rows is None else 2
    out = input
    # The last axis first, while there is least of the others.
    for index in reversed(range(alone)):
        axis, count, factor = index + 2, counts[index], factors[index]
        if count is None:
            old, size = input.shape[axis], output_size[index]
            step = np.float32(1.0 / factor) if factor else np.float32(old) / size
            source = np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int32)
            out = jnp.take(out, np.minimum(source, old - 1), axis=axis)
        elif count > 1:
            out = _repeat(out, count, axis)
    if alone < len(counts):
        out = _repeat_by_matrix(out, rows or 1, columns)
    return out


def _repeat(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Every element of an axis ``count`` times, as one broadcast."""
    wide = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1),
        (*x.shape[: axis + 1], count, *x.shape[axis + 1 :]),
    )
    return wide.reshape(*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])


def _repeat_by_matrix(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Every element ``columns`` times along the last axis, ``rows`` along the one
    before it, as a product with zeros and ones.

    Exact for finite elements: of the terms of each sum one is not zero. On a TPU the
    elements of a picture's row lie in different rows of a tile; to move them there one
    by one takes twenty times as long. The copies of a row come from the same product,
    one after the other: as a broadcast they are read and written once more.
    """
    *outer, height, width = x.shape
    copies = jnp.repeat(jnp.eye(width, dtype=x.dtype), columns, axis=1)
    copies = jnp.tile(copies, (1, rows))
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum("...x,xz->...z", x, copies, precision=exact)
    return out.reshape(*outer, height * rows, width * columns)


NEAREST_RESIZE = OpOverride(
    targets=(
        "torch.ops.aten.upsample_nearest1d",
        "torch.ops.aten.upsample_nearest2d",
        "torch.ops.aten.upsample_nearest3d",
    ),
    make=lambda context: functools.partial(
        nearest_resize, by_matrix=context.platform == "tpu"
    ),
    owner="tpuport.patches.resize",
    reason="nearest-neighbour resizing as a broadcast instead of gathers",
)
"""For any model that upsamples by ``interpolate(..., mode="nearest")``."""
