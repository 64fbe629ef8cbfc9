"""The outermost columns of a video, as arrays of their own.

Neighbours that share a picture send them to each other before a convolution. One column
of rows of tiles is a strided read, which XLA does by turning the whole video around in
memory first; here a step reads the tiles at the border of one frame, and nothing else.

Legend: as in :mod:`tpuport.kernels.convolution.conv`; L frames before the video.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from tpuport.kernels.convolution.conv_kernel import LANES, TILE_ROWS
from tpuport.kernels.padding import pad_dim


def outer_columns(
    x: Shaped[Array, "n t y x c"],
    before: Shaped[Array, "n l y x c"] | None,
    *,
    vmem_limit: int,
    interpret: bool = False,
) -> tuple[Shaped[Array, "n lt y2 c"], Shaped[Array, "n lt y2 c"]]:
    """The first and the last column, with a row of zeros above and below.

    Args:
        x: [N, T, Y, X, C], of 16 or 32 bits.
        before: [N, L, Y, X, C], the frames before it, or ``None`` for none.
        vmem_limit, interpret: as of the convolution.

    Returns:
        both as [N, L + T, Y + 2, C] in the dtype of ``x``.

    Raises:
        NotImplementedError: C is no multiple of 128, another dtype, or more VMEM than
            there is.
    """
    count, frames, rows, columns, channels = x.shape
    itemsize = x.dtype.itemsize
    if channels % LANES:
        raise NotImplementedError(f"{channels} channels")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"elements of {x.dtype}")
    lag = 0 if before is None else before.shape[1]
    # Words of 16 bits lie in pairs: a lone column would have no other.
    wide = TILE_ROWS
    videos = [x] if before is None else [x, before]
    needed = rows * LANES * (4 * len(videos) * wide * itemsize + 4 * itemsize + 4)
    if needed > vmem_limit:
        raise NotImplementedError(f"{needed:,} bytes of VMEM; there are {vmem_limit:,}")
    if columns < wide:
        videos = [pad_dim(video, 3, wide) for video in videos]
    last = (columns - 1) // wide
    tile = (1, 1, rows, wide, LANES)

    def border(at: int, late: bool) -> pl.BlockSpec:
        def index(n: Any, t: Any, c: Any) -> tuple[Any, ...]:
            time = jnp.maximum(t - lag, 0) if late else jnp.minimum(t, lag - 1)
            return (n, time, 0, at, c)

        return pl.BlockSpec(tile, index)

    made = (count, frames + lag, rows + 2, channels)
    side = pl.BlockSpec((1, 1, made[2], LANES), lambda n, t, c: (n, t, 0, c))
    body = functools.partial(_body, lag=lag, last=(columns - 1) % wide)
    first, final = pl.pallas_call(
        body,
        grid=(*made[:2], channels // LANES),
        in_specs=[
            border(at, late)
            for late, _ in zip((True, False), videos, strict=False)
            for at in (0, last)
        ],
        out_specs=[side, side],
        out_shape=[jax.ShapeDtypeStruct(made, x.dtype)] * 2,
        scratch_shapes=[pltpu.VMEM((made[2], LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3,
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=made[0] * made[1] * channels * rows * itemsize * 2 * wide,
        ),
        interpret=interpret,
        name="tpuport_sides",
    )(*(video for video in videos for _ in range(2)))
    return first, final


def _body(*refs: Any, lag: int, last: int) -> None:
    """One frame: of ``x``, or of those before it."""
    *inputs, first_ref, final_ref, lines_ref = refs
    t = pl.program_id(1)
    rows = lines_ref.shape[0] - 2

    def write(refs: list[Any]) -> None:
        for ref, at, out_ref in zip(
            refs, (0, last), (first_ref, final_ref), strict=True
        ):
            lines_ref[0:1] = jnp.zeros_like(lines_ref[0:1])
            lines_ref[rows + 1 :] = jnp.zeros_like(lines_ref[0:1])
            lines_ref[1 : rows + 1] = _column(ref, at)
            out_ref[0, 0] = lines_ref[...].astype(out_ref.dtype)

    if not lag:
        write(inputs)
        return
    pl.when(t >= lag)(lambda: write(inputs[:2]))
    pl.when(t < lag)(lambda: write(inputs[2:]))


def _column(ref: Any, at: int) -> jax.Array:
    """Column ``at`` of [1, 1, Y, W, lanes]: [Y, lanes] in float32."""
    _, _, rows, wide, channels = ref.shape
    flat = ref.at[0, 0].reshape(rows * wide, channels)
    if ref.dtype.itemsize == 4:
        whole: jax.Array = flat[pl.ds(at, rows, stride=wide)]
        return whole.astype(jnp.float32)
    # A word holds two columns, the lower one first.
    words = flat.bitcast(jnp.uint32)[pl.ds(at // 2, rows, stride=wide // 2)]
    high = words & jnp.uint32(0xFFFF0000) if at % 2 else words << 16
    return jax.lax.bitcast_convert_type(high, jnp.float32)
