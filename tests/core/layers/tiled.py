"""The outputs of tiles as one array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tpuport.core.layers.tiles import TileJoin, TilePlan


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
