"""Frames as a program gives them, and whether they can be a video at all.

Letters: B videos of a batch, F frames of a call, Y rows, X columns; 3 is red, green,
blue. They leave a device as planes [B, 3, F, Y, X]: on a TPU three colours as the last
dim take the memory of 128. The host makes frames [B, F, Y, X, 3] of them. Statistics
are of the floats, before they become bytes, so that what is wrong with a video is found
where only its bytes reach the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Pixels
from tpuport.errors import UsageError, VideoError

if TYPE_CHECKING:
    import jax
    import numpy as np

    from tpuport.core.mesh.spatial_split import Space

PIXELS = tuple(Pixels)
"""What frames are made of: floats in [0, 1], or bytes."""

STATISTICS = ("finite", "low", "high")
"""What :func:`encode_pixels` tells besides the frames."""


def check_pixels(pixels: str) -> Pixels:
    """``pixels``, if it is one of :class:`Pixels`.

    Raises:
        UsageError: it is not.
    """
    if pixels not in list(Pixels):
        raise UsageError(f"pixels {pixels!r}: choose from {', '.join(Pixels)}")
    return Pixels(pixels)


# --- on the device


def encode_pixels(
    x: jax.Array,
    pixels: str,
    space: Space | None = None,
    counts: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Planes as they leave the device, with what :class:`FrameChecks` needs of them.

    Bytes are those of :func:`tpuport.core.files.frames.to_uint8`: the same float32
    product, rounded the same way, a tie to the even byte.

    Args:
        x: float32 of shape [B, 3, F, Y, X]; values outside [0, 1] are clipped.
        pixels: ``"float32"`` or ``"uint8"``.
        space: how the picture is split over devices, where it is; the statistics are
            then of the whole picture.
        counts: booleans [F]: which frames are of the video; the statistics leave the
            others out, of which nothing is finite then. All of them without it.

    Returns:
        ``frames`` [B, 3, F, Y, X], for :func:`as_frames`; ``finite`` int32 [B, F], how
        many values of a frame are finite (counted before the clip, which would hide an
        infinite one); ``low`` and ``high`` float32 [B, 3], the extremes of each colour
        after it.

    Raises:
        UsageError: ``pixels`` is neither.
    """
    import jax
    import jax.numpy as jnp

    check_pixels(pixels)
    # Planes once: each of what follows would else take its three colours out of the
    # 128 that a TPU has of them, and turn them, by itself.
    x = jax.lax.optimization_barrier(x.astype(jnp.float32))
    clipped = jnp.clip(x, 0.0, 1.0)
    frames = clipped
    if pixels == Pixels.UINT8:
        # NaN has no byte; what becomes of it is never shown.
        whole = jnp.nan_to_num(clipped, nan=0.0)
        frames = jnp.rint(whole * jnp.float32(255)).astype(jnp.uint8)
    finite, lows, highs = jnp.isfinite(x), clipped, clipped
    real = None if space is None else space.mask(x.shape, (3, 4))
    if counts is not None:
        counts = counts[:, None, None]
        real = counts if real is None else real & counts
    if real is not None:
        finite = finite & real
        lows = jnp.where(real, lows, jnp.inf)
        highs = jnp.where(real, highs, -jnp.inf)
    count = finite.sum(axis=(1, 3, 4), dtype=jnp.int32)
    low, high = lows.min(axis=(2, 3, 4)), highs.max(axis=(2, 3, 4))
    if space is not None:
        count, low, high = space.sum(count), space.smallest(low), space.largest(high)
    return {"frames": frames, "finite": count, "low": low, "high": high}


# --- on the host


def as_frames(planes: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Planes [B, 3, F, Y, X] as frames [B, F, rows, columns, 3].

    Split in space, a picture comes with phantom rows and columns at the end: what is
    beyond ``rows`` and ``columns`` is cut off.
    """
    import numpy as np

    return np.ascontiguousarray(np.moveaxis(planes[..., :rows, :columns], 1, -1))


def measure(frames: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics of :func:`encode_pixels`, of whole frames that are on the host.

    Args:
        frames: float of shape [B, F, Y, X, 3], in [0, 1].
    """
    import numpy as np

    return {
        # Booleans, a quarter of the floats; one video at a time.
        "finite": np.stack([np.isfinite(video).sum((1, 2, 3)) for video in frames]),
        "low": frames.min(axis=(1, 2, 3)),
        "high": frames.max(axis=(1, 2, 3)),
    }


def encode_on_host(x: np.ndarray, pixels: str) -> dict[str, np.ndarray]:
    """:func:`encode_pixels` of planes [B, 3, F, Y, X] that are on the host.

    Raises:
        UsageError: ``pixels`` is neither.
    """
    import numpy as np

    check_pixels(pixels)
    finite = np.isfinite(x).sum(axis=(1, 3, 4), dtype=np.int32)
    frames = np.clip(x, 0, 1)
    low, high = frames.min(axis=(2, 3, 4)), frames.max(axis=(2, 3, 4))
    if pixels == Pixels.UINT8:
        frames = to_uint8(np.nan_to_num(frames, nan=0.0, copy=False))
    return {"frames": frames, "finite": finite, "low": low, "high": high}


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
            statistics: from :func:`encode_pixels` or :func:`measure`.

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
