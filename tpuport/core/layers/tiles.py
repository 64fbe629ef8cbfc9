"""Tiles of a video autoencoder, joined on the host.

Upstream's tiled paths loop over tiles and blend them line by line in place. Traced,
that would be one huge program. Here a plan lists the tiles, each tile size has one
program, and NumPy joins the outputs in upstream's order: a tile is blended with its
neighbours after the neighbours' own blending.

Legend: B batch, C channels, F frames, H rows, W columns, (t, i, j) a tile's place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tpuport.core.arrays import Float32, HostArray


class Span(NamedTuple):
    """One tile along one dim.

    Attributes:
        start, stop: the input elements that the tile reads.
        made: number of output elements.
        drop: number of output elements thrown away at the front.
        at: where the kept elements start in the whole output.
        keep: number of elements kept after ``drop``.
    """

    start: int
    stop: int
    made: int
    drop: int
    at: int
    keep: int

    @property
    def read(self) -> slice:
        """The input elements that the tile reads."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The tiles along one dim.

    Attributes:
        spans: in order.
        blend: output elements over which a tile is blended with the tile before.
    """

    spans: tuple[Span, ...]
    blend: int = 0

    @property
    def size(self) -> int:
        """Length of the whole output."""
        return self.spans[-1].at + self.spans[-1].keep


def whole_axis(size: int, made: Callable[[int], int]) -> Axis:
    """A dim of length ``size`` in one tile; n elements give ``made(n)``."""
    return Axis(spans=(Span(0, size, made(size), 0, 0, made(size)),))


def tiled_axis(
    size: int,
    made: Callable[[int], int],
    *,
    window: int,
    stride: int,
    blend: int,
    keep: int,
    limit: int | None = None,
    lead: int = 0,
) -> Axis:
    """A dim of length ``size`` in overlapping tiles, as diffusers lays them out.

    Args:
        size: length of the input.
        made: ``made(n)`` is the number of output elements for n input elements.
        window, stride: input elements of a tile, and between the starts of two.
        blend, keep: output elements blended, and kept of a tile.
        limit: number of output elements after which everything is cut off.
        lead: further output elements that the first tile keeps and all others drop at
            the front: 1 if the first frame of a causal tile stands for itself.

    Tiles of which nothing is kept are left out.

    Raises:
        ValueError: a stride or window below 1, or tiles of which nothing is kept.
    """
    if stride < 1 or window < 1:
        raise ValueError(f"tiles of {window} at every {stride} elements")
    spans: list[Span] = []
    at = 0
    for start in range(0, size, stride):
        stop = min(start + window, size)
        drop = lead if start else 0
        kept = min(made(stop - start) - drop, keep if start else keep + lead)
        if limit is not None:
            kept = min(kept, limit - at)
        if kept > 0:
            spans.append(Span(start, stop, made(stop - start), drop, at, kept))
            at += kept
    if not spans:
        raise ValueError(f"of {size} elements in tiles of {window}, {keep} are kept")
    return Axis(spans=tuple(spans), blend=blend)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One call of the autoencoder.

    Attributes:
        index: (t, i, j), the place in time, rows and columns.
        slices: the frames, rows and columns of the input.
    """

    index: tuple[int, int, int]
    slices: tuple[slice, slice, slice]

    def cut(self, x: Any) -> Any:
        """This tile of ``x`` of shape [B, C, F, H, W]."""
        return x[:, :, *self.slices]


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePlan:
    """All tiles of one tensor.

    Attributes:
        axes: frames, rows and columns.
    """

    axes: tuple[Axis, Axis, Axis]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in the order of running: by frames, then rows, then columns."""
        return tuple(
            Tile(index=(t, i, j), slices=(frames.read, rows.read, columns.read))
            for (t, frames), (i, rows), (j, columns) in itertools.product(
                *(enumerate(axis.spans) for axis in self.axes)
            )
        )

    @property
    def output(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the joined output."""
        frames, rows, columns = (axis.size for axis in self.axes)
        return frames, rows, columns


def in_words(rows: Axis, columns: Axis) -> str:
    """``"4 x 5 tiles of up to 240 x 360 pixels"``; empty for a single tile."""
    if len(rows.spans) * len(columns.spans) == 1:
        return ""
    high, wide = (max(span.made for span in axis.spans) for axis in (rows, columns))
    return (
        f"{len(rows.spans)} x {len(columns.spans)} tiles of up to {high} x {wide} "
        "pixels"
    )


def fading(
    extent: int,
) -> tuple[Float32[HostArray, "{extent}"], Float32[HostArray, "{extent}"]]:
    """The shares of the later and of the earlier tile, float32 [extent] each.

    For element y: ``y / extent`` and ``1 - y / extent``, computed in float64.
    Source: ``blend_t``, ``blend_v`` and ``blend_h`` of diffusers' autoencoders.
    """
    share = np.arange(extent) / extent
    return share.astype(np.float32), (1 - share).astype(np.float32)


