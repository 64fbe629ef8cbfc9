"""Convolution of video for TPU: 3 x 3 over rows and columns, and 1 or 3 frames.

XLA's own takes 8 to 40 seconds to compile for each shape and several times the cycles
that the matrix unit needs. Here a block of rows stays in VMEM while all taps of one
frame are applied: rows have a pitch of whole tiles, so that a tap of another row is an
aligned slice, and the two taps beside the middle one are two shifted copies, made once.
Frames come one after the other; each adds to the outputs of its own time and of the two
after it, which wait in VMEM, so that every frame is read once.

Legend: N batch, T frames, Y rows, X columns, P pitch (columns with padding), C input
channels, O output channels, K frames of the kernel (1 or 3).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.padding import ceil_div, pad_dim, round_up

if TYPE_CHECKING:
    from collections.abc import Callable

#: Rows of a tile, of any dtype up to 32 bits.
TILE_ROWS = 16
#: Channels of a tile.
LANES = 128
#: Outputs of a step: enough to hide what a step costs besides its products, few enough
#: for the compiler to be quick.
STEP_ROWS = 1536
#: Input channels, and output channels, that fill a matrix unit of 256 x 256.
FULL = 256
#: What the compiler may take besides the kernel's own buffers.
MARGIN_BYTES = 16 * 2**20


def pitch_of(columns: int) -> int:
    """Columns of the padded input for ``columns`` of output."""
    return round_up(columns + 2, TILE_ROWS)


def block_rows(rows: int, pitch: int) -> int:
    """Rows of output in a step.

    Blocks that divide the rows need no padding, which is a copy of the input; where
    there are none of at least half the size, blocks of nearly the same size.
    """
    most = min(max(STEP_ROWS // pitch, 1), rows)
    whole = max(n for n in range(1, most + 1) if rows % n == 0)
    return whole if 2 * whole >= most else ceil_div(rows, ceil_div(rows, most))


def vmem_bytes(
    rows: int, columns: int, channels: int, outputs: int, taps: int, itemsize: int
) -> int:
    """What the kernel's buffers take of VMEM, blocks and weights twice."""
    channels, outputs = round_up(channels, LANES), round_up(outputs, LANES)
    pitch = pitch_of(columns)
    block = block_rows(rows, pitch)
    read = (block + 2) * pitch * channels * itemsize
    made = block * pitch * outputs
    weights = 9 * channels * taps * outputs * itemsize
    return 2 * (weights + read + made * itemsize) + 3 * read + 2 * made * 4


