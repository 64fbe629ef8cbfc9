"""Nearest-neighbour resizing as repetition.

torchax decomposes it into a gather with computed indices for every axis. Enlarging by a
whole factor is a broadcast, and is written as one here.

Legend: N batch, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.core.ops import OpContext, OpOverride

if TYPE_CHECKING:
    import jax


def nearest_resize(
    input: jax.Array,
    output_size: Sequence[int] | None,
    *scales: float | Sequence[float] | None,
) -> jax.Array:
    """``aten.upsample_nearest{1,2,3}d`` of [N, C, *sizes].

    Args:
        output_size: the new sizes; ``None`` to go by ``scales``.
        scales: of each axis, or one sequence of them, or ``None``.

    Returns:
        [N, C, *output_size], in the dtype of ``input``. Element i of an axis is element
        floor(i * step) of the input, with step = 1 / scale where a scale is given and
        in / out otherwise. Source: ATen/native/UpSample.h,
        ``compute_scales_value`` and ``nearest_neighbor_compute_source_index``.
    """
    import jax.numpy as jnp
    import numpy as np

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
    out = input
    for axis, (size, factor) in enumerate(
        zip(output_size, factors, strict=True), start=2
    ):
        old = input.shape[axis]
        if size == old and factor in (None, 1.0):
            continue
        if size % old == 0 and factor in (None, size / old):
            out = _repeat(out, size // old, axis)
            continue
        step = np.float32(1.0 / factor) if factor else np.float32(old) / size
        source = np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int32)
        out = jnp.take(out, np.minimum(source, old - 1), axis=axis)
    return out


def _repeat(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Every element of an axis ``count`` times, as one broadcast."""
    import jax.numpy as jnp

    wide = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1),
        (*x.shape[: axis + 1], count, *x.shape[axis + 1 :]),
    )
    return wide.reshape(*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])


def _make(context: OpContext) -> Callable[..., Any]:
    return nearest_resize


NEAREST_RESIZE = OpOverride(
    targets=(
        "torch.ops.aten.upsample_nearest1d",
        "torch.ops.aten.upsample_nearest2d",
        "torch.ops.aten.upsample_nearest3d",
    ),
    make=_make,
    owner="tpuport.patches.resize",
    reason="nearest-neighbour resizing as a broadcast instead of gathers",
)
"""For any model that upsamples by ``interpolate(..., mode="nearest")``."""
