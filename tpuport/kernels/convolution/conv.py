"""Convolution of video for TPU: 3 x 3 over rows and columns, and 1 or 3 frames.

XLA's convolution takes 8 to 40 seconds to compile for each shape and several times the
cycles that the matrix unit needs. Here a block of rows stays in VMEM while all taps of
one frame are applied. Rows have a pitch of whole tiles, so a tap of another row is an
aligned slice. The two taps beside the middle tap are two shifted copies, made once. A
frame adds to the outputs of its own time and of the next two, which wait in VMEM: every
frame is read once. If VMEM does not hold the weights of all output channels, channels
are made part after part.

Legend: N batch, T frames, Y rows, X columns, P pitch (columns with padding), C input
channels, O output channels, K frames of the kernel (1 or 3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from tpuport.kernels.convolution.conv_kernel import (
    FULL,
    GROUP,
    LANES,
    PLANES,
    TILE_ROWS,
    Case,
    edged_body,
    first_row,
    padded_body,
    pitch_of,
    whole_rows,
)
from tpuport.kernels.padding import ceil_div, pad_dim, round_up
from tpuport.kernels.phantoms import Real, told

#: Products of a step with one tap: enough to hide what a step costs besides, few enough
#: for the compiler to be quick.
STEP_PRODUCTS = 1536 * 128 * 128
#: What the compiler may take besides the kernel's own buffers.
MARGIN_BYTES = 16 * 2**20


def block_rows(rows: int, pitch: int, channels: int) -> int:
    """Rows of output in a step.

    Blocks that divide the rows need no padding, which is a copy of the input; where
    there are none of at least half the size, blocks of nearly the same size.
    """
    width = min(round_up(channels, LANES), FULL)
    most = min(max(STEP_PRODUCTS // (LANES * width) // pitch, 1), rows)
    whole = max(n for n in range(1, most + 1) if rows % n == 0)
    return whole if 2 * whole >= most else ceil_div(rows, ceil_div(rows, most))


def vmem_bytes(
    rows: int, columns: int, channels: int, outputs: int, taps: int, itemsize: int
) -> int:
    """What the kernel's buffers take of VMEM at most, blocks and weights twice."""
    channels, outputs = round_up(channels, LANES), round_up(outputs, LANES)
    pitch = pitch_of(columns)
    block = block_rows(rows, pitch, channels)
    read = (block + 2) * pitch * channels * itemsize
    made = block * pitch * outputs
    weights = 9 * channels * taps * outputs * itemsize
    sides = 2 * round_up(rows + 2, TILE_ROWS) * channels * 4
    # The frame, those before, the taps, the residual, the sums of three times.
    given = weights + 2 * read + 2 * made * itemsize + sides
    return 2 * given + 4 * read + 3 * made * 4


def output_parts(
    rows: int,
    columns: int,
    channels: int,
    outputs: int,
    taps: int,
    itemsize: int,
    vmem_limit: int,
) -> int:
    """In how many parts output channels are made: as few as VMEM has room for."""
    outputs = round_up(outputs, LANES)
    tiles = outputs // (FULL if outputs % FULL == 0 else LANES)
    needed = 0
    for parts in (n for n in range(1, tiles + 1) if tiles % n == 0):
        each = outputs // parts
        needed = vmem_bytes(rows, columns, channels, each, taps, itemsize)
        if needed + MARGIN_BYTES <= vmem_limit:
            return parts
    raise NotImplementedError(f"{needed:,} bytes of VMEM; there are {vmem_limit:,}")