def video_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    columns: int,
    *,
    vmem_limit: int,
    interpret: bool = False,
) -> jax.Array:
    """Convolve a padded video.

    Args:
        x: [N, T + K - 1, Y + 2, P, C], with P = ``pitch_of(columns)``: what lies before
            the first frame, around the rows and around the columns is part of it. The
            columns past ``columns + 2`` must be finite.
        weight: [K, 3, 3, C, O] of the dtype of ``x``.
        bias: [O], or ``None``.
        columns: X.
        vmem_limit: bytes of VMEM that the kernel may take.
        interpret: run on the CPU, for tests.

    Returns:
        [N, T, Y, X, O] in the dtype of ``x``: products summed in float32 and rounded
        once, after the bias.

    Raises:
        ValueError: the shapes do not fit together.
        NotImplementedError: another kernel size, or more VMEM than there is.
    """
    count, frames_in, rows, pitch, channels = x.shape
    taps, *sides, _, outputs = weight.shape
    frames, rows = frames_in - taps + 1, rows - 2
    if taps not in (1, 3) or sides != [3, 3]:
        raise NotImplementedError(f"a kernel of {(taps, *sides)}; 3x3x3 and 1x3x3 can")
    if pitch != pitch_of(columns) or weight.shape[3] != channels or frames < 1:
        raise ValueError(f"input {x.shape}, kernel {weight.shape}, {columns} columns")
    itemsize = x.dtype.itemsize
    needed = vmem_bytes(rows, columns, channels, outputs, taps, itemsize)
    if needed + MARGIN_BYTES > vmem_limit:
        raise NotImplementedError(f"{needed:,} bytes of VMEM; there are {vmem_limit:,}")
    if bias is None:
        bias = jnp.zeros(outputs, jnp.float32)
    block = block_rows(rows, pitch)
    blocks = ceil_div(rows, block)
    wide = round_up(outputs, LANES)
    x = pad_dim(pad_dim(x, 2, blocks * block + 2), 4, round_up(channels, LANES))
    weight = pad_dim(pad_dim(weight, 3, x.shape[4]), 4, wide)
    channels = x.shape[4]
    # The taps of a frame under each other, those of its three times side by side.
    weight = jnp.transpose(weight, (1, 2, 3, 0, 4)).reshape(9 * channels, taps * wide)
    body = functools.partial(
        _body,
        frames=frames,
        taps=taps,
        pitch=pitch,
        block=block,
        columns=columns,
        outputs=wide,
    )
    lag = taps - 1
    window = tuple(map(pl.Element, (1, 1, block + 2, pitch, channels)))
    out = pl.pallas_call(
        body,
        grid=(count, blocks, frames_in),
        in_specs=[
            pl.BlockSpec(window, lambda n, y, t: (n, t, y * block, 0, 0)),
            pl.BlockSpec(weight.shape, lambda n, y, t: (0, 0)),
            pl.BlockSpec((1, wide), lambda n, y, t: (0, 0)),
        ],
        # Nothing is written before the first frame is whole.
        out_specs=pl.BlockSpec(
            (1, 1, block, columns, wide),
            lambda n, y, t: (n, jnp.maximum(t - lag, 0), y, 0, 0),
        ),
        out_shape=jax.ShapeDtypeStruct(
            (count, frames, blocks * block, columns, wide), x.dtype
        ),
        scratch_shapes=[
            pltpu.VMEM(((block + 2) * pitch, 3 * channels), x.dtype),
            pltpu.VMEM((2, block * pitch, wide), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * 9 * taps * count * frames * rows * columns * channels * outputs,
            transcendentals=0,
            bytes_accessed=(x.size + weight.size) * itemsize
            + count * frames * rows * columns * wide * itemsize,
        ),
        interpret=interpret,
        name="tpuport_conv",
    )(x, weight, pad_dim(bias.astype(jnp.float32)[None], 1, wide))
    return out[:, :, :rows, :, :outputs]


def edged_convolution(
    x: jax.Array,
    before: jax.Array | None,
    sides: jax.Array,
    ends: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    vmem_limit: int,
    interpret: bool = False,
) -> jax.Array:
    """Convolve a video whose surroundings come as arrays of their own.

    The same as :func:`video_convolution` of all put together, without the copy.

    Args:
        x: [N, T, Y, X, C]; X a multiple of 16.
        before: [N, K - 1, Y, X, C], the frames before it; ``None`` with K = 1.
        sides: [N, T + K - 1, Y + 2, 16, C], beside the rows and their surroundings: in
            column 0 what follows the last column, in column 15 what precedes the first.
            The others must be finite.
        ends: [N, T + K - 1, 2, X, C], the row above the first and the one below the
            last.
        weight, bias, vmem_limit, interpret: as for :func:`video_convolution`.

    Returns:
        [N, T, Y, X, O].

    Raises:
        ValueError, NotImplementedError: as :func:`video_convolution`; also X is no
            multiple of 16, or no block of rows divides Y.
    """
    count, frames, rows, columns, channels = x.shape
    taps, *kernel, _, outputs = weight.shape
    lag = taps - 1
    if taps not in (1, 3) or kernel != [3, 3]:
        raise NotImplementedError(f"a kernel of {(taps, *kernel)}; 3x3x3 and 1x3x3 can")
    if columns % TILE_ROWS or channels % LANES:
        raise NotImplementedError(f"{columns} columns of {channels} channels")
    pitch = pitch_of(columns)
    block = block_rows(rows, pitch)
    if rows % block:
        raise NotImplementedError(f"{rows} rows in blocks of {block}")
    shapes = {
        "before": (
            None if before is None else before.shape,
            (count, lag, *x.shape[2:]),
        ),
        "sides": (sides.shape, (count, frames + lag, rows + 2, TILE_ROWS, channels)),
        "ends": (ends.shape, (count, frames + lag, 2, columns, channels)),
    }
    for name, (found, wanted) in shapes.items():
        if found != wanted and not (name == "before" and not lag):
            raise ValueError(f"{name} of {found}; with {x.shape} it is {wanted}")
    itemsize = x.dtype.itemsize
    needed = vmem_bytes(rows, columns, channels, outputs, taps, itemsize)
    # The frames before, and the video put together.
    needed += 3 * (block + 2) * pitch * channels * itemsize
    if needed + MARGIN_BYTES > vmem_limit:
        raise NotImplementedError(f"{needed:,} bytes of VMEM; there are {vmem_limit:,}")
    if bias is None:
        bias = jnp.zeros(outputs, jnp.float32)
    wide = round_up(outputs, LANES)
    weight = pad_dim(weight, 4, wide)
    weight = jnp.transpose(weight, (1, 2, 3, 0, 4)).reshape(9 * channels, taps * wide)
    body = functools.partial(
        _edged_body,
        frames=frames,
        taps=taps,
        pitch=pitch,
        block=block,
        blocks=rows // block,
        columns=columns,
        outputs=wide,
    )

    def rows_of(time: Callable[[Any], Any]) -> pl.BlockSpec:
        # One row more on either side, which at the ends is none of the array's.
        window = (
            pl.Element(1),
            pl.Element(1),
            pl.Element(block + 2, (1, 1)),
            pl.Element(columns),
            pl.Element(channels),
        )
        return pl.BlockSpec(window, lambda n, y, t: (n, time(t), y * block, 0, 0))

    beside = tuple(map(pl.Element, (1, 1, block + 2, TILE_ROWS, channels)))
    in_specs = [
        rows_of(lambda t: jnp.maximum(t - lag, 0)),
        pl.BlockSpec(beside, lambda n, y, t: (n, t, y * block, 0, 0)),
        pl.BlockSpec((1, 1, 2, columns, channels), lambda n, y, t: (n, t, 0, 0, 0)),
        pl.BlockSpec(weight.shape, lambda n, y, t: (0, 0)),
        pl.BlockSpec((1, wide), lambda n, y, t: (0, 0)),
    ]
    arguments = [x, sides, ends, weight]
    arguments.append(pad_dim(bias.astype(jnp.float32)[None], 1, wide))
    if before is not None:
        in_specs.append(rows_of(lambda t: jnp.minimum(t, lag - 1)))
        arguments.append(before)
    out = pl.pallas_call(
        body,
        grid=(count, rows // block, frames + lag),
        in_specs=in_specs,
        out_specs=pl.BlockSpec(
            (1, 1, block, columns, wide),
            lambda n, y, t: (n, jnp.maximum(t - lag, 0), y, 0, 0),
        ),
        out_shape=jax.ShapeDtypeStruct((count, frames, rows, columns, wide), x.dtype),
        scratch_shapes=[
            pltpu.VMEM(((block + 2) * pitch, 3 * channels), x.dtype),
            pltpu.VMEM((2, block * pitch, wide), jnp.float32),
            pltpu.VMEM((block + 2, pitch, channels), x.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * 9 * taps * x.size * outputs,
            transcendentals=0,
            bytes_accessed=(2 * x.size + weight.size) * itemsize,
        ),
        interpret=interpret,
        name="tpuport_conv",
    )(*arguments)
    return out[..., :outputs]


def _edged_body(
    x_ref: Any,
    sides_ref: Any,
    ends_ref: Any,
    weight_ref: Any,
    bias_ref: Any,
    *refs: Any,
    frames: int,
    taps: int,
    pitch: int,
    block: int,
    blocks: int,
    columns: int,
    outputs: int,
) -> None:
    """One frame of one block of rows, put together from its parts."""
    *before, out_ref, taps_ref, sums_ref, whole_ref = refs
    y, t = pl.program_id(1), pl.program_id(2)
    lag = taps - 1
    if before:
        # Held by a name, as decorators are called at once.
        early: Callable[[Any], Any] = pl.when(t < lag)
        late: Callable[[Any], Any] = pl.when(t >= lag)

        @early
        def _() -> None:
            whole_ref[:, :columns] = before[0][0, 0]

        @late
        def _() -> None:
            whole_ref[:, :columns] = x_ref[0, 0]
    else:
        whole_ref[:, :columns] = x_ref[0, 0]
    first: Callable[[Any], Any] = pl.when(y == 0)
    last: Callable[[Any], Any] = pl.when(y == blocks - 1)

    @first
    def _() -> None:
        whole_ref[0, :columns] = ends_ref[0, 0, 0]

    @last
    def _() -> None:
        whole_ref[block + 1, :columns] = ends_ref[0, 0, 1]

    whole_ref[:, pitch - TILE_ROWS :] = sides_ref[0, 0]
    channels = x_ref.shape[-1]
    flat = whole_ref[...].reshape((block + 2) * pitch, channels)
    # What precedes a row's first column is in the last one of the row before.
    taps_ref[:, :channels] = _shifted(flat, -1)
    taps_ref[:, channels : 2 * channels] = flat
    taps_ref[:, 2 * channels :] = _shifted(flat, 1)
    _accumulate(
        weight_ref,
        bias_ref,
        out_ref,
        taps_ref,
        sums_ref,
        frames=frames,
        taps=taps,
        pitch=pitch,
        block=block,
        columns=columns,
        channels=channels,
        outputs=outputs,
    )


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """The rows of [M, C] moved up by 1, 2 or -1, around the ends."""
    if x.dtype.itemsize == 4:
        return pltpu.roll(x, -by % x.shape[0], 0)
    # A word holds two rows, the lower one first.
    words = pltpu.bitcast(x, jnp.uint32)
    if by == -1:
        preceding = pltpu.roll(words, 1, 0)
        return pltpu.bitcast((words << 16) | (preceding >> 16), x.dtype)
    following = pltpu.roll(words, words.shape[0] - 1, 0)
    if by == 1:
        following = (words >> 16) | (following << 16)
    return pltpu.bitcast(following, x.dtype)


def _body(
    x_ref: Any,
    weight_ref: Any,
    bias_ref: Any,
    out_ref: Any,
    taps_ref: Any,
    sums_ref: Any,
    *,
    frames: int,
    taps: int,
    pitch: int,
    block: int,
    columns: int,
    outputs: int,
) -> None:
    """One frame of one block of rows."""
    channels = x_ref.shape[-1]
    x = x_ref[0, 0].reshape((block + 2) * pitch, channels)
    taps_ref[:, :channels] = x
    taps_ref[:, channels : 2 * channels] = _shifted(x, 1)
    taps_ref[:, 2 * channels :] = _shifted(x, 2)
    _accumulate(
        weight_ref,
        bias_ref,
        out_ref,
        taps_ref,
        sums_ref,
        frames=frames,
        taps=taps,
        pitch=pitch,
        block=block,
        columns=columns,
        channels=channels,
        outputs=outputs,
    )


def _accumulate(
    weight_ref: Any,
    bias_ref: Any,
    out_ref: Any,
    taps_ref: Any,
    sums_ref: Any,
    *,
    frames: int,
    taps: int,
    pitch: int,
    block: int,
    columns: int,
    channels: int,
    outputs: int,
) -> None:
    """Add what the taps of a frame give to its time and to the two after it."""
    t = pl.program_id(2)
    count = block * pitch
    exact = jax.lax.Precision.HIGHEST if taps_ref.dtype == jnp.float32 else None
    dot = functools.partial(
        jnp.dot, preferred_element_type=jnp.float32, precision=exact
    )

    def row(dy: int) -> jax.Array:
        found: jax.Array = taps_ref[dy * pitch : dy * pitch + count]
        return found

    def products(first: int, times: int) -> jax.Array:
        """What this frame gives to the outputs of ``times`` times."""
        columns = slice(first * outputs, (first + times) * outputs)
        if channels % FULL:
            # Narrow taps side by side fill the matrix unit.
            side_by_side = jnp.concatenate([row(dy) for dy in range(3)], 1)
            return dot(side_by_side, weight_ref[:, columns])
        rows = [slice(dy * 3 * channels, (dy + 1) * 3 * channels) for dy in range(3)]
        parts = [dot(row(dy), weight_ref[rows[dy], columns]) for dy in range(3)]
        return parts[0] + parts[1] + parts[2]

    def finish(total: jax.Array) -> None:
        out = (total + bias_ref[0][None]).reshape(block, pitch, outputs)
        out_ref[0, 0] = out[:, :columns].astype(out_ref.dtype)

    if taps == 1:
        finish(products(0, 1))
        return

    when: Callable[[Any], Any] = pl.when

    @when(t >= 2)
    def _() -> None:
        finish(sums_ref[1] + products(2, 1))

    if outputs < FULL:
        # Two times side by side fill the matrix unit.
        @when(t <= frames)
        def _() -> None:
            both = products(0, 2)
            sums_ref[1] = sums_ref[0] + both[:, outputs:]
            sums_ref[0] = both[:, :outputs]

        return

    @when((t >= 1) & (t <= frames))
    def _() -> None:
        sums_ref[1] = sums_ref[0] + products(1, 1)

    @when(t < frames)
    def _() -> None:
        sums_ref[0] = products(0, 1)
