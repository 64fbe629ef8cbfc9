"""Where the frames of decode go: to a sink as they are made, or into one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpuport.core.enums import Pixels
from tpuport.core.files.frames import (
    STATISTICS,
    FrameChecks,
    check_pixels,
    measure,
    to_uint8,
)
from tpuport.errors import PluginError

Sink = Callable[[int, "np.ndarray"], None]
"""``sink(first, frames)``: the next frames [B, F, Y, X, 3] of videos ``first`` on.

It is called in the order of the frames, on the thread that runs the stage. What it is
given may be kept, and not be written to.
"""


class Delivery:
    """Takes the frames of a stage, checks them, and hands them on.

    Args:
        pixels: ``"float32"`` or ``"uint8"``, what is asked of the programs and what is
            handed on.
        sink: gets the frames; without it they are collected.

    Raises:
        UsageError: ``pixels`` is neither.
    """

    def __init__(self, pixels: str = Pixels.FLOAT32, sink: Sink | None = None) -> None:
        self.pixels = check_pixels(pixels)
        self.sink = sink
        self.checks = FrameChecks()
        self._collected: list[np.ndarray] = []

    def take(self, first: int, made: Any, output: Any = None) -> int:
        """Take the next frames of some videos; returns how many frames.

        Args:
            first: the index of the first video.
            made: an array [B, F, Y, X, 3], or a mapping with it as ``frames`` and its
                statistics.
            output: of the call they are of; may hold their statistics.

        Raises:
            PluginError: bytes came without their statistics.
            VideoError: the frames are of another shape.
        """
        told = made if isinstance(made, Mapping) else output
        frames = np.asarray(made["frames"] if isinstance(made, Mapping) else made)
        if isinstance(told, Mapping) and all(name in told for name in STATISTICS):
            statistics: Mapping[str, Any] = told
        elif np.issubdtype(frames.dtype, np.floating) and frames.ndim == 5:
            statistics = measure(frames)
        else:
            raise PluginError(
                f"the decode stage gave {frames.dtype} frames of shape "
                f"{list(frames.shape)} without {', '.join(STATISTICS)}; give what "
                "tpuport.core.files.frames.encode_pixels tells"
            )
        self.checks.add(first, frames.shape, statistics)
        if self.pixels == Pixels.UINT8 and frames.dtype != np.uint8:
            # From plain upstream code, or a port whose programs give floats alone. A
            # value that is not finite has no byte; the checks have counted it.
            frames = to_uint8(np.nan_to_num(frames, nan=0.0))
        if self.sink is not None:
            self.sink(first, frames)
        else:
            self._collected.append(frames)
        return int(frames.shape[1])

    def collected(self) -> dict[str, np.ndarray]:
        """``frames`` of the videos since the last call, or nothing with a sink.

        Raises:
            PluginError: there were none.
        """
        if self.sink is not None:
            return {}
        if not self._collected:
            raise PluginError("the decode stage ended without giving frames")
        parts, self._collected = self._collected, []
        return {"frames": parts[0] if len(parts) == 1 else np.concatenate(parts, 1)}

    def check(self) -> None:
        """Refuse videos that cannot be one, once all frames were taken.

        Raises:
            VideoError: see :meth:`tpuport.core.files.frames.FrameChecks.check`.
        """
        self.checks.check()
