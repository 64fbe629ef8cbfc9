"""What the convolution kernel runs on a block of rows; see :mod:`tpuport.kernels.conv`.

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


def pitch_of(columns: int) -> int:
    """Columns of the padded input for ``columns`` of output."""
    return round_up(columns + 2, TILE_ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes of a call; channels and outputs are whole lanes.

    ``parts`` is how many parts the outputs are made in, of whole tiles each; ``packed``
    whether they are so few that three times fit into the lanes of one.
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
    """The first row that block y reads: the one above it, where there is one."""
    last = case.rows - min(case.block + 2, case.rows)
    return jnp.clip(y * case.block - 1, 0, last)


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
    _accumulate(weight_ref, bias_ref, None, out_ref, taps_ref, sums_ref, case)


def edged_body(
    weight_ref: Any,
    bias_ref: Any,
    x_ref: Any,
    left_ref: Any,
    right_ref: Any,
    *refs: Any,
    case: Case,
    has_ends: bool,
    has_before: bool,
    has_residual: bool,
) -> None:
    """One frame of one block of rows, put together from its parts."""
    *extra, out_ref, taps_ref, sums_ref, whole_ref = refs
    ends_ref = extra.pop(0) if has_ends else None
    before_ref = extra[0] if has_before else None
    residual_ref = extra[-1] if has_residual else None
    block, pitch, columns = case.block, case.pitch, case.columns
    channels, lag = case.channels, case.taps - 1
    y, t = pl.program_id(2), pl.program_id(3)
    # The row above the block is at 1. At the ends of the picture, where there is no
    # row beside the block to read, the window has moved by one.
    moved = first_row(y, case) - (y * block - 1)
    inner = (pl.ds(1 + moved, x_ref.shape[2]), slice(0, columns))
    # Held by names, as decorators are called at once.
    early: Callable[[Any], Any] = pl.when(t < lag)
    late: Callable[[Any], Any] = pl.when(t >= lag)
    first: Callable[[Any], Any] = pl.when(y == 0)
    last: Callable[[Any], Any] = pl.when(y == case.rows // block - 1)
    if before_ref is None:
        whole_ref[inner] = x_ref[0, 0]
    else:

        @early
        def _() -> None:
            whole_ref[inner] = before_ref[0, 0]

        @late
        def _() -> None:
            whole_ref[inner] = x_ref[0, 0]

    def end(at: int) -> jax.Array:
        if ends_ref is None:
            return jnp.zeros((columns, channels), whole_ref.dtype)
        row: jax.Array = ends_ref[0, 0, at]
        return row

    @first
    def _() -> None:
        whole_ref[1, :columns] = end(0)

    @last
    def _() -> None:
        whole_ref[block + 2, :columns] = end(1)

    # Behind each row what follows it, and at the pitch's end what precedes the next
    # one; what precedes the first is at the very end, as copies shift around it.
    place = jax.lax.broadcasted_iota(jnp.int32, (TILE_ROWS, channels), 0)
    for row in range(block + 2):
        after = (row + 1) % (block + 2)
        follows = right_ref[0, 0, row].astype(jnp.float32)
        precedes = left_ref[0, 0, after].astype(jnp.float32)
        edge = jnp.where(place == 0, follows, 0)
        edge = jnp.where(place == TILE_ROWS - 1, precedes, edge)
        whole_ref[1 + row, pitch - TILE_ROWS :] = edge.astype(whole_ref.dtype)
    flat = whole_ref[1 : block + 3].reshape((block + 2) * pitch, channels)
    taps_ref[:, :channels] = _shifted(flat, -1)
    taps_ref[:, channels : 2 * channels] = flat
    taps_ref[:, 2 * channels :] = _shifted(flat, 1)
    _accumulate(weight_ref, bias_ref, residual_ref, out_ref, taps_ref, sums_ref, case)


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
    residual_ref: Any | None,
    out_ref: Any,
    taps_ref: Any,
    sums_ref: Any,
    case: Case,
) -> None:
    """Add what the taps of a frame give to its time and to the two after it."""
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
        out_ref[0, 0, :, :, lanes] = out.astype(out_ref.dtype)

    # Held by names, as decorators are called at once.
    whole: Callable[[Any], Any] = pl.when(t >= lag)
    if case.packed:
        # What waits moves on by a time, and nothing waits for the newest one.
        newest = jax.lax.broadcasted_iota(jnp.int32, (count, LANES), 1) < GROUP
        waiting = pltpu.roll(sums_ref[0, 0], GROUP, 1)
        total = products(0, slice(None)) + jnp.where(newest | (t == 0), 0, waiting)
        sums_ref[0, 0] = total

        @whole
        def _() -> None:
            finish(pltpu.roll(total, LANES - lag * GROUP, 1), 0)

        return
    if case.paired:
        begun: Callable[[Any], Any] = pl.when(t <= case.frames)

        @whole
        def _() -> None:
            finish(sums_ref[1, 0] + products(1, slice(0, LANES)), 0)

        @begun
        def _() -> None:
            both = products(0, slice(None))
            sums_ref[1, 0] = sums_ref[0, 0] + both[:, LANES:]
            sums_ref[0, 0] = both[:, :LANES]

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
        counts: Callable[[Any], Any] = pl.when((t >= time) & (t - time < case.frames))

        @counts
        def _(time: int = time) -> None:
            jax.lax.fori_loop(0, tiles, tile_of(time), None)