def fade(
    before: Float32[HostArray, "b c ..."],
    after: Float32[HostArray, "b c ..."],
    extent: int,
    dim: int,
    dtype: Any = None,
) -> None:
    """Fade from the end of ``before`` into the start of ``after``, in place.

    Element y of ``extent`` becomes ``before * (1 - y / extent) + after * y / extent``,
    see :func:`fading`.

    Args:
        before, after: float32, with values of ``dtype``.
        extent: overlapping elements along ``dim``, at most as many as there are.
        dim: the dim along which the tiles overlap.
        dtype: the dtype in which upstream blends, the dtype of its tiles. Both products
            and their sum are rounded to ``dtype``, the shares are not. Default float32.
    """
    extent = min(before.shape[dim], after.shape[dim], extent)
    if extent <= 0:
        return
    shape = [1] * after.ndim
    shape[dim] = extent
    rising, falling = (share.reshape(shape) for share in fading(extent))
    part = _take(after, dim, 0, extent)
    tail = _take(before, dim, before.shape[dim] - extent, before.shape[dim])
    if dtype is None or dtype == np.float32:
        part[...] = tail * falling + part * rising
        return

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    part[...] = rounded(rounded(tail * falling) + rounded(part * rising))


def _take(x: np.ndarray, dim: int, start: int, stop: int) -> np.ndarray:
    """A view of ``x`` from ``start`` to ``stop`` along ``dim``."""
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, stop),)]


def _tail(x: np.ndarray, dim: int, length: int) -> np.ndarray:
    """A copy of the last ``length`` elements along ``dim``, or of all if fewer."""
    size = x.shape[dim]
    return _take(x, dim, max(size - length, 0), size).copy()


class Piece(NamedTuple):
    """What a tile adds to the output; later tiles do not change a piece.

    Attributes:
        values: float32 of shape [B, C, frames, rows, columns].
        place: slices of the frames, rows and columns of the output.
        ends_row: whether the piece completes its frames.
    """

    values: Float32[HostArray, "b c f h w"]
    place: tuple[slice, slice, slice]
    ends_row: bool


class TileJoin:
    """Joins the outputs of a plan's tiles one by one.

    Between two tiles the join holds one row of seams and the blended frames of one tile
    in time. The caller keeps the pieces.
    """

    def __init__(self, plan: TilePlan) -> None:
        self._plan = plan
        self._tiles = plan.tiles
        self._seams = _Seams(plan)
        self._count = 0
        self._leading: tuple[int, ...] | None = None

    def add(self, output: Any) -> Piece:
        """Add the next tile's output, of shape [B, C, *size] and any float dtype.

        The output is blended in float32 and rounded to its dtype where upstream rounds:
        the numbers are upstream's in that dtype.

        Raises:
            ValueError: there are more outputs than tiles, or the output has another
                shape than the plan says.
        """
        if self._count == len(self._tiles):
            raise ValueError(f"more outputs than the {len(self._tiles)} tiles")
        index = self._tiles[self._count].index
        spans = [a.spans[n] for a, n in zip(self._plan.axes, index, strict=True)]
        made = tuple(s.made for s in spans)
        found = tuple(output.shape)
        leading = self._leading or found[:2]
        if found != (*leading, *made):
            raise ValueError(
                f"tile {index} gave an output of shape {found}; the plan counts on "
                f"{(*leading, *made)}"
            )
        self._leading = leading
        self._count += 1
        # Fetch the device array before the cut, and copy it: blending writes.
        fetched = np.asarray(output)
        tile = fetched[:, :, spans[0].drop :].astype(np.float32)
        self._seams.blend(tile, index, spans, fetched.dtype)
        frames, rows, columns = (slice(s.at, s.at + s.keep) for s in spans)
        following = self._tiles[self._count : self._count + 1]
        return Piece(
            values=tile[:, :, *(slice(s.keep) for s in spans)],
            place=(frames, rows, columns),
            ends_row=not following or following[0].index[0] != index[0],
        )


class _Seams:
    """The ends of the tiles so far, with which later tiles are blended.

    ``above`` has a key by column, ``before`` a key by row and column.
    """

    def __init__(self, plan: TilePlan) -> None:
        self._frames, self._rows, self._columns = plan.axes
        self._before: dict[tuple[int, int], np.ndarray] = {}
        self._above: dict[int, np.ndarray] = {}
        self._left: np.ndarray | None = None

    def blend(
        self,
        tile: Float32[HostArray, "b c f h w"],
        index: tuple[int, int, int],
        spans: list[Span],
        dtype: Any,
    ) -> None:
        """Blend a tile of shape [B, C, F, H, W] in place, and keep its ends.

        The tile is float32, with values of ``dtype``, in which upstream blends.
        """
        t, i, j = index
        if i > 0:
            fade(self._above[j], tile, self._rows.blend, 3, dtype)
        if j > 0:
            assert self._left is not None
            fade(self._left, tile, self._columns.blend, 4, dtype)
        if len(self._rows.spans) > 1:
            self._above[j] = _tail(tile, 3, self._rows.blend)
        if len(self._columns.spans) > 1:
            self._left = _tail(tile, 4, self._columns.blend)
        if len(self._frames.spans) > 1:
            # In time upstream joins whole frames, after they are cut to size.
            tile = tile[:, :, :, : spans[1].keep, : spans[2].keep]
            if t > 0:
                fade(self._before[i, j], tile, self._frames.blend, 2, dtype)
            self._before[i, j] = _tail(tile, 2, self._frames.blend)
