"""Tiles of a video joined to frames on the host, piece by piece.

Letters: B videos, F frames, H rows and W columns of pixels.
"""

from __future__ import annotations

import numpy as np

from tpuport.core.files.frames import as_frames, encode_on_host
from tpuport.core.layers.tiles import TileJoin, TilePlan


class JoinedFrames:
    """Joins tiles to frames; a frame is finished when its last tile is added.

    A piece becomes pixels as soon as it is blended. The host holds the floats of one
    tile and of the seams, and the pixels of one row of tiles in time.

    Args:
        plan: the tiles.
        pixels: ``"float32"`` or ``"uint8"``.
    """

    def __init__(self, plan: TilePlan, pixels: str) -> None:
        self._plan = plan
        self._pixels = pixels
        self._join = TileJoin(plan)
        self._row: dict[str, np.ndarray] | None = None

    def add(self, output: np.ndarray) -> dict[str, np.ndarray] | None:
        """Add the next tile, [B, 3, F, H, W], about [-1, 1].

        Returns:
            The frames that the tile completes, [B, F, H, W, 3], with the statistics of
            :func:`tpuport.core.files.frames.encode_pixels`, or ``None``.

        Raises:
            ValueError: see :meth:`tpuport.core.layers.tiles.TileJoin.add`.
        """
        values, (frames, rows, columns), ends_row = self._join.add(output)
        values *= np.float32(0.5)
        values += np.float32(0.5)
        piece = encode_on_host(values, self._pixels)
        if self._row is None:
            shape = (len(values), frames.stop - frames.start, *self._plan.output[1:], 3)
            self._row = {
                "frames": np.empty(shape, self._pixels),
                "finite": np.zeros_like(piece["finite"]),
                "low": piece["low"],
                "high": piece["high"],
            }
        row = self._row
        row["frames"][:, :, rows, columns] = as_frames(
            piece["frames"], *values.shape[3:]
        )
        row["finite"] += piece["finite"]
        row["low"] = np.minimum(row["low"], piece["low"])
        row["high"] = np.maximum(row["high"], piece["high"])
        if not ends_row:
            return None
        self._row = None
        return row