def video_convolution(
    x: Float[Array, "n _ _ p c"],
    weight: Float[Array, "k _ _ _ o"],
    bias: Float[Array, " o"] | None,
    columns: int,
    *,
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "n t y x o"]:
    """Convolve a padded video.

    Args:
        x: [N, T + K - 1, Y + 2, P, C], with P = ``pitch_of(columns)``: what lies before
            the first frame, around the rows and around the columns is part of it. The
            columns past ``columns + 2`` must be finite.
        weight: [K, 3, 3, C, O] of the dtype of ``x``; ``bias`` [O], or ``None``.
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
    taps, *_, outputs = weight.shape
    rows -= 2
    case = Case(
        count=count,
        frames=frames_in - taps + 1,
        rows=rows,
        columns=columns,
        channels=round_up(channels, LANES),
        outputs=round_up(outputs, LANES),
        taps=taps,
        block=block_rows(rows, pitch, channels),
        parts=_parts(rows, columns, weight, x.dtype.itemsize, vmem_limit),
        packed=taps == 3 and outputs <= GROUP,
    )
    if pitch != case.pitch or weight.shape[3] != channels or case.frames < 1:
        raise ValueError(f"input {x.shape}, kernel {weight.shape}, {columns} columns")
    blocks = ceil_div(rows, case.block)
    x = pad_dim(pad_dim(x, 2, blocks * case.block + 2), 4, case.channels)
    window = tuple(map(pl.Element, (1, 1, case.block + 2, pitch, case.channels)))
    spec = pl.BlockSpec(window, lambda o, n, y, t: (n, t, y * case.block, 0, 0))
    out = _call(
        functools.partial(padded_body, case=case),
        case,
        [(x, spec)],
        pad_dim(weight, 3, case.channels),
        bias,
        scratch=[],
        vmem_limit=vmem_limit,
        interpret=interpret,
    )
    return out[:, :, :rows, :, :outputs]


class EdgedVideo(NamedTuple):
    """A video whose surroundings are arrays of their own.

    Y and X are rows and columns of ``x``, before it is enlarged.

    Attributes:
        x: [N, T, Y, X, C].
        before: [N, K - 1, Y, X, C], the frames before it; ``None`` with K = 1.
        sides: what precedes each row and what follows it, [N, T + K - 1, Y + 2, C]
            each; the rows above the first and below the last have some as well.
        ends: [N, T + K - 1, 2, X, C], the row above the first and the row below the
            last; ``None`` for zeros.
        real: how many rows and columns of ``x`` belong to the picture. Later rows and
            columns count as zeros, whatever they hold, here and in ``before`` and
            ``ends``; ``sides``, and rows in ``ends``, hold zeros beyond the picture.
            ``None`` if all are real.
    """

    x: jax.Array
    before: jax.Array | None
    sides: tuple[jax.Array, jax.Array]
    ends: jax.Array | None
    real: Real | None = None


def edged_convolution(
    video: EdgedVideo,
    weight: Float[Array, "k _ _ _ o"],
    bias: Float[Array, " o"] | None,
    residual: Float[Array, "_ _ _ _ _"] | None = None,
    shortcut: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: int = 1,
    copies: int = 1,
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "_ _ y x o"]:
    """Convolve a video whose surroundings come as arrays of their own.

    The same as :func:`video_convolution` of all put together, without the copy.

    Args:
        video: what is convolved, [N, T, Y, X, C], with what lies around it.
        residual: [N, T, Y, X, O], added before the result is rounded.
        shortcut: [N, T, Y, X, I] and a matrix [I, O], whose product is added so; X is a
            multiple of 16 and I of 128.
        scale: 2 to repeat every row and column of the video, as nearest neighbours do,
            before it is convolved; Y and X, here and below, are those of the result.
            ``video`` has half as many, K is 1.
        copies: how often each frame of the result is written, one after the other.

    Returns:
        [N, copies T, Y, X, O]; of phantom rows and columns anything.

    Raises:
        ValueError, NotImplementedError: as :func:`video_convolution`; also C is no
            multiple of 128, or no block of rows divides Y.
    """
    x = video.x
    _, _, height, width, channels = x.shape
    outputs = weight.shape[4]
    some, counted = told(video.real, (height, width))
    case = _edged_case(x, weight, shortcut, scale, vmem_limit)
    case = replace(case, copies=copies, some=some)
    # So few channels would leave rows of lanes next to empty.
    few = case.packed and outputs <= PLANES
    alone = residual is None and shortcut is None and copies == 1
    planar = few and alone and (case.block % PLANES == 0 or case.block == case.rows)
    if planar:
        case = replace(case, planes=outputs)
    _check_edged(video, weight, residual, shortcut, case)
    inputs = _edged_inputs(video, case)
    onto = None
    if residual is not None:
        residual = pad_dim(residual, 4, case.outputs)
        # Each block of it is read before the result's is written.
        onto = len(inputs) if copies == 1 else None
        inputs.append((residual, _made(replace(case, copies=1))))
    if shortcut is not None:
        inputs += _shortcut(*shortcut, case)
    inputs += [(n, pl.BlockSpec(memory_space=pltpu.SMEM)) for n in counted]
    narrow = (case.block // 2 + 4, round_up(width, TILE_ROWS), channels)
    out = _call(
        functools.partial(
            edged_body,
            case=case,
            has_ends=video.ends is not None,
            has_residual=residual is not None,
        ),
        case,
        inputs,
        weight,
        bias,
        scratch=[
            *[pltpu.VMEM(narrow, x.dtype)] * (scale - 1),
            pltpu.VMEM((whole_rows(case), case.pitch, channels), x.dtype),
        ],
        onto=onto,
        vmem_limit=vmem_limit,
        interpret=interpret,
    )
    return jnp.moveaxis(out, 2, 4) if planar else out[..., :outputs]


def _edged_case(
    x: jax.Array,
    weight: jax.Array,
    shortcut: tuple[jax.Array, jax.Array] | None,
    scale: int,
    vmem_limit: int,
) -> Case:
    """Sizes of a convolution of ``x``, each frame written once as it is."""
    count, frames, height, width, channels = x.shape
    rows, columns = scale * height, scale * width
    taps, *_, outputs = weight.shape
    # Whole input rows.
    block = scale * block_rows(height, scale * pitch_of(columns), channels)
    deep = 0 if shortcut is None else shortcut[0].shape[4]
    short = 2 * (block * columns + outputs) * deep * x.dtype.itemsize
    return Case(
        count=count,
        frames=frames,
        rows=rows,
        columns=columns,
        channels=channels,
        outputs=round_up(outputs, LANES),
        taps=taps,
        block=block,
        parts=_parts(rows, columns, weight, x.dtype.itemsize, vmem_limit - short),
        packed=taps == 3 and outputs <= GROUP,
        scale=scale,
        deep=deep,
    )


def _check_edged(
    video: EdgedVideo,
    weight: jax.Array,
    residual: jax.Array | None,
    shortcut: tuple[jax.Array, jax.Array] | None,
    case: Case,
) -> None:
    """What :func:`edged_convolution` refuses."""
    x, outputs = video.x, weight.shape[4]
    count, frames, height, width, channels = x.shape
    rows, columns, lag = case.rows, case.columns, case.taps - 1
    if channels % LANES:
        raise NotImplementedError(f"{channels} channels")
    if shortcut is not None and (columns % TILE_ROWS or case.deep % LANES):
        raise NotImplementedError(
            f"a shortcut of {columns} columns, {case.deep} channels"
        )
    if case.scale not in (1, 2) or (case.scale == 2 and lag):
        raise NotImplementedError(f"{case.taps} frames, enlarged {case.scale} times")
    if rows % case.block:
        raise NotImplementedError(f"{rows} rows in blocks of {case.block}")
    side = (count, frames + lag, height + 2, channels)
    wanted: dict[str, tuple[jax.Array | None, tuple[int, ...]]] = {
        "left": (video.sides[0], side),
        "right": (video.sides[1], side),
    }
    if video.ends is not None:
        wanted["ends"] = (video.ends, (count, frames + lag, 2, width, channels))
    if video.before is not None or lag:
        wanted["before"] = (video.before, (count, lag, *x.shape[2:]))
    if residual is not None:
        wanted["residual"] = (residual, (count, frames, rows, columns, outputs))
    if shortcut is not None:
        short = (count, frames, rows, columns, case.deep)
        wanted["shortcut"] = (shortcut[0], short)
        wanted["matrix"] = (shortcut[1], (case.deep, outputs))
    for name, (array, shape) in wanted.items():
        if array is None or array.shape != shape:
            found = None if array is None else array.shape
            raise ValueError(f"{name} of {found}; with {x.shape} it is {shape}")


def _edged_inputs(
    video: EdgedVideo, case: Case
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """The video and what lies around it, as a step of the kernel reads them."""
    x, lag = video.x, case.taps - 1
    _, _, height, width, channels = x.shape
    sizes = (1, 1, min(case.block // case.scale + 2, height), width, channels)
    window = tuple(map(pl.Element, sizes))

    def rows_of(time: Callable[[Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec(
            window, lambda o, n, y, t: (n, time(t), first_row(y, case), 0, 0)
        )

    # A step has the sides of the whole frame: rows that begin anywhere in a tile can be
    # read from VMEM, as words, but not be copied to it.
    line = (1, 1, height + 2, channels)
    beside = pl.BlockSpec(line, lambda o, n, y, t: (n, t, 0, 0))
    inputs = [
        (x, rows_of(lambda t: jnp.maximum(t - lag, 0))),
        *((side.astype(jnp.float32), beside) for side in video.sides),
    ]
    if video.ends is not None:
        both = (1, 1, 2, width, channels)
        ends = pl.BlockSpec(both, lambda o, n, y, t: (n, t, 0, 0, 0))
        inputs.append((video.ends, ends))
    if video.before is not None and lag:
        inputs.append((video.before, rows_of(lambda t: jnp.minimum(t, lag - 1))))
    return inputs


def _parts(
    rows: int, columns: int, weight: jax.Array, itemsize: int, vmem_limit: int
) -> int:
    taps, *sides, channels, outputs = weight.shape
    if taps not in (1, 3) or sides != [3, 3]:
        raise NotImplementedError(f"a kernel of {(taps, *sides)}; 3x3x3 and 1x3x3 can")
    return output_parts(rows, columns, channels, outputs, taps, itemsize, vmem_limit)


def _made(case: Case) -> pl.BlockSpec:
    """The blocks of the output; nothing is written before the first frame is whole."""
    lag = case.taps - 1
    if case.planes:
        return pl.BlockSpec(
            (1, 1, case.planes, case.block, case.columns),
            lambda o, n, y, t: (n, jnp.maximum(t - lag, 0), 0, y, 0),
        )
    return pl.BlockSpec(
        (1, case.copies, case.block, case.columns, case.outputs // case.parts),
        lambda o, n, y, t: (n, jnp.maximum(t - lag, 0), y, 0, o),
    )


def _shortcut(
    x: jax.Array, matrix: jax.Array, case: Case
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """The rows of the output's frame, and the matrix's part."""
    deep, lag = x.shape[4], case.taps - 1
    rows = pl.BlockSpec(
        (1, 1, case.block, case.columns, deep),
        lambda o, n, y, t: (n, jnp.maximum(t - lag, 0), y, 0, 0),
    )
    part = (deep, case.outputs // case.parts)
    matrix = pad_dim(matrix, 1, case.outputs)
    return [(x, rows), (matrix, pl.BlockSpec(part, lambda o, n, y, t: (0, o)))]


def _call(
    body: Callable[..., None],
    case: Case,
    inputs: list[tuple[jax.Array, pl.BlockSpec]],
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    scratch: list[Any],
    onto: int | None = None,
    vmem_limit: int,
    interpret: bool,
) -> jax.Array:
    """The kernel over (parts of the outputs, videos, blocks of rows, frames).

    ``onto`` is which of the inputs the result may overwrite.
    """
    dtype = inputs[0][0].dtype
    blocks = ceil_div(case.rows, case.block)
    real = weight.shape[4]
    if bias is None:
        bias = jnp.zeros(weight.shape[4], jnp.float32)
    weight = _flat(weight, case)
    if case.planes:
        bias = pad_dim(bias.astype(jnp.float32)[:, None], 0, PLANES)
        bias = jnp.broadcast_to(bias, (PLANES, LANES))
    else:
        bias = pad_dim(bias.astype(jnp.float32)[None], 1, case.outputs)
    times, deep, wide = weight.shape
    part = (times, deep, wide // case.parts)
    outputs = case.outputs // case.parts
    whole = [
        (weight, pl.BlockSpec(part, lambda o, n, y, t: (0, 0, o))),
        (bias, pl.BlockSpec((bias.shape[0], outputs), lambda o, n, y, t: (0, o))),
    ]
    count = case.block * case.pitch
    frames = case.copies * case.frames
    made = (case.count, frames, blocks * case.block, case.columns, case.outputs)
    planes = (case.count, case.frames, case.planes, case.rows, case.columns)
    times = 3 if case.taps > 1 and not case.packed else 1
    sums: tuple[int, ...] = (times, case.tiles, count, case.width)
    first = pltpu.VMEM(((case.block + 2) * case.pitch, 3 * case.channels), dtype)
    if case.planes:
        sums = (2, PLANES, count)
        first = pltpu.VMEM((case.planes, case.block, case.columns), jnp.float32)
    return pl.pallas_call(
        body,
        grid=(case.parts, case.count, blocks, case.frames + case.taps - 1),
        in_specs=[spec for _, spec in (*whole, *inputs)],
        out_specs=_made(case),
        out_shape=jax.ShapeDtypeStruct(planes if case.planes else made, dtype),
        scratch_shapes=[first, pltpu.VMEM(sums, jnp.float32), *scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            # Of the real outputs, as utilisation is counted by it.
            flops=2
            * (math.prod(made[:-1]) // case.copies)
            * real
            * (9 * case.taps * case.channels + case.deep),
            transcendentals=0,
            bytes_accessed=sum(a.nbytes for a, _ in (*whole, *inputs))
            + math.prod(planes if case.planes else made) * dtype.itemsize,
        ),
        input_output_aliases={} if onto is None else {len(whole) + onto: 0},
        interpret=interpret,
        name="tpuport_conv",
    )(*(array for array, _ in (*whole, *inputs)))


def _flat(weight: jax.Array, case: Case) -> jax.Array:
    """[K, 3, 3, C, O] as [times, 9 C, lanes]: the taps of a time together.

    With few output channels all times lie side by side, or the first two do and the
    third lies alone. With very few the result is [1, 3 C, lanes], the taps of a column
    and all times.
    """
    if case.planes:
        # [rows, C, columns, times, O]: what a pixel adds to those around it.
        taps = pad_dim(jnp.transpose(weight, (1, 3, 2, 0, 4)), 4, PLANES)
        taps = pad_dim(taps.reshape(3 * case.channels, 3, -1), 2, GROUP)
        return pad_dim(taps.reshape(3 * case.channels, -1), 1, LANES)[None]
    flat = weight.reshape(case.taps, 9 * case.channels, -1)
    if case.packed:
        times = [pad_dim(time, 1, GROUP) for time in flat]
        return pad_dim(jnp.concatenate(times, axis=1), 1, LANES)[None]
    flat = pad_dim(flat, 2, case.outputs)
    if not case.paired:
        return flat
    pair = jnp.concatenate([flat[0], flat[1]], axis=1)
    return jnp.stack([pair, pad_dim(flat[2], 1, 2 * LANES)])
