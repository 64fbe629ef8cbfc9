"""Tiles joined on the host: laid out without gaps, blended line by line, in order."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.tolerances import TOLERANCES
from tpuport.core.layers.tiles import (
    Axis,
    Span,
    TileJoin,
    TilePlan,
    fade,
    in_words,
    tiled_axis,
    whole_axis,
)


def assemble(plan: TilePlan, outputs: Iterable[Any]) -> np.ndarray:
    """What :class:`TileJoin` makes of all tiles, float32 [B, C, *plan.output]."""
    join = TileJoin(plan)
    result: np.ndarray | None = None
    for output in outputs:
        piece = join.add(output)
        del output
        if result is None:
            result = np.empty((*piece.values.shape[:2], *plan.output), np.float32)
        result[:, :, *piece.place] = piece.values
        del piece
    assert result is not None
    return result


def sizes(plan: TilePlan) -> list[tuple[int, ...]]:
    """Frames, rows and columns of every size of tile, once."""
    found = (tuple(s.stop - s.start for s in tile.slices) for tile in plan.tiles)
    return list(dict.fromkeys(found))


def same(n: int) -> int:
    return n


def twice(n: int) -> int:
    return 2 * n


def causal(n: int) -> int:
    return (n - 1) * 4 + 1


def test_the_tiles_of_one_dim() -> None:
    axis = tiled_axis(7, twice, window=4, stride=3, blend=2, keep=6)
    assert axis == Axis(
        spans=(
            Span(0, 4, made=8, drop=0, at=0, keep=6),
            Span(3, 7, made=8, drop=0, at=6, keep=6),
            Span(6, 7, made=2, drop=0, at=12, keep=2),
        ),
        blend=2,
    )
    assert axis.size == 14


def test_in_time_later_tiles_lose_their_first_frame() -> None:
    axis = tiled_axis(8, causal, window=5, stride=3, blend=4, keep=12, limit=29, lead=1)
    assert axis.spans == (
        Span(0, 5, made=17, drop=0, at=0, keep=13),
        Span(3, 8, made=17, drop=1, at=13, keep=12),
        Span(6, 8, made=5, drop=1, at=25, keep=4),
    )
    assert axis.size == causal(8)


def test_a_tile_that_adds_nothing_is_left_out() -> None:
    # The third tile would be one frame, and that is the one dropped.
    axis = tiled_axis(7, causal, window=5, stride=3, blend=4, keep=12, lead=1)
    assert [s.start for s in axis.spans] == [0, 3]
    assert axis.size == causal(7)


def test_nothing_is_kept_beyond_the_limit() -> None:
    axis = tiled_axis(5, same, window=3, stride=2, blend=1, keep=2, limit=3)
    assert [(s.at, s.keep) for s in axis.spans] == [(0, 2), (2, 1)]


@pytest.mark.parametrize(
    ("window", "stride", "keep"), [(4, 0, 3), (0, 2, 3), (4, 3, 0)]
)
def test_settings_without_tiles_are_refused(
    window: int, stride: int, keep: int
) -> None:
    with pytest.raises(ValueError, match="tiles of"):
        tiled_axis(8, same, window=window, stride=stride, blend=1, keep=keep)


def space_plan(rows: int, columns: int) -> TilePlan:
    """Two elements out of one; tiles of 4 at every 3, blended over 2."""
    height, width = (
        tiled_axis(n, twice, window=4, stride=3, blend=2, keep=6)
        for n in (rows, columns)
    )
    return TilePlan(axes=(whole_axis(2, same), height, width))


def video_plan() -> TilePlan:
    time = tiled_axis(8, causal, window=5, stride=3, blend=4, keep=12, lead=1)
    _, height, width = space_plan(7, 6).axes
    return TilePlan(axes=(time, height, width))


def random_outputs(plan: TilePlan) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [
        draw.standard_normal(
            (2, 3, *(a.spans[n].made for a, n in zip(plan.axes, t.index, strict=True)))
        ).astype(np.float32)
        for t in plan.tiles
    ]


def test_tiles_go_by_time_then_rows_then_columns() -> None:
    plan = video_plan()
    assert [t.index for t in plan.tiles] == list(
        itertools.product(range(3), range(3), range(2))
    )
    x = np.arange(8 * 7 * 6).reshape(1, 1, 8, 7, 6)
    assert np.array_equal(plan.tiles[1].cut(x), x[:, :, 0:5, 0:4, 3:6])


def test_a_program_for_every_size() -> None:
    plan = space_plan(7, 5)
    assert sizes(plan) == [(2, 4, 4), (2, 4, 2), (2, 1, 4), (2, 1, 2)]


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("extent", [-1, 0, 1, 3, 9])
def test_fading_is_line_by_line(dim: int, extent: int) -> None:
    draw = np.random.default_rng(1)
    shape = [1, 2, 3, 4, 5]
    before = draw.standard_normal(shape).astype(np.float32)
    after = draw.standard_normal(shape).astype(np.float32)
    expected, last = np.moveaxis(after.copy(), dim, 0), np.moveaxis(before, dim, 0)
    count = min(extent, shape[dim])
    for y in range(count):
        weight = y / count
        expected[y] = last[y - count] * (1 - weight) + expected[y] * weight
    fade(before, after, extent, dim)
    assert np.array_equal(np.moveaxis(after, dim, 0), expected)


def test_tiles_that_agree_give_the_whole() -> None:
    whole = np.random.default_rng(2).standard_normal((1, 2, 2, 7, 5))
    whole = whole.astype(np.float32)
    plan = space_plan(7, 5)
    joined = assemble(
        plan, (t.cut(whole).repeat(2, axis=3).repeat(2, axis=4) for t in plan.tiles)
    )
    expected = whole.repeat(2, axis=3).repeat(2, axis=4)
    assert joined.shape == (1, 2, *plan.output)
    assert float(np.abs(joined - expected).max()) <= TOLERANCES["module float32"]


def test_neighbours_are_blended_before_they_are_blended_with() -> None:
    # Blended over more than lies between them: what the first tile leaves in the
    # second reaches the third.
    axis = tiled_axis(4, same, window=2, stride=1, blend=2, keep=1)
    one = whole_axis(1, same)
    values = [
        np.full((1, 1, 1, 1, n), v, np.float32)
        for n, v in ((2, 8.0), (2, 0.0), (2, 0.0), (1, 0.0))
    ]
    joined = assemble(TilePlan(axes=(one, one, axis)), values)
    assert joined.ravel().tolist() == [8.0, 8.0, 8.0, 2.0]


def test_outputs_are_not_written_to() -> None:
    plan = space_plan(7, 5)
    outputs = random_outputs(plan)
    copies = [o.copy() for o in outputs]
    for output in outputs:
        output.flags.writeable = False
    assemble(plan, outputs)
    assert all(np.array_equal(o, c) for o, c in zip(outputs, copies, strict=True))


def test_outputs_are_let_go_one_by_one() -> None:
    plan = video_plan()
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    def outputs() -> Iterator[np.ndarray]:
        nonlocal most
        for output in random_outputs(plan):
            mine = output.copy()
            del output
            alive.append(weakref.ref(mine))
            most = max(most, sum(ref() is not None for ref in alive))
            yield mine
            del mine

    assemble(plan, outputs())
    assert len(alive) == len(plan.tiles)
    assert most == 1


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_any_float_dtype_is_joined_in_float32(kind: type) -> None:
    plan = space_plan(7, 5)
    low = [o.astype(kind) for o in random_outputs(plan)]
    joined = assemble(plan, low)
    assert joined.dtype == np.float32
    # What was blended is rounded to the dtype, as upstream's tiles are.
    assert np.array_equal(joined, joined.astype(kind))
    exact = assemble(plan, [o.astype(np.float32) for o in low])
    error = np.abs(joined - exact).max()
    # At a corner two fades meet, each of two products and a sum: of values up to 4.
    assert 0 < error <= 6 * 4 * float(ml_dtypes.finfo(kind).eps) / 2


def test_more_outputs_than_tiles_are_refused() -> None:
    plan = space_plan(7, 5)
    outputs = random_outputs(plan)
    with pytest.raises(ValueError, match=f"{len(plan.tiles)} tiles"):
        assemble(plan, [*outputs, outputs[-1]])


def test_tiles_in_words() -> None:
    plan = space_plan(7, 5)
    assert in_words(*plan.axes[1:]) == "3 x 2 tiles of up to 8 x 8 pixels"
    one = whole_axis(4, twice)
    assert in_words(one, one) == ""


@pytest.mark.parametrize("which", ["channels", "rows"])
def test_an_output_of_another_shape_is_refused(which: str) -> None:
    plan = space_plan(7, 5)
    outputs = random_outputs(plan)
    cut = outputs[1][:, :2] if which == "channels" else outputs[1][:, :, :, 1:]
    outputs[1] = cut
    with pytest.raises(ValueError, match=r"tile \(0, 0, 1\)"):
        assemble(plan, outputs)
