"""Nearest-neighbour resizing as repetition.

torchax decomposes it into a gather with computed indices for every axis. Enlarging by a
whole factor is a broadcast, and is written as one here.

Legend: N batch, C channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.mesh.pictures import picture_of
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.ported_module import on_devices


def nearest_resize(
    input: jax.Array,
    output_size: Sequence[int] | None,
    *scales: float | Sequence[float] | None,
    by_matrix: bool = False,
    exact: bool = False,
) -> jax.Array:
    """``aten.upsample_nearest{1,2,3}d`` of [N, C, *sizes].

    Args:
        output_size: the new sizes; ``None`` to go by ``scales``.
        scales: of each axis, or one sequence of them, or ``None``.
        by_matrix: enlarge the last two axes by a product with a matrix; exact if all
            elements are finite.
        exact: ``aten._upsample_nearest_exact{1,2,3}d``.

    Returns:
        [N, C, *output_size], in the dtype of ``input``. Element i of an axis is element
        floor(i * step) of the input, floor((i + 0.5) * step) with ``exact``, with
        step = 1 / scale where a scale is given and in / out otherwise. Source:
        ATen/native/UpSample.h, ``compute_scales_value`` and
        ``nearest_neighbor(_exact)_compute_source_index``.
    """
    output_size, factors = _sizes(input, output_size, *scales)
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
            place = np.arange(size, dtype=np.float32) + np.float32(exact / 2)
            source = np.floor(place * step).astype(np.int32)
            out = jnp.take(out, np.minimum(source, old - 1), axis=axis)
        elif count > 1:
            out = _repeat(out, count, axis)
    if alone < len(counts):
        out = _repeat_by_matrix(out, rows or 1, columns)
    return out


def _sizes(
    input: jax.Array,
    output_size: Sequence[int] | None,
    *scales: float | Sequence[float] | None,
) -> tuple[Sequence[int], list[float | None]]:
    """The new sizes of the axes, and the scales that were given."""
    factors: list[float | None] = [None] * (input.ndim - 2)
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        factors = [float(s) for s in scales[0]]
    elif scales:
        factors = [None if s is None else float(s) for s in scales]  # type: ignore[arg-type]
    if output_size is None:
        output_size = [
            math.floor(n * (f or 1.0))
            for n, f in zip(input.shape[2:], factors, strict=True)
        ]
    return output_size, factors


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

    Exact for finite elements: of the terms of each sum one is not zero. A float32 is
    the sum of three bfloat16, which the matrix unit multiplies in one pass each. On a
    TPU the elements of a picture's row lie in different rows of a tile; to move them
    there one by one takes twenty times as long. The copies of a row come from the same
    product, one after the other: as a broadcast they are read and written once more.
    """
    *outer, height, width = x.shape
    parts = [x]
    if x.dtype == jnp.float32:
        high = jax.lax.reduce_precision(x, 8, 7)
        middle = jax.lax.reduce_precision(x - high, 8, 7)
        parts = [
            part.astype(jnp.bfloat16) for part in (high, middle, x - high - middle)
        ]
    copies = jnp.repeat(jnp.eye(width, dtype=parts[0].dtype), columns, axis=1)
    copies = jnp.tile(copies, (len(parts), rows))
    wide = jnp.concatenate(parts, -1)
    out = jnp.einsum("...x,xz->...z", wide, copies, preferred_element_type=x.dtype)
    return out.reshape(*outer, height * rows, width * columns)


def _make(context: OpContext, exact: bool) -> Callable[..., jax.Array]:
    by_matrix = context.platform == "tpu"
    resize = functools.partial(nearest_resize, by_matrix=by_matrix, exact=exact)

    def on_parts(
        input: jax.Array,
        output_size: Sequence[int] | None,
        *scales: float | Sequence[float] | None,
    ) -> jax.Array:
        if context.space is not None and input.ndim >= 4:
            out = resize(input, output_size, *scales)
            dims = (input.ndim - 2, input.ndim - 1)
            return marked(Mark(name="a resize", dims=dims, given=dims), out, input)
        picture = picture_of(context.mesh, *input.shape[-2:])
        whole = _sizes(input, output_size, *scales)[0]
        if (
            picture is None
            or input.ndim < 4
            or any(b % a for a, b in zip(input.shape[2:], whole, strict=True))
        ):
            return resize(input, output_size, *scales)

        def on_part(x: jax.Array) -> jax.Array:
            sides = zip(input.shape[2:], whole, x.shape[2:], strict=True)
            return resize(x, [each * (new // old) for old, new, each in sides])

        axes = picture.axes(input.ndim)
        return on_devices(picture.mesh, on_part, (input,), (axes,), axes)

    return on_parts


def _override(kind: str, *, exact: bool) -> OpOverride:
    return OpOverride(
        targets=tuple(f"torch.ops.aten.{kind}{axes}d" for axes in (1, 2, 3)),
        make=lambda context: _make(context, exact),
        owner="tpuport.patches.resize",
        reason="nearest-neighbour resizing as a broadcast instead of gathers",
    )


NEAREST_RESIZE = _override("upsample_nearest", exact=False)
"""For any model that upsamples by ``interpolate(..., mode="nearest")``."""
NEAREST_EXACT_RESIZE = _override("_upsample_nearest_exact", exact=True)
"""The same for ``mode="nearest-exact"``."""
