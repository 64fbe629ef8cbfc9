"""The checks of a video that is there whole, for tests."""

from __future__ import annotations

import numpy as np

from tpuport.core.files.frames import FrameChecks, measure
from tpuport.errors import VideoError


def check_frames(frames: np.ndarray) -> None:
    """Check that decoded frames can be a video at all.

    Args:
        frames: float of shape [N, T, Y, X, 3], in [0, 1].

    Raises:
        VideoError: a video has NaN or infinite values, is black throughout, or has one
            colour throughout (all pixels of all its frames within 1/255); or the array
            is not of that shape. The message has the index of the video.
    """
    shape = frames.shape
    if len(shape) != 5 or shape[-1] != 3 or 0 in shape:
        raise VideoError(f"frames must have shape [N, T, Y, X, 3], not {list(shape)}")
    if not np.issubdtype(frames.dtype, np.floating):
        raise VideoError(f"frames must be float in [0, 1], not {frames.dtype}")
    checks = FrameChecks()
    checks.add(0, shape, measure(frames))
    checks.check()
