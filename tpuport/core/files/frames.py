"""Frames as bytes, and whether frames can be a video at all.

Letters: T frames, Y rows, X columns; 3 is red, green, blue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpuport.errors import VideoError

if TYPE_CHECKING:
    import numpy as np


def check_frames(index: int, frames: np.ndarray, *, plain: bool = False) -> None:
    """Refuse frames that cannot be a video.

    Args:
        index: of the video, for messages.
        frames: float [T, Y, X, 3] in [0, 1].
        plain: whether frames of one colour will do.

    Raises:
        VideoError: there are none; or they have NaN or infinite values; or, unless
            ``plain``, they are black throughout, or have one colour throughout (all
            pixels of all frames within 1/255).
    """
    import numpy as np

    if not frames.size:
        raise VideoError(f"video {index}: has no frames ({list(frames.shape)})")
    broken = frames[0].size - np.isfinite(frames).sum((1, 2, 3))
    if broken.any():
        raise VideoError(
            f"video {index}: {broken.sum()} of {frames.size} values are NaN or infinite"
            f", from frame {np.argmax(broken > 0)} on; check the weights of the "
            "autoencoder"
        )
    if plain:
        return
    low, high = frames.min((0, 1, 2)), frames.max((0, 1, 2))
    if high.max() * 255 < 0.5:
        raise VideoError(
            f"video {index}: all {len(frames)} frames are black (largest value "
            f"{high.max():.2g})"
        )
    # The margin is for 1/255 not being a float.
    if (high - low).max() <= 1 / 255 + 1e-6:
        colour = ", ".join(f"{value:.3f}" for value in (low + high) / 2)
        raise VideoError(
            f"video {index}: all pixels of its {len(frames)} frames have the same "
            f"colour ({colour})"
        )


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Float frames in [0, 1] as bytes: ``rint(x * 255)``, values outside clipped.

    A tie goes to the even byte, as in upstream's ``VaeImageProcessor.numpy_to_pil``
    (diffusers ``image_processor.py``).
    """
    import numpy as np

    return np.rint(np.clip(frames, 0, 1) * 255).astype(np.uint8)
