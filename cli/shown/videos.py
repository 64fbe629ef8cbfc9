"""The videos of a run, written while their frames are made."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from tpuport.cli.shown.outputs import Outputs
from tpuport.core.files.video_file import VideoWriter

if TYPE_CHECKING:
    import numpy as np


class VideoFiles:
    """One writer for each video; none has its name before all are complete.

    Used in a ``with`` block, which discards what :meth:`publish` has not named.

    Args:
        outputs: where they go.
        fps: frames per second.
        frames: of each video; one that has them all is completed at once.
    """

    def __init__(self, outputs: Outputs, fps: float, frames: int) -> None:
        self.outputs = outputs
        self._frames = frames
        self._writers = [
            VideoWriter(path, fps, kind=outputs.kind) for path in outputs.paths
        ]

    def __enter__(self) -> VideoFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Without effect on those that were published.
        for writer in self._writers:
            writer.discard()

    def take(self, first: int, frames: np.ndarray) -> None:
        """The next frames [B, F, Y, X, 3] of videos ``first`` on.

        Raises:
            OutputError: they cannot be written.
        """
        for writer, part in zip(self._writers[first:], frames, strict=False):
            writer.append(part)
            if writer.frames == self._frames:
                # An encoder is a process; those of batches that are done would pile up.
                writer.finish()

    def publish(self) -> None:
        """Give every video its name.

        Raises:
            OutputError: one cannot be written.
        """
        for writer in self._writers:
            writer.finish()
        for writer in self._writers:
            writer.publish()
