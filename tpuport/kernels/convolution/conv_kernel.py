"""What the convolution kernel runs on a block of rows; see
:mod:`tpuport.kernels.convolution.conv`.

Legend: as there; M rows of a flat array, pitch and rows of a block together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.padding import round_up

#: Rows of a tile, of any dtype up to 32 bits.
TILE_ROWS = 16
#: Channels of a tile.
LANES = 128
#: Input channels, and output channels, that fill a matrix unit of 256 x 256.
FULL = 256
#: Channels that a time has of the lanes, where all three are side by side.
GROUP = 32
#: Output channels, at most, that are written as planes: sublanes of a tile of floats.
PLANES = 8


def pitch_of(columns: int) -> int:
    """Columns of the padded input for ``columns`` of output."""
    return round_up(columns + 2, TILE_ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes of a call; channels and outputs are whole lanes.

    ``parts`` is how many parts the outputs are made in, of whole tiles each; ``packed``
    whether they are so few that three times fit into the lanes of one; ``planes`` how
    many real ones there are where each is written as a plane of rows and columns, else
    none; ``scale`` how often rows and columns of the input are repeated, 1 or 2;
    ``copies`` how often a frame is written; ``some`` whether rows and columns of the
    input may be phantoms; ``deep`` how many channels a shortcut has, 0 without one.
    """

    count: int
    frames: int
    rows: int
    columns: int
    channels: int
    outputs: int
    taps: int
    block: int
    parts: int = 1
    packed: bool = False
    planes: int = 0
    scale: int = 1
    copies: int = 1
    some: tuple[bool, bool] = (False, False)
    deep: int = 0

    @property
    def pitch(self) -> int:
        return pitch_of(self.columns)

    @property
    def paired(self) -> bool:
        """Whether two times side by side fill the matrix unit."""
        return self.taps == 3 and self.outputs == LANES and not self.packed

    @property
    def width(self) -> int:
        """Output channels of a tile."""
        return FULL if self.outputs % FULL == 0 else LANES

    @property
    def tiles(self) -> int:
        """Tiles of output channels in a part."""
        return self.outputs // self.width // self.parts


def first_row(y: Any, case: Case) -> Any:
    """The first input row of block y: the one above it, where there is one."""
    rows, block = case.rows // case.scale, case.block // case.scale
    return jnp.clip(y * block - 1, 0, rows - min(block + 2, rows))


def padded_body(
    weight_ref: Any,
    bias_ref: Any,
    x_ref: Any,
    out_ref: Any,
    taps_ref: Any,
    sums_ref: Any,
    *,
    case: Case,
) -> None:
    """One frame of one block of rows."""
    channels = case.channels
    x = x_ref[0, 0].reshape((case.block + 2) * case.pitch, channels)
    taps_ref[:, :channels] = x
    taps_ref[:, channels : 2 * channels] = _shifted(x, 1)
    taps_ref[:, 2 * channels :] = _shifted(x, 2)
    added_refs = (None, None)
    _accumulate(weight_ref, bias_ref, added_refs, out_ref, taps_ref, sums_ref, case)


def edged_body(
    weight_ref: Any,
    bias_ref: Any,
    x_ref: Any,
    left_ref: Any,
    right_ref: Any,
    *refs: Any,
    case: Case,
    has_ends: bool,
    has_residual: bool,
) -> None:
    """One frame of one block of rows, put together from its parts."""
    *extra, whole_ref = refs
    narrow_ref = extra.pop() if case.scale > 1 else None
    *extra, out_ref, first_ref, sums_ref = extra
    real_ref = extra.pop() if any(case.some) else None
    ends_ref = extra.pop(0) if has_ends else None
    before_ref = extra.pop(0) if case.taps > 1 else None
    added_refs = (
        extra.pop(0) if has_residual else None,
        (extra[0], extra[1]) if case.deep else None,
    )
    around = (left_ref, right_ref, ends_ref, before_ref, real_ref)
    _put_together(x_ref, around, narrow_ref, whole_ref, case)
    if case.planes:
        _planes(weight_ref, bias_ref, out_ref, first_ref, sums_ref, whole_ref, case)
        return
    taps_ref, channels = first_ref, case.channels
    size = (case.block + 2) * case.pitch
    flat = whole_ref[1 : case.block + 3].reshape(size, channels)
    taps_ref[:, :channels] = _shifted(flat, -1)
    taps_ref[:, channels : 2 * channels] = flat
    taps_ref[:, 2 * channels :] = _shifted(flat, 1)
    _accumulate(weight_ref, bias_ref, added_refs, out_ref, taps_ref, sums_ref, case)


