"""Frames as bytes, and whether frames can be a video at all.

Letters: B videos of a batch, F frames of a call, Y rows, X columns; 3 is red, green,
blue. Statistics are of the floats, before they become bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.errors import VideoError

if TYPE_CHECKING:
    import numpy as np

STATISTICS = ("finite", "low", "high")
"""What :func:`measure` tells."""


def measure(frames: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics of frames, for :class:`FrameChecks`.

    Args:
        frames: float of shape [B, F, Y, X, 3], in [0, 1].

    Returns:
        ``finite`` [B, F], how many values of a frame are finite; ``low`` and ``high``
        [B, 3], the extremes of each colour.
    """
    import numpy as np

    return {
        # Booleans, a quarter of the floats; one video at a time.
        "finite": np.stack([np.isfinite(video).sum((1, 2, 3)) for video in frames]),
        "low": frames.min(axis=(1, 2, 3)),
        "high": frames.max(axis=(1, 2, 3)),
    }


@dataclass(kw_only=True, slots=True)
class _Seen:
    """One video so far."""

    frames: int = 0
    values: int = 0
    broken: int = 0
    first_broken: int | None = None
    low: Any = None
    high: Any = None


class FrameChecks:
    """Gathers statistics of videos that come in parts, and refuses bad videos."""

    def __init__(self) -> None:
        self._videos: dict[int, _Seen] = {}

    def add(
        self, first: int, shape: tuple[int, ...], statistics: Mapping[str, Any]
    ) -> None:
        """Take in the next frames of some videos.

        Args:
            first: the index of the first of them.
            shape: of the frames, [B, F, Y, X, 3].
            statistics: from :func:`measure`.

        Raises:
            VideoError: the frames are not of such a shape, or empty.
        """
        import numpy as np

        if len(shape) != 5 or shape[-1] != 3 or 0 in shape:
            raise VideoError(
                f"frames must have shape [N, T, Y, X, 3], not {list(shape)}"
            )
        finite, low, high = (np.asarray(statistics[name]) for name in STATISTICS)
        per_frame = shape[2] * shape[3] * shape[4]
        for place in range(shape[0]):
            video = self._videos.setdefault(first + place, _Seen())
            broken = per_frame - finite[place].astype(np.int64)
            if broken.any() and video.first_broken is None:
                video.first_broken = video.frames + int(np.argmax(broken > 0))
            video.broken += int(broken.sum())
            video.frames += shape[1]
            video.values += shape[1] * per_frame
            fresh = video.low is None
            video.low = low[place] if fresh else np.minimum(video.low, low[place])
            video.high = high[place] if fresh else np.maximum(video.high, high[place])

    def check(self) -> None:
        """Refuse a video that cannot be one, once all of it was taken in.

        Raises:
            VideoError: a video has NaN or infinite values, is black throughout, or has
                one colour throughout (all pixels of all its frames within 1/255). The
                message has the index of the video.
        """
        for index, video in sorted(self._videos.items()):
            if video.broken:
                raise VideoError(
                    f"video {index}: {video.broken} of {video.values} values are NaN or"
                    f" infinite, from frame {video.first_broken} on; check the weights "
                    "of the autoencoder"
                )
            low, high = video.low, video.high
            if high.max() * 255 < 0.5:
                raise VideoError(
                    f"video {index}: all {video.frames} frames are black"
                    f" (largest value {high.max():.2g})"
                )
            # The margin is for 1/255 not being a float.
            if (high - low).max() <= 1 / 255 + 1e-6:
                colour = ", ".join(f"{value:.3f}" for value in (low + high) / 2)
                raise VideoError(
                    f"video {index}: all pixels of its {video.frames} frames have the "
                    f"same colour ({colour})"
                )


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Frames in [0, 1] as bytes: ``rint(x * 255)``, values outside clipped.

    A tie goes to the even byte, as in upstream's ``VaeImageProcessor.numpy_to_pil``
    (diffusers ``image_processor.py``). Bytes come back as they are.

    Raises:
        VideoError: a value is NaN or infinite, or the frames are integers of another
            type.
    """
    import numpy as np

    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise VideoError(f"frames must be float or uint8, not {frames.dtype}")
    if not np.isfinite(frames).all():
        raise VideoError("the frames hold NaN or infinite values")
    # float16 cannot tell the neighbours of 255 * x apart.
    wide = frames.astype(np.float32, copy=False)
    return np.rint(np.clip(wide, 0, 1) * 255).astype(np.uint8)