def _put_together(
    x_ref: Any,
    around: tuple[Any, Any, Any | None, Any | None, Any | None],
    narrow_ref: Any | None,
    whole_ref: Any,
    case: Case,
) -> None:
    """A block of a frame with what lies around it, the row above the block at 1.

    A frame to be enlarged is put together in ``narrow_ref`` first, alike.
    """
    left_ref, right_ref, ends_ref, before_ref, real_ref = around
    block, pitch, columns = case.block, case.pitch, case.columns
    channels, lag, scale = case.channels, case.taps - 1, case.scale
    y, t = pl.program_id(2), pl.program_id(3)
    rows, wide = block // scale, columns // scale
    inner_ref = whole_ref if narrow_ref is None else narrow_ref
    # At the ends of the picture, where there is no row beside the block to read, the
    # window has moved by one.
    moved = first_row(y, case) - (y * rows - 1)
    inner = (pl.ds(1 + moved, x_ref.shape[2]), slice(0, wide))

    def put_rows(ref: Any) -> None:
        inner_ref[inner] = ref[0, 0]

    if before_ref is None:
        put_rows(x_ref)
    else:
        pl.when(t < lag)(lambda: put_rows(before_ref))
        pl.when(t >= lag)(lambda: put_rows(x_ref))

    def put_end(place: int, at: int) -> None:
        zeros = jnp.zeros((wide, channels), whole_ref.dtype)
        inner_ref[place, :wide] = zeros if ends_ref is None else ends_ref[0, 0, at]

    pl.when(y == 0)(lambda: put_end(1, 0))
    pl.when(y == case.rows // block - 1)(lambda: put_end(rows + 2, 1))

    if real_ref is not None:
        _end_picture(inner_ref, real_ref, y, case)
    if narrow_ref is not None:
        for row in range(rows + 2):
            twice = _doubled(narrow_ref[1 + row])[:columns]
            for place in (2 * row - 1, 2 * row):
                if 0 <= place < block + 2:
                    whole_ref[1 + place, :columns] = twice

    # Behind each row what follows it, and at the pitch's end what precedes the next
    # one; what precedes the first is before it, and at the very end, as copies shift
    # around it.
    inside = columns % TILE_ROWS
    tail = slice(columns - inside, pitch)
    shape = (pitch - columns + inside, channels)
    place = jax.lax.broadcasted_iota(jnp.int32, shape, 0)

    def beside(ref: Any, row: int) -> jax.Array:
        at = y * rows + (row if scale == 1 else (row + 1) // 2)
        found: jax.Array = ref[0, 0, pl.ds(at, 1)]
        return found

    for row in range(block + 2):
        follows = beside(right_ref, row)
        precedes = beside(left_ref, (row + 1) % (block + 2))
        edge = jnp.where(place == inside, follows, 0)
        edge = jnp.where(place == shape[0] - 1, precedes, edge)
        if inside:
            # The tile's first columns are the picture's last ones.
            known = whole_ref[1 + row, tail].astype(jnp.float32)
            edge = jnp.where(place < inside, known, edge)
        whole_ref[1 + row, tail] = edge.astype(whole_ref.dtype)
    if case.planes:
        whole_ref[0, tail] = edge.astype(whole_ref.dtype)


def _end_picture(inner_ref: Any, real_ref: Any, y: Any, case: Case) -> None:
    """Zeros in the first phantom row and column, further than which no tap reaches.

    What is put together of block y, before it is enlarged.
    """
    block, height, width = (
        n // case.scale for n in (case.block, case.rows, case.columns)
    )
    dtype, channels = inner_ref.dtype, case.channels
    real_rows, real_columns = real_ref[0], real_ref[1]
    if case.some[0]:
        # From the row above the block on. Where it is that one, none of the block is
        # real.
        at = real_rows - (y * block - 1)

        def clear_row() -> None:
            inner_ref[pl.ds(1 + at, 1), :width] = jnp.zeros((1, width, channels), dtype)

        pl.when((real_rows < height) & (at > 0) & (at < block + 2))(clear_row)

    if case.some[1]:

        def clear_column() -> None:
            start = pl.multiple_of(real_columns // TILE_ROWS * TILE_ROWS, TILE_ROWS)
            shape = (TILE_ROWS, channels)
            place = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            for row in range(1, block + 3):
                tile = (row, pl.ds(start, TILE_ROWS))
                known = inner_ref[tile].astype(jnp.float32)
                known = jnp.where(place == real_columns - start, 0, known)
                inner_ref[tile] = known.astype(dtype)

        pl.when(real_columns < width)(clear_column)


def _doubled(x: jax.Array) -> jax.Array:
    """Every row of [M, C] twice, one after the other."""
    if x.dtype.itemsize == 4:
        return jnp.repeat(x, 2, axis=0)
    # A word holds two rows, here the same ones.
    words = pltpu.bitcast(x.astype(jnp.float32), jnp.uint32)
    return pltpu.bitcast(words | (words >> 16), x.dtype)


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


def _accumulate(
    weight_ref: Any,
    bias_ref: Any,
    added_refs: tuple[Any | None, tuple[Any, Any] | None],
    out_ref: Any,
    taps_ref: Any,
    sums_ref: Any,
    case: Case,
) -> None:
    """Add what the taps of a frame give to its time and to the two after it."""
    residual_ref, shortcut_refs = added_refs
    t = pl.program_id(3)
    lag = case.taps - 1
    count = case.block * case.pitch
    width, tiles = case.width, case.tiles
    exact = jax.lax.Precision.HIGHEST if taps_ref.dtype == jnp.float32 else None
    dot = functools.partial(
        jnp.dot, preferred_element_type=jnp.float32, precision=exact
    )

    def row(dy: int) -> jax.Array:
        found: jax.Array = taps_ref[dy * case.pitch : dy * case.pitch + count]
        return found

    def lanes_of(tile: Any) -> Any:
        """A tile's output channels."""
        start = pl.multiple_of(tile * width, LANES) if tiles > 1 else 0
        return pl.ds(start, width)

    def products(time: Any, lanes: Any) -> jax.Array:
        """What this frame gives to one time, in some output channels."""
        if case.channels % FULL:
            # Narrow taps side by side fill the matrix unit.
            side_by_side = jnp.concatenate([row(dy) for dy in range(3)], 1)
            return dot(side_by_side, weight_ref[time, :, lanes])
        each = 3 * case.channels
        parts = [
            dot(row(dy), weight_ref[time, dy * each : (dy + 1) * each, lanes])
            for dy in range(3)
        ]
        return parts[0] + parts[1] + parts[2]

    def finish(total: jax.Array, tile: Any) -> None:
        lanes = lanes_of(tile)
        out = total + bias_ref[0, lanes][None]
        out = out.reshape(case.block, case.pitch, width)[:, : case.columns]
        if residual_ref is not None:
            out = out + residual_ref[0, 0, :, :, lanes].astype(jnp.float32)
        if shortcut_refs is not None:
            x_ref, matrix_ref = shortcut_refs
            short = x_ref[0, 0].reshape(case.block * case.columns, x_ref.shape[-1])
            out = out + dot(short, matrix_ref[:, lanes]).reshape(out.shape)
        for copy in range(case.copies):
            out_ref[0, copy, :, :, lanes] = out.astype(out_ref.dtype)

    if case.packed:
        # What waits moves on by a time, and nothing waits for the newest one.
        newest = jax.lax.broadcasted_iota(jnp.int32, (count, LANES), 1) < GROUP
        waiting = pltpu.roll(sums_ref[0, 0], GROUP, 1)
        total = products(0, slice(None)) + jnp.where(newest | (t == 0), 0, waiting)
        sums_ref[0, 0] = total
        oldest = functools.partial(pltpu.roll, total, LANES - lag * GROUP, 1)
        pl.when(t >= lag)(lambda: finish(oldest(), 0))
        return
    if case.paired:

        def add_both() -> None:
            both = products(0, slice(None))
            sums_ref[1, 0] = sums_ref[0, 0] + both[:, LANES:]
            sums_ref[0, 0] = both[:, :LANES]

        last = slice(0, LANES)
        pl.when(t >= lag)(lambda: finish(sums_ref[1, 0] + products(1, last), 0))
        pl.when(t <= case.frames)(add_both)
        return

    def tile_of(time: int) -> Callable[[Any, None], None]:
        """The turn of a loop over tiles, which keeps the program short."""

        def turn(tile: Any, _: None) -> None:
            value = products(time, lanes_of(tile))
            # A place for each time that is not whole yet.
            place = (t - time) % 3
            if time == lag:
                finish(value + sums_ref[place, tile] if lag else value, tile)
            elif time == 0:
                sums_ref[place, tile] = value
            else:
                sums_ref[place, tile] += value

        return turn

    for time in range(case.taps):
        loop = functools.partial(jax.lax.fori_loop, 0, tiles, tile_of(time), None)
        pl.when((t >= time) & (t - time < case.frames))(loop)


def planar_length(case: Case) -> int:
    """Columns of the turned products: a block, a tile on either side, whole lanes."""
    return round_up(case.block * case.pitch + 2 * TILE_ROWS, LANES)


def whole_rows(case: Case) -> int:
    """Rows of a block put together: one on either side, and what is read beyond."""
    beyond = planar_length(case) - case.block * case.pitch if case.planes else 0
    return case.block + 4 + -(-beyond // case.pitch)


def _planes(
    weight_ref: Any,
    bias_ref: Any,
    out_ref: Any,
    lines_ref: Any,
    sums_ref: Any,
    whole_ref: Any,
    case: Case,
) -> None:
    """Write a plane for each of few output channels.

    A product gives what a pixel adds to all it is beside of, 27 taps of 8 outputs in
    the lanes; turned, taps are sublanes, and moving them costs next to nothing.
    """
    t = pl.program_id(3)
    pitch, count = case.pitch, case.block * case.pitch
    flat = whole_ref[...].reshape(whole_ref.shape[0] * pitch, case.channels)
    exact = jax.lax.Precision.HIGHEST if flat.dtype == jnp.float32 else None
    start, length = pitch - TILE_ROWS, planar_length(case)
    rows = [flat[start + dy * pitch :][:length] for dy in range(3)]
    products = jnp.dot(
        jnp.concatenate(rows, 1),
        weight_ref[0],
        preferred_element_type=jnp.float32,
        precision=exact,
    )
    # The lanes beyond are zeros. Without anything between, interpret mode would make
    # one operation of both, which XLA's CPU backend does not have for bfloat16.
    used = jax.lax.broadcasted_iota(jnp.int32, products.shape, 1) < 3 * GROUP
    turned = jnp.transpose(jnp.where(used, products, 0))

    def given(time: int) -> jax.Array:
        """What this frame gives to one time: [8, M]."""
        parts = []
        for dx in range(3):
            tap, at = dx * GROUP + time * PLANES, TILE_ROWS - 1 + dx
            parts.append(turned[tap : tap + PLANES, at : at + count])
        return parts[0] + parts[1] + parts[2]

    lag = case.taps - 1

    def finish() -> None:
        total = sums_ref[1] + given(lag) + bias_ref[:, :1]
        for row in range(case.block):
            line = total[: case.planes, row * pitch : row * pitch + case.columns]
            for plane in range(case.planes):
                lines_ref[plane, row : row + 1] = line[plane : plane + 1]
        out_ref[0, 0] = lines_ref[...].astype(out_ref.dtype)

    pl.when(t >= lag)(finish)
    sums_ref[1] = sums_ref[0] + given(1)
    sums_ref[0] = given(0)
